//! `ebbtide probe stream`: the first founding program.
//!
//! Two files, `down` and `up`, each a weight and a bias; `x = x·w + b` through them in turn for a number of rounds,
//! the mean, and its gradient with respect to x. Peak weight memory is one file, however many rounds run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use ebbtide::compile::{self, Breakdown, Options};
use ebbtide::error::Bytes;
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::weights::{DType, Source};
use ebbtide::{Cancel, Catalog, Device, Error, Event, Graph, Pass, Program, Session};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::engine;
use crate::witness::{Testimony, Witness};

/// Arguments of `ebbtide probe stream`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide probe stream                              10 rounds, everything resident
  ebbtide probe stream --budget floor               the least memory: 39 loads
  ebbtide probe stream --budget floor --manual      loads and releases by hand: 80 lines of trace
  ebbtide probe stream --budget 74000 --rounds 1000 --json
  ebbtide probe stream --down down.safetensors --up up.safetensors --x x.safetensors --out result.safetensors")]
pub struct StreamArgs {
    /// Passes through down and up.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, default_value = "all", allow_hyphen_values = true)]
    pub budget: String,
    /// Load and release by hand, around each layer, whatever the budget.
    #[arg(long)]
    pub manual: bool,
    /// Give memory back to the driver between segments.
    #[arg(long)]
    pub keep_free_0: bool,
    /// Weights of `down`: w [1,1,48,64] and b [1,1,1,64].
    #[arg(long, value_name = "FILE", requires = "up")]
    pub down: Option<PathBuf>,
    /// Weights of `up`: w [1,1,64,48] and b [1,1,1,48].
    #[arg(long, value_name = "FILE", requires = "down")]
    pub up: Option<PathBuf>,
    /// The input, x [1,3,32,48].
    #[arg(long, value_name = "FILE")]
    pub x: Option<PathBuf>,
    /// Write loss and gradient there, as safetensors.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Part of the name of the adapter to use.
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// What the probe measured.
#[derive(Clone, Debug, Serialize)]
pub struct StreamReport {
    /// Loads and evictions as they happened.
    pub trace: Vec<String>,
    /// The mean; `None` when not finite.
    pub loss: Option<f32>,
    /// Whether the mean is finite.
    pub finite: bool,
    /// SHA-256 of the gradient's bytes.
    pub grad_sha256: String,
    /// Most device bytes, counted where buffers are made.
    pub peak_bytes: u64,
    /// The same, as planned.
    pub planned_peak_bytes: u64,
    /// The peak by category.
    pub peak_by_category: Breakdown,
    /// The least budget that can be kept.
    pub floor_bytes: u64,
    /// The budget in bytes.
    pub budget_bytes: u64,
    /// Segments loaded.
    pub loads: u64,
    /// Segments evicted.
    pub evictions: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// The adapter.
    pub adapter: String,
    /// Memory as seen from outside.
    pub witness: Testimony,
    /// Largest intermediate facts for people: not part of the JSON object.
    #[serde(skip)]
    pub budget: String,
}

/// Runs the command.
pub fn run(args: &StreamArgs) -> anyhow::Result<()> {
    let cancel = engine::cancel_on_ctrl_c();
    let report = engine::wait(measure(args, &cancel))?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report, args);
    }
    Ok(())
}

fn print(report: &StreamReport, args: &StreamArgs) {
    for line in &report.trace {
        println!("{line}");
    }
    println!();
    match report.loss {
        Some(loss) => println!("mean               {loss:e}"),
        None => println!("mean               not finite ({} rounds overflow f32)", args.rounds),
    }
    println!("gradient sha256    {}", report.grad_sha256);
    println!("adapter            {}", report.adapter);
    println!("budget             {} = {}", report.budget, Bytes(report.budget_bytes));
    println!("floor              {}", Bytes(report.floor_bytes));
    println!("peak               {} (planned {})", Bytes(report.peak_bytes), Bytes(report.planned_peak_bytes));
    for (category, bytes) in report.peak_by_category.iter() {
        println!("  {:<16} {}", category.name(), Bytes(bytes));
    }
    println!("loads, evictions   {}, {}", report.loads, report.evictions);
    println!("weights streamed   {}", Bytes(report.streamed_bytes));
    if let (Some(baseline), Some(peak)) = (report.witness.baseline_bytes, report.witness.peak_bytes) {
        println!("witness            {} over {}, {}", Bytes(peak - baseline), Bytes(baseline), report.witness.what);
    }
}

