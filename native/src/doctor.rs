//! `ebbtide doctor`: what this machine offers, what the engine would use, what is missing and how to get it.
//!
//! It answers the questions that come before every bug report: which adapters answer, which one would be taken and how
//! to take another, whether it can run the engine at all, what budget is sensible, and with `--measure` how fast weights
//! can come from disk and reach the device. It only looks; nothing on the machine is changed.

mod measure;

use crate::engine::short;
use crate::speeds::Speeds;

use ebbtide::error::{Bytes, Error};
use serde::Serialize;
use std::path::Path;

/// Environment variable with a part of the name of the adapter to use.
const ADAPTER_VARIABLE: &str = "EBBTIDE_ADAPTER";

/// Budget that `auto` falls back to where nobody can say how much device memory is free.
const AUTO_BLIND: u64 = ebbtide::Budget::AUTO_DEFAULT;

/// Arguments of `ebbtide doctor`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// Measure disk reads (a temporary file of 256 MiB in the current folder) and uploads to the device
    #[arg(long)]
    pub measure: bool,
}

#[derive(Serialize)]
struct Report {
    format: u32,
    engine: &'static str,
    os: &'static str,
    arch: &'static str,
    cores: usize,
    host_memory: Option<Memory>,
    adapters: Vec<Adapter>,
    wanted_adapter: Option<String>,
    budget: Option<Advice>,
    measured: Option<measure::Measured>,
    missing: Vec<Missing>,
    /// Why the engine cannot run here, as every command with `--json` says it.
    error: Option<Failure>,
}

#[derive(Serialize)]
struct Failure {
    code: &'static str,
    message: String,
}

#[derive(Clone, Copy, Serialize)]
struct Memory {
    total_bytes: u64,
    free_bytes: u64,
}

#[derive(Serialize)]
struct Adapter {
    name: String,
    backend: String,
    #[serde(rename = "type")]
    kind: &'static str,
    driver: String,
    pci: Option<String>,
    chosen: bool,
    usable: bool,
    /// Limits below what the engine needs, in words.
    too_small: Vec<String>,
    limits: Limits,
    features: Features,
    /// Who can say, from outside the engine, how much memory it holds.
    witness: &'static str,
    device_memory: Option<Memory>,
}

#[derive(Serialize)]
struct Limits {
    max_buffer_bytes: u64,
    max_storage_binding_bytes: u64,
    storage_alignment: u32,
    storage_buffers: u32,
    workgroup_bytes: u32,
    workgroup_invocations: u32,
    workgroups_per_dimension: u32,
}

#[derive(Serialize)]
struct Features {
    f16: bool,
    subgroups: Option<[u32; 2]>,
    timestamps: bool,
    mappable_primary_buffers: bool,
}

#[derive(Serialize)]
struct Advice {
    auto_bytes: u64,
    why: String,
}

#[derive(Serialize)]
struct Missing {
    what: String,
    how: String,
}

/// Looks around and reports.
///
/// # Errors
///
/// [`Error::NoAdapter`] (exit status 4) after the report, where no adapter has the name asked for or none can run the
/// engine; a failed measurement.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let wanted = std::env::var(ADAPTER_VARIABLE).ok().filter(|name| !name.is_empty());
    let host_memory = host_memory();
    let mut adapters: Vec<Adapter> = found.iter().map(|adapter| describe(adapter, host_memory)).collect();
    let chosen = choose(&adapters, wanted.as_deref());
    if let Some(index) = chosen {
        adapters[index].chosen = true;
    }
    let measured = match chosen {
        Some(index) if args.measure => Some(measure::run(&found[index])?),
        _ => None,
    };
    if let Some(measured) = &measured {
        let mut speeds = Speeds::load();
        speeds.measured(measured.disk_read.unwrap_or(measured.cached_read), measured.upload_refill);
        speeds.remember();
    }
    let reason = match (&wanted, chosen) {
        (Some(name), None) => Some(format!("none has `{name}` in its name")),
        (None, None) => Some("none answers".to_owned()),
        _ if adapters.iter().all(|adapter| !adapter.usable) => {
            Some("none has the limits that the engine needs".to_owned())
        }
        _ => None,
    };
    let error = reason.map(|reason| Error::NoAdapter { reason });
    let report = Report {
        format: 1,
        engine: env!("CARGO_PKG_VERSION"),
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
        host_memory,
        budget: chosen.map(|index| advise(&adapters[index])),
        missing: missing(&adapters, wanted.as_deref(), chosen),
        adapters,
        wanted_adapter: wanted,
        measured,
        error: error.as_ref().map(|e| Failure { code: e.code(), message: e.to_string() }),
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        if let Some(error) = error {
            // The object above holds the error; returned, it would be printed as a second object.
            eprintln!("error: {error}");
            std::process::exit(error.exit_status().into());
        }
        return Ok(());
    }
    print!("{}", text(&report));
    error.map_or(Ok(()), |error| Err(error.into()))
}

fn describe(adapter: &wgpu::Adapter, host: Option<Memory>) -> Adapter {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let mut too_small = Vec::new();
    let wanted = wgpu::Limits::default();
    let mut need = |name: &str, need: u64, have: u64| {
        if have < need {
            too_small.push(format!("{name} {have}, needed {need}"));
        }
    };
    // WebGPU's defaults, which every shader and plan of the engine keeps to.
    need("storage binding", wanted.max_storage_buffer_binding_size, limits.max_storage_buffer_binding_size);
    need("buffer", wanted.max_buffer_size, limits.max_buffer_size);
    let counts = |l: &wgpu::Limits| {
        [
            ("storage buffers", l.max_storage_buffers_per_shader_stage),
            ("workgroup memory", l.max_compute_workgroup_storage_size),
            ("workgroup size", l.max_compute_invocations_per_workgroup),
            ("workgroups a dimension", l.max_compute_workgroups_per_dimension),
        ]
    };
    for ((name, want), (_, have)) in counts(&wanted).into_iter().zip(counts(&limits)) {
        need(name, want.into(), have.into());
    }
    let pci = Some(info.device_pci_bus_id).filter(|id| !id.is_empty());
    let software = info.device_type == wgpu::DeviceType::Cpu;
    let amd = pci.as_deref().and_then(amdgpu_memory);
    Adapter {
        backend: info.backend.to_string(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "software",
            wgpu::DeviceType::Other => "other",
        },
        driver: [info.driver, info.driver_info]
            .iter()
            .filter(|s| !s.is_empty())
            .cloned()
            .collect::<Vec<_>>()
            .join(", "),
        chosen: false,
        usable: too_small.is_empty(),
        too_small,
        limits: Limits {
            max_buffer_bytes: limits.max_buffer_size,
            max_storage_binding_bytes: limits.max_storage_buffer_binding_size,
            storage_alignment: limits.min_storage_buffer_offset_alignment,
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
            workgroup_bytes: limits.max_compute_workgroup_storage_size,
            workgroup_invocations: limits.max_compute_invocations_per_workgroup,
            workgroups_per_dimension: limits.max_compute_workgroups_per_dimension,
        },
        features: Features {
            f16: features.contains(wgpu::Features::SHADER_F16),
            subgroups: features
                .contains(wgpu::Features::SUBGROUP)
                .then_some([info.subgroup_min_size, info.subgroup_max_size]),
            timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
            mappable_primary_buffers: features.contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS),
        },
        witness: match info.backend {
            _ if software => "process memory",
            _ if amd.is_some() => "mem_info_vram_used of amdgpu",
            wgpu::Backend::Metal => "currentAllocatedSize of Metal",
            wgpu::Backend::Vulkan | wgpu::Backend::Dx12 => "the allocator report of wgpu",
            _ => "none",
        },
        device_memory: if software { host } else { amd },
        name: info.name,
        pci,
    }
}