const DOWN: [(&str, [u64; 4]); 2] = [("w", [1, 1, 48, 64]), ("b", [1, 1, 1, 64])];
const UP: [(&str, [u64; 4]); 2] = [("w", [1, 1, 64, 48]), ("b", [1, 1, 1, 48])];
const X: [u64; 4] = [1, 3, 32, 48];

/// Runs the founding program and measures it.
pub async fn measure(args: &StreamArgs, cancel: &Cancel) -> anyhow::Result<StreamReport> {
    let (budget, why) = engine::budget(&args.budget, args.device.as_deref())?;
    // Files of our own live as long as the run, and go with it.
    let made = engine::temporary_folder()?;
    let (down, up) = match (&args.down, &args.up) {
        (Some(down), Some(up)) => (down.clone(), up.clone()),
        _ => {
            let (down, up) = (made.path().join("down.safetensors"), made.path().join("up.safetensors"));
            make_file(&down, &DOWN, 1)?;
            make_file(&up, &UP, 2)?;
            (down, up)
        }
    };
    let x = match &args.x {
        Some(file) => read_x(file).await?,
        None => random(3, 3 * 32 * 48, 1.0),
    };
    let catalog = Catalog::from_sources(vec![Source::open(&down)?, Source::open(&up)?]).await?;
    check_shapes(&catalog, 0, &down, &DOWN)?;
    check_shapes(&catalog, 1, &up, &UP)?;
    if let Some(out) = &args.out {
        let inputs: Vec<&Path> =
            [Some(&down), Some(&up), args.x.as_ref()].into_iter().flatten().map(|p| p.as_path()).collect();
        engine::refuse_overwriting("--out", out, &inputs)?;
    }
    let program = founding_program(&catalog, args.rounds, args.manual)?;
    // The plan comes first: a budget that cannot be kept is refused before any GPU work.
    let options = Options { once: true, keep_free_0: args.keep_free_0, ..Options::default() };
    compile::compile_with(
        std::slice::from_ref(&program),
        &catalog,
        &ebbtide::Caps::webgpu_defaults(),
        budget,
        options,
    )?;

    let device = engine::open_device(args.device.as_deref()).await?;
    let set = compile::compile_with(&[program], &catalog, device.caps(), budget, options)?;
    let (planned, floor, budget_bytes) = (set.planned_peak(), set.floor, set.budget);
    let witness = Witness::start();
    device.reset_peak_memory();
    let mut session = Session::new(&device, &catalog, set).await?;
    let mut trace = Vec::new();
    let mut events = |event: Event| trace.extend(trace_line(&event));
    let out = session.run(0, &[("x", bytes_of(&x))], cancel, &mut events).await?;
    let usage = device.ledger().usage();
    let loss = out.f32("loss")?[0];
    if let Some(file) = &args.out {
        save(file, &out)?;
    }
    Ok(StreamReport {
        trace,
        loss: loss.is_finite().then_some(loss),
        finite: loss.is_finite(),
        grad_sha256: hex(&Sha256::digest(out.bytes("grad.0")?)),
        peak_bytes: usage.peak,
        planned_peak_bytes: planned,
        peak_by_category: usage.at_peak,
        floor_bytes: floor,
        budget_bytes,
        loads: out.loads,
        evictions: out.evictions,
        streamed_bytes: out.streamed_bytes,
        adapter: adapter_name(&device),
        witness: witness.finish(),
        budget: match why {
            Some(why) => format!("{budget}: {why}"),
            None => budget.to_string(),
        },
    })
}

fn adapter_name(device: &Device) -> String {
    device.caps().adapter.clone()
}