/// The adapter that every command uses, by the rule of `ebbtide::gpu::Device::open`: the first of the fastest kind among
/// those whose name contains what was asked for (case does not matter).
fn choose(adapters: &[Adapter], wanted: Option<&str>) -> Option<usize> {
    let wanted = wanted.unwrap_or_default().to_lowercase();
    let kinds = ["discrete", "integrated", "virtual", "other", "software"];
    let named = adapters.iter().enumerate().filter(|(_, adapter)| adapter.name.to_lowercase().contains(&wanted));
    named
        .min_by_key(|(index, adapter)| (kinds.iter().position(|kind| *kind == adapter.kind), *index))
        .map(|(index, _)| index)
}

/// What `--budget auto` may use on the adapter that a command would open, and why.
pub fn auto_bytes(wanted: Option<&str>) -> (u64, String) {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let host = host_memory();
    let adapters: Vec<Adapter> = found.iter().map(|adapter| describe(adapter, host)).collect();
    let from_env = std::env::var(ADAPTER_VARIABLE).ok().filter(|name| !name.is_empty());
    match choose(&adapters, wanted.or(from_env.as_deref())) {
        Some(index) => {
            let advice = advise(&adapters[index]);
            (advice.auto_bytes, advice.why)
        }
        None => (AUTO_BLIND, "no adapter answers".into()),
    }
}

fn advise(adapter: &Adapter) -> Advice {
    match adapter.device_memory {
        Some(memory) => Advice {
            auto_bytes: memory.free_bytes / 10 * 8,
            why: format!("80 % of the {} that are free", short(memory.free_bytes)),
        },
        None => Advice { auto_bytes: AUTO_BLIND, why: "nothing here says how much device memory is free".into() },
    }
}

/// What stands in the way, each with the command that removes it.
fn missing(adapters: &[Adapter], wanted: Option<&str>, chosen: Option<usize>) -> Vec<Missing> {
    let mut list = Vec::new();
    let mut add = |what: &str, how: String| list.push(Missing { what: what.into(), how });
    let hardware = adapters.iter().any(|adapter| adapter.kind != "software");
    let narrowed = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].into_iter().find(|name| std::env::var_os(name).is_some());
    if let (true, Some(name)) = (adapters.is_empty(), narrowed) {
        add("no adapter answers", format!("{name} names the drivers to use: unset it, or name one that is installed"));
    } else if adapters.is_empty() {
        add("no adapter answers", install_driver());
    } else if let (Some(name), None) = (wanted, chosen) {
        let how = format!("set {ADAPTER_VARIABLE} to a part of one of the names above, or unset it");
        add(&format!("no adapter is called `{name}`"), how);
    }
    if let Some(chosen) = chosen.map(|index| &adapters[index]).filter(|adapter| !adapter.usable) {
        let how = match adapters.iter().find(|adapter| adapter.usable) {
            Some(other) => format!("choose another: {ADAPTER_VARIABLE}='{}'", other.name),
            None => install_driver(),
        };
        add(&format!("{} has not the limits that the engine needs", chosen.name), how);
    }
    if cfg!(target_os = "linux") && !hardware {
        if Path::new("/dev/nvidiactl").exists() {
            let how = "install the Vulkan part of the NVIDIA driver (Debian: `apt-get install nvidia-vulkan-icd`; in a \
                       container start it with NVIDIA_DRIVER_CAPABILITIES=all)";
            add("an NVIDIA GPU is here, but its Vulkan driver does not answer", how.into());
        }
        let nodes = std::fs::read_dir("/dev/dri").into_iter().flatten().flatten();
        let render: Vec<_> = nodes.filter(|n| n.file_name().to_string_lossy().starts_with("renderD")).collect();
        if render.iter().any(|node| std::fs::OpenOptions::new().read(true).write(true).open(node.path()).is_err()) {
            add(
                "a GPU is here, but this user may not open it",
                "sudo usermod -aG render,video \"$USER\", then log in anew".into(),
            );
        }
    }
    list
}

/// How to get a driver on this system.
fn install_driver() -> String {
    let packages = match std::env::consts::OS {
        "macos" => {
            return "Metal needs macOS 10.15 and a GPU that supports it; virtual machines often pass none on".into();
        }
        "windows" => return "install the GPU maker's driver; without a GPU, Windows 10 and later have WARP".into(),
        _ => std::fs::read_to_string("/etc/os-release").unwrap_or_default(),
    };
    let is = |names: &[&str]| {
        let ids = packages.lines().filter_map(|l| l.strip_prefix("ID=").or_else(|| l.strip_prefix("ID_LIKE=")));
        ids.flat_map(|ids| ids.trim_matches('"').split(' ')).any(|id| names.contains(&id))
    };
    let command = if is(&["debian", "ubuntu"]) {
        "apt-get update && apt-get install -y libvulkan1 mesa-vulkan-drivers"
    } else if is(&["fedora", "rhel", "centos"]) {
        "dnf install -y vulkan-loader mesa-vulkan-drivers"
    } else if is(&["arch"]) {
        "pacman -S vulkan-icd-loader vulkan-swrast"
    } else if is(&["alpine"]) {
        "apk add vulkan-loader mesa-vulkan-swrast"
    } else {
        "install the Vulkan loader and Mesa's Vulkan drivers (lavapipe among them, which needs no GPU)"
    };
    format!("{command} (for NVIDIA GPUs: NVIDIA's own driver)")
}

/// Total and free memory of the machine, where the system says so without special rights.
fn host_memory() -> Option<Memory> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total_bytes: field("MemTotal")?, free_bytes: field("MemAvailable")? })
}

/// Memory of an AMD GPU by its kernel driver; nothing for other GPUs.
fn amdgpu_memory(pci: &str) -> Option<Memory> {
    // The bus id comes from the driver and becomes part of a path.
    if !pci.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.') {
        return None;
    }
    let read = |name: &str| -> Option<u64> {
        let path = Path::new("/sys/bus/pci/devices").join(pci).join(name);
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let (total, used) = (read("mem_info_vram_total")?, read("mem_info_vram_used")?);
    Some(Memory { total_bytes: total, free_bytes: total.saturating_sub(used) })
}

fn text(report: &Report) -> String {
    let mut out = format!("ebbtide {} on {} {}, {} cores", report.engine, report.os, report.arch, report.cores);
    if let Some(memory) = report.host_memory {
        out += &format!(", {} of memory, {} free", short(memory.total_bytes), short(memory.free_bytes));
    }
    out += "\n\nAdapters\n";
    if report.adapters.is_empty() {
        out += "  none\n";
    }
    for adapter in &report.adapters {
        adapter_text(&mut out, adapter);
    }
    if report.adapters.iter().any(|adapter| adapter.chosen) {
        out += &format!(
            "\n* is used. For another: {ADAPTER_VARIABLE}=<part of its name>, or --device <part of its name>\n"
        );
    }
    if let Some(advice) = &report.budget {
        out += &format!("\nBudget\n  `--budget auto` is at most {}: {}\n", Bytes(advice.auto_bytes), advice.why);
        out += "  `floor` is the least a program can run in; a refused budget names it\n";
    }
    match &report.measured {
        Some(measured) => out += &format!("\nMeasured\n{}", measured.text()),
        None if report.budget.is_some() => out += "\nMeasured\n  nothing; add --measure for disk and upload speed\n",
        None => {}
    }
    out += "\nMissing\n";
    if report.missing.is_empty() {
        out += "  nothing\n";
    }
    for missing in &report.missing {
        out += &format!("  {}\n    {}\n", missing.what, missing.how);
    }
    out
}