/// `x = x·w + b` through both files in turn, the mean, its gradient with respect to x.
pub fn founding_program(catalog: &Catalog, rounds: u32, manual: bool) -> ebbtide::Result<Program> {
    let segments: Vec<_> = catalog.segments().cloned().collect();
    let mut g = Graph::new();
    let x = g.input("x", X)?;
    let mut h = x;
    for _ in 0..rounds {
        for segment in &segments {
            h = if manual {
                g.with(segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?)))?
            } else {
                let (w, b) = (g.weight(segment, "w")?, g.weight(segment, "b")?);
                g.matmul(h, w, Some(b))?
            };
        }
    }
    let loss = g.mean(h)?;
    g.value_and_grad(loss, &[x])
}

fn trace_line(event: &Event) -> Option<String> {
    let pass = |p: &Pass| match p {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
    };
    match event {
        Event::Load { segment, pass: p, .. } => Some(format!("{}_load({segment}.safetensors)", pass(p))),
        Event::Evict { segment, pass: p } => Some(format!("{}_unload({segment}.safetensors)", pass(p))),
        _ => None,
    }
}

fn check_shapes(catalog: &Catalog, index: usize, file: &Path, want: &[(&str, [u64; 4])]) -> ebbtide::Result<()> {
    let refuse = |tensor: &str, reason: String| {
        Err(Error::Format { file: file.display().to_string(), tensor: Some(tensor.into()), reason })
    };
    let Some(segment) = catalog.segments().nth(index) else {
        return refuse("w", "the file holds no weights".into());
    };
    for (name, shape) in want {
        let weight = catalog.weight(segment.weight(name)?);
        if weight.shape != shape || weight.dtype != DType::F32 {
            return refuse(
                name,
                format!(
                    "it is {:?} of shape {:?}, but the program needs F32 of shape {shape:?}",
                    weight.dtype, weight.shape
                ),
            );
        }
    }
    Ok(())
}

async fn read_x(file: &Path) -> ebbtide::Result<Vec<f32>> {
    let catalog = Catalog::from_sources(vec![Source::open(file)?]).await?;
    let id = catalog.find("x")?;
    let weight = catalog.weight(id);
    if weight.shape != X || weight.dtype != DType::F32 {
        return Err(Error::Format {
            file: file.display().to_string(),
            tensor: Some("x".into()),
            reason: format!(
                "it is {:?} of shape {:?}, but the program needs F32 of shape {X:?}",
                weight.dtype, weight.shape
            ),
        });
    }
    let bytes = catalog.read(id).await?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn make_file(path: &Path, tensors: &[(&str, [u64; 4])], seed: u64) -> ebbtide::Result<()> {
    let data: Vec<(TensorSpec, Vec<f32>)> = tensors
        .iter()
        .enumerate()
        .map(|(i, (name, shape))| {
            let n = shape.iter().product::<u64>() as usize;
            (TensorSpec::new(*name, DType::F32, shape.to_vec()), random(seed * 16 + i as u64, n, 1.0))
        })
        .collect();
    let tensors: Vec<(TensorSpec, &[u8])> = data.iter().map(|(s, v)| (s.clone(), bytes_of(v))).collect();
    ebbtide::rt::file::save_atomically(path, |out| {
        write(out, &path.display().to_string(), &tensors, &BTreeMap::new()).map(|_| ())
    })
}

fn save(path: &Path, out: &ebbtide::Outputs) -> ebbtide::Result<()> {
    let tensors = [
        (TensorSpec::new("loss", DType::F32, [1]), out.bytes("loss")?),
        (TensorSpec::new("grad_x", DType::F32, X), out.bytes("grad.0")?),
    ];
    ebbtide::rt::file::save_atomically(path, |file| {
        write(file, &path.display().to_string(), &tensors, &BTreeMap::new()).map(|_| ())
    })
}

/// Numbers between -scale and scale, the same on every machine: a SplitMix64 counter.
pub fn random(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    (0..n as u64)
        .map(|i| {
            let mut z = (seed << 32).wrapping_add(i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            ((z >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
        })
        .collect()
}

fn bytes_of(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