fn adapter_text(out: &mut String, adapter: &Adapter) {
    let yes = |yes| if yes { "yes" } else { "no" };
    let mark = if adapter.chosen { '*' } else { ' ' };
    *out += &format!("{mark} {} ({}, {})\n", adapter.name, adapter.backend, adapter.kind);
    if !adapter.driver.is_empty() {
        *out += &format!("    driver    {}\n", adapter.driver);
    }
    let limits = &adapter.limits;
    *out += &format!(
        "    limits    buffer {}, binding {}, {} storage buffers, workgroup {} and {} threads, alignment {}\n",
        short(limits.max_buffer_bytes),
        short(limits.max_storage_binding_bytes),
        limits.storage_buffers,
        short(limits.workgroup_bytes.into()),
        limits.workgroup_invocations,
        limits.storage_alignment
    );
    let subgroups = match adapter.features.subgroups {
        Some([low, high]) if low == high => format!("of {low}"),
        Some([low, high]) => format!("of {low} to {high}"),
        None => "no".into(),
    };
    *out += &format!(
        "    features  f16 {}, subgroups {subgroups}, timestamps {}, mappable primary buffers {} (none is needed)\n",
        yes(adapter.features.f16),
        yes(adapter.features.timestamps),
        yes(adapter.features.mappable_primary_buffers)
    );
    if let Some(memory) = adapter.device_memory {
        *out += &format!("    memory    {}, {} free\n", short(memory.total_bytes), short(memory.free_bytes));
    }
    *out += &format!("    witness   {}\n", adapter.witness);
    if !adapter.usable {
        *out += &format!("    NOT USABLE: {}\n", adapter.too_small.join("; "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(name: &str, kind: &'static str, usable: bool) -> Adapter {
        Adapter {
            name: name.into(),
            backend: "vulkan".into(),
            kind,
            driver: String::new(),
            pci: None,
            chosen: false,
            usable,
            too_small: if usable { vec![] } else { vec!["buffer 1, needed 2".into()] },
            limits: Limits {
                max_buffer_bytes: 1 << 30,
                max_storage_binding_bytes: 128 << 20,
                storage_alignment: 256,
                storage_buffers: 8,
                workgroup_bytes: 16 << 10,
                workgroup_invocations: 256,
                workgroups_per_dimension: 65_535,
            },
            features: Features { f16: false, subgroups: None, timestamps: false, mappable_primary_buffers: false },
            witness: "none",
            device_memory: None,
        }
    }

    #[test]
    fn the_fastest_kind_among_those_of_the_name_is_chosen() {
        let list = [
            adapter("llvmpipe", "software", true),
            adapter("Arc", "integrated", true),
            adapter("Arc B580", "discrete", true),
        ];
        assert_eq!(choose(&list, None), Some(2));
        assert_eq!(choose(&list, Some("arc")), Some(2));
        assert_eq!(choose(&list, Some("LLVM")), Some(0));
        assert_eq!(choose(&list, Some("geforce")), None);
    }

    #[test]
    fn a_chosen_adapter_below_the_limits_is_named_together_with_one_that_would_do() {
        let list = [adapter("old", "discrete", false), adapter("llvmpipe", "software", true)];
        let found = missing(&list, None, choose(&list, None));
        assert!(found[0].what.contains("old") && found[0].how.contains("llvmpipe"));
    }

    #[test]
    fn a_machine_without_adapters_gets_a_command_to_run() {
        let list = missing(&[], None, None);
        assert!(list[0].what.contains("no adapter") && !list[0].how.is_empty());
    }

    #[test]
    fn an_adapter_name_that_nobody_has_is_named() {
        let list = missing(&[adapter("Arc", "integrated", true)], Some("radeon"), None);
        assert!(list[0].what.contains("`radeon`") && list[0].how.contains(ADAPTER_VARIABLE));
    }

    #[test]
    fn memory_is_read_from_the_kernels_text_and_nothing_invented_where_a_field_is_missing() {
        let memory = parse_meminfo("MemTotal:       16 kB\nMemFree: 1 kB\nMemAvailable:    8 kB\n");
        assert_eq!(memory.map(|m| (m.total_bytes, m.free_bytes)), Some((16_384, 8_192)));
        assert!(parse_meminfo("MemTotal: 16 kB\n").is_none());
    }

    #[test]
    fn a_bus_id_that_is_a_path_is_not_followed() {
        assert!(amdgpu_memory("../../../etc").is_none());
    }

    #[test]
    fn auto_is_80_percent_of_what_a_witness_says_is_free_and_2_gib_where_there_is_none() {
        let mut card = adapter("card", "discrete", true);
        assert_eq!(advise(&card).auto_bytes, 2 << 30);
        card.device_memory = Some(Memory { total_bytes: 200, free_bytes: 100 });
        assert_eq!(advise(&card).auto_bytes, 80);
    }
}
