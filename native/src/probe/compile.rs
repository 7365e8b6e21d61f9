//! `ebbtide probe compile`: the second founding program.
//!
//! A stack of bias-free linear layers whose weights are stored [out, in] and read transposed. Compiling folds the
//! transposition into the weights; what is measured is that the device never holds two copies of the model while it
//! does so, and that the folded program gives the bits of the unfolded one.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use ebbtide::compile::{Category, CompileReport, Options, PlanSet, compile_with};
use ebbtide::error::Bytes;
use ebbtide::weights::safetensors::{TensorSpec, Writer};
use ebbtide::weights::{DType, Segment, Source};
use ebbtide::{Budget, Cancel, Catalog, Device, Error, Event, Graph, Program, Session};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::stream::random;
use crate::engine;
use crate::witness::{Witness, resident_bytes};

/// Rows of the batch that is run.
const BATCH: u64 = 8;

/// Arguments of `ebbtide probe compile`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide probe compile                             3 GiB of f16 weights, folded with one weight to spare
  ebbtide probe compile --layers 8 --width 1024     the same, smaller
  ebbtide probe compile --budget 512MiB             the same model in less: weights stream as stored
  ebbtide probe compile --json | jq '.peak_bytes, .planned_peak_bytes'
  ebbtide probe compile --file stack.safetensors")]
pub struct CompileArgs {
    /// Linear layers.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub layers: u32,
    /// Rows and columns of each weight.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub width: u32,
    /// How the weights are stored.
    #[arg(long, value_enum, default_value_t = Stored::F16)]
    pub dtype: Stored,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, default_value = "all")]
    pub budget: String,
    /// Take the stack from this file: its matrices by name, each [out, in].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["layers", "width", "dtype"])]
    pub file: Option<PathBuf>,
    /// Part of the name of the adapter to use.
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Number formats of the file that is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stored {
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

/// A moment, and what the ledger and the witness said then.
#[derive(Clone, Debug, Serialize)]
pub struct StageReport {
    /// The moment.
    pub name: &'static str,
    /// Device bytes in the ledger.
    pub ledger_bytes: u64,
    /// Memory of the process over its baseline.
    pub witness_bytes: Option<u64>,
}

/// What was seen from outside, in bytes over the baseline.
#[derive(Clone, Debug, Serialize)]
pub struct WitnessReport {
    /// What was measured.
    pub what: &'static str,
    /// Before the model.
    pub baseline: Option<u64>,
    /// Most over the baseline.
    pub peak: Option<u64>,
    /// Over the baseline, after compiling.
    pub held: Option<u64>,
}

/// Wall time of the parts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Seconds {
    /// Making the file.
    pub file: f64,
    /// Planning and folding.
    pub compile: f64,
    /// One batch.
    pub run: f64,
    /// Reading the weights and dispatching the transpositions one by one.
    pub one_by_one: Option<f64>,
    /// Compiling over one by one.
    pub ratio: Option<f64>,
}

/// What the probe measured. All sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeReport {
    /// The weights as stored.
    pub weight_bytes: u64,
    /// Constants on the device after compiling, by the ledger.
    pub held_bytes: u64,
    /// Most on the device while compiling and running, by the ledger.
    pub peak_bytes: u64,
    /// The same, as planned.
    pub planned_peak_bytes: u64,
    /// What the largest fold needs beyond what is held.
    pub largest_fold_bytes: u64,
    /// Upload and readback rings.
    pub staging_bytes: u64,
    /// Greatest absolute difference to the unfolded run; `None` where one of two values is no number.
    pub max_abs_diff: Option<f64>,
    /// Whether the outputs have the same bits.
    pub same_bits: bool,
    /// The stages, in order.
    pub stages: Vec<StageReport>,
    /// Memory from outside.
    pub witness: WitnessReport,
    /// Wall time.
    pub seconds: Seconds,
    /// The compiler's own report.
    pub report: CompileReport,
    /// The least budget that can be kept.
    pub floor_bytes: u64,
    /// The adapter.
    pub adapter: String,
}

/// Runs the command.
pub fn run(args: &CompileArgs) -> anyhow::Result<()> {
    let cancel = engine::cancel_on_ctrl_c();
    let report = engine::wait(measure(args, &cancel))?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn print(r: &ProbeReport) {
    println!("{:<16} {:>16} {:>16}", "stage", "ledger", "witness");
    for s in &r.stages {
        println!("{:<16} {:>16} {:>16}", s.name, mib(Some(s.ledger_bytes)), mib(s.witness_bytes));
    }
    println!();
    println!("adapter          {}", r.adapter);
    println!("weights          {}", Bytes(r.weight_bytes));
    println!(
        "held             {} ({:.4} of the weights)",
        Bytes(r.held_bytes),
        r.held_bytes as f64 / r.weight_bytes as f64
    );
    println!(
        "peak             {} ({:.4}; planned {})",
        Bytes(r.peak_bytes),
        r.peak_bytes as f64 / r.weight_bytes as f64,
        Bytes(r.planned_peak_bytes)
    );
    println!("largest fold     {}", Bytes(r.largest_fold_bytes));
    println!("staging          {}", Bytes(r.staging_bytes));
    println!("witness          peak {}, held {}: {}", mib(r.witness.peak), mib(r.witness.held), r.witness.what);
    println!("folded           {}, not folded {}", r.report.folded.len(), r.report.skipped.len());
    for (name, why) in r.report.skipped.iter().chain(&r.report.retained).take(4) {
        println!("  {name}: {why}");
    }
    match r.max_abs_diff {
        Some(diff) => println!("difference       {diff:e}{}", if r.same_bits { ", the same bits" } else { "" }),
        None => println!("difference       not a number"),
    }
    let s = &r.seconds;
    println!("seconds          compile {:.2}, run {:.2}", s.compile, s.run);
    if let (Some(naive), Some(ratio)) = (s.one_by_one, s.ratio) {
        println!("                 reading and transposing one by one {naive:.2}, ratio {ratio:.2}");
    }
}

fn mib(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |b| format!("{:.1} MiB", b as f64 / 1048576.0))
}

/// A weight of each layer, and the program that runs them.
struct Stack {
    catalog: Catalog,
    segments: Vec<Segment>,
    columns: u64,
}

impl Stack {
    /// The matrices of a file, in the order of their names, each a segment of its own.
    async fn open(file: &Path) -> ebbtide::Result<Stack> {
        let mut catalog = Catalog::from_sources(vec![Source::open(file)?]).await?;
        let refuse = |tensor: Option<&str>, reason: String| Error::Format {
            file: file.display().to_string(),
            tensor: tensor.map(Into::into),
            reason,
        };
        let mut names: Vec<String> = catalog.names().map(str::to_string).collect();
        names.sort_unstable();
        let (mut segments, mut columns, mut width) = (Vec::new(), None, 0);
        for name in &names {
            let id = catalog.find(name)?;
            let shape = catalog.weight(id).shape.clone();
            if shape.len() != 2 {
                continue;
            }
            if columns.is_some() && shape[1] != width {
                let reason = format!("it has {} columns, but the layer before it has {width} rows", shape[1]);
                return Err(refuse(Some(name), reason));
            }
            columns.get_or_insert(shape[1]);
            width = shape[0];
            segments.push(catalog.define_segment(&format!("layer {}", segments.len()), &[("weight", id)])?);
        }
        match columns {
            Some(columns) => Ok(Stack { catalog, segments, columns }),
            None => Err(refuse(None, "the file holds no matrix".into())),
        }
    }

    /// `h = h · Wᵀ` through some of the layers.
    fn program(&self, layers: &[Segment], columns: u64) -> ebbtide::Result<Program> {
        let mut g = Graph::new();
        let mut h = g.input("x", [BATCH, columns])?;
        for segment in layers {
            let w = g.weight(segment, "weight")?;
            let w = g.transpose(w)?;
            h = g.matmul(h, w, None)?;
        }
        g.outputs(&[("y", h)])
    }

    fn whole(&self) -> ebbtide::Result<Program> {
        self.program(&self.segments, self.columns)
    }

    fn columns_of(&self, segment: &Segment) -> ebbtide::Result<u64> {
        Ok(self.catalog.weight(segment.weight("weight")?).shape[1])
    }

    fn weight_bytes(&self) -> u64 {
        self.segments.iter().map(|s| self.catalog.segment_bytes(s)).sum()
    }
}

/// Compiles the stack, runs it and measures both.
pub async fn measure(args: &CompileArgs, cancel: &Cancel) -> anyhow::Result<ProbeReport> {
    let (budget, _) = engine::budget(&args.budget, args.device.as_deref())?;
    // A file of our own goes with the folder, also when the run fails or is interrupted.
    let made = engine::temporary_folder()?;
    let begun = Instant::now();
    let file = match &args.file {
        Some(file) => file.clone(),
        None => {
            let file = made.path().join("stack.safetensors");
            make_file(&file, args, cancel)?;
            file
        }
    };
    let mut seconds = Seconds { file: begun.elapsed().as_secs_f64(), ..Default::default() };
    let stack = Stack::open(&file).await?;
    // The plan comes first: a budget that cannot be kept is refused before any GPU work.
    compile_with(&[stack.whole()?], &stack.catalog, &ebbtide::Caps::webgpu_defaults(), budget, Options::default())?;

    let device = engine::open_device(args.device.as_deref()).await?;
    let x = random(7, (BATCH * stack.columns) as usize, 1.0);
    let witness = Witness::start();
    let baseline = resident_bytes();
    let over = move |bytes: Option<u64>| Some(bytes?.saturating_sub(baseline?));
    let mut stages = Vec::new();
    let mut stage = |name, ledger_bytes, witness_bytes| stages.push(StageReport { name, ledger_bytes, witness_bytes });
    let now = || (device.active_memory(), over(resident_bytes()));

    let program = stack.whole()?;
    stage("model built", now().0, now().1);
    device.reset_peak_memory();
    let begun = Instant::now();
    stage("compile start", now().0, now().1);
    let set = compile_with(&[program], &stack.catalog, device.caps(), budget, Options::default())?;
    let loads = set.prologue.loads().max(set.home.len());
    let mut session = begin(&device, &stack.catalog, set, cancel, "folding", loads as u64).await?;
    seconds.compile = begun.elapsed().as_secs_f64();
    stage("folding pass", device.peak_memory(), over(witness.peak()));
    let held = device.ledger().usage().active;
    let held_bytes = held.get(Category::Weights) + held.get(Category::Folded);
    let witness_held = over(resident_bytes());
    stage("compile end", now().0, now().1);

    let begun = Instant::now();
    let y = run_once(&mut session, &x, cancel).await?;
    seconds.run = begun.elapsed().as_secs_f64();
    stage("after run", now().0, now().1);
    let set = session.set();
    let (planned_peak_bytes, floor_bytes, report) = (set.planned_peak(), set.floor, set.report.clone());
    let (peak_bytes, testimony) = (device.peak_memory(), witness.finish());
    drop(session);

    // The comparisons come after the measurement, each in a session of its own, so that no peak is mixed.
    if report.folded.len() == stack.segments.len() {
        let naive = one_by_one(&device, &stack, cancel).await?;
        (seconds.one_by_one, seconds.ratio) = (Some(naive), Some(seconds.compile / naive));
    }
    let options = Options { no_fold: true, ..Options::default() };
    let unfolded = compile_with(&[stack.whole()?], &stack.catalog, device.caps(), budget, options)?;
    let loads = unfolded.home.len() as u64;
    let mut session = begin(&device, &stack.catalog, unfolded, cancel, "loading unfolded", loads).await?;
    let want = run_once(&mut session, &x, cancel).await?;
    drop(session);

    Ok(ProbeReport {
        weight_bytes: stack.weight_bytes(),
        held_bytes,
        peak_bytes,
        planned_peak_bytes,
        largest_fold_bytes: report.largest_fold_bytes,
        staging_bytes: report.staging_bytes,
        max_abs_diff: difference(&y, &want),
        same_bits: y.iter().map(|v| v.to_bits()).eq(want.iter().map(|v| v.to_bits())),
        stages,
        witness: WitnessReport { what: testimony.what, baseline, peak: over(testimony.peak_bytes), held: witness_held },
        seconds,
        report,
        floor_bytes,
        adapter: device.caps().adapter.clone(),
    })
}

/// A session, with progress for what takes long.
async fn begin(
    device: &Device,
    catalog: &Catalog,
    set: PlanSet,
    cancel: &Cancel,
    what: &'static str,
    loads: u64,
) -> ebbtide::Result<Session> {
    let mut progress = Progress::new(what, loads);
    let mut events = |event: Event| {
        if let Event::Load { .. } = event {
            progress.add(1);
        }
    };
    Session::begin(device, catalog, set, cancel, &mut events).await
}

async fn run_once(session: &mut Session, x: &[f32], cancel: &Cancel) -> ebbtide::Result<Vec<f32>> {
    let mut progress = Progress::new("loads of a run", session.set().plans[0].loads() as u64);
    let mut events = |event: Event| {
        if let Event::Load { .. } = event {
            progress.add(1);
        }
    };
    session.run(0, &[("x", bytemuck::cast_slice(x))], cancel, &mut events).await?.f32("y")
}

/// Reads each weight and dispatches its transposition, one after the other: what compiling may not be much slower
/// than. Kernels are compiled already.
async fn one_by_one(device: &Device, stack: &Stack, cancel: &Cancel) -> ebbtide::Result<f64> {
    let mut progress = Progress::new("one by one", stack.segments.len() as u64);
    let mut seconds = 0.0;
    for segment in &stack.segments {
        let program = stack.program(std::slice::from_ref(segment), stack.columns_of(segment)?)?;
        let begun = Instant::now();
        let set = compile_with(&[program], &stack.catalog, device.caps(), Budget::All, Options::default())?;
        drop(Session::begin(device, &stack.catalog, set, cancel, &mut ebbtide::event::NoEvents).await?);
        seconds += begun.elapsed().as_secs_f64();
        progress.add(1);
    }
    Ok(seconds)
}

fn difference(a: &[f32], b: &[f32]) -> Option<f64> {
    let mut greatest = 0.0f64;
    for (a, b) in a.iter().zip(b) {
        let d = if a.to_bits() == b.to_bits() { 0.0 } else { (f64::from(*a) - f64::from(*b)).abs() };
        if d.is_nan() {
            return None;
        }
        greatest = greatest.max(d);
    }
    Some(greatest)
}

/// Progress on stderr for what takes longer than a second.
struct Progress {
    what: &'static str,
    total: u64,
    done: u64,
    begun: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(what: &'static str, total: u64) -> Progress {
        Progress { what, total, done: 0, begun: Instant::now(), bar: None }
    }

    fn add(&mut self, more: u64) {
        self.done += more;
        if self.bar.is_none() && self.begun.elapsed() > Duration::from_secs(1) {
            let bar = ProgressBar::new(self.total).with_message(self.what);
            if let Ok(style) = ProgressStyle::with_template("{msg:>18} {wide_bar} {pos}/{len} {eta}") {
                bar.set_style(style);
            }
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(self.done.min(self.total));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Writes the stack, a piece at a time: no weight is ever whole in memory.
fn make_file(path: &Path, args: &CompileArgs, cancel: &Cancel) -> ebbtide::Result<()> {
    let name = path.display().to_string();
    let io = |e: std::io::Error| Error::Io { file: name.clone(), reason: e.to_string() };
    let width = u64::from(args.width);
    let dtype = match args.dtype {
        Stored::F16 => DType::F16,
        Stored::Bf16 => DType::BF16,
        Stored::F32 => DType::F32,
    };
    let digits = args.layers.to_string().len();
    let specs: Vec<TensorSpec> = (0..args.layers)
        .map(|i| TensorSpec::new(format!("layers.{i:0digits$}.weight"), dtype, [width, width]))
        .collect();
    let mut out = Writer::new(File::create(path).map_err(io)?, &name, &specs, &BTreeMap::new())?;
    let bytes = width * width * dtype.size();
    let mut progress = Progress::new("writing weights", u64::from(args.layers));
    let mut piece = vec![0u8; (1 << 20).min(bytes.next_multiple_of(8) as usize)];
    for layer in out.order().to_vec() {
        let mut at = 0;
        while at < bytes {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let len = (bytes - at).min(piece.len() as u64);
            fill(&mut piece, args.dtype, width, (layer as u64) << 40 | at);
            out.data(&piece[..len as usize])?;
            at += len;
        }
        progress.add(1);
    }
    // What is still to be written back would slow down whoever reads first.
    out.finish()?.sync_all().map_err(io)
}

/// Values of random sign and mantissa, and of a magnitude that keeps activations about as large as they are: the same
/// bits on every machine, by a counter.
fn fill(piece: &mut [u8], dtype: Stored, width: u64, counter: u64) {
    // 2^e ≤ |w| < 2^(e+1), with 2^e about 1 / √width.
    let e = -(width.next_power_of_two().trailing_zeros().div_ceil(2) as i32);
    let half = |bias: i32, mantissa: u32, mask: u16| {
        let (sign, exponent) = (0x8000u16, ((bias + e) as u16) << mantissa);
        move |r: u16| (r & (sign | mask)) | exponent
    };
    let (f16, bf16) = (half(15, 10, 0x3ff), half(127, 7, 0x7f));
    for (i, word) in piece.chunks_exact_mut(8).enumerate() {
        let mut z = counter.wrapping_add(i as u64 * 8).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let parts = [z as u16, (z >> 16) as u16, (z >> 32) as u16, (z >> 48) as u16];
        let bits = match dtype {
            Stored::F16 => parts.map(f16),
            Stored::Bf16 => parts.map(bf16),
            Stored::F32 => [parts[0], bf16(parts[1]), parts[2], bf16(parts[3])],
        };
        for (to, from) in word.chunks_exact_mut(2).zip(bits) {
            to.copy_from_slice(&from.to_le_bytes());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn weights_are_of_the_magnitude_that_keeps_activations_as_large_as_they_are() {
        let mut piece = vec![0u8; 4096];
        fill(&mut piece, Stored::F32, 8192, 1 << 40);
        let values: Vec<f32> = piece.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(values.iter().all(|v| (0.0078125..0.015625).contains(&v.abs())), "{values:?}");
        assert!(values.iter().any(|v| *v < 0.0) && values.iter().any(|v| *v > 0.0));
        let mut again = vec![0u8; 8];
        fill(&mut again, Stored::F32, 8192, (1 << 40) + 8);
        assert_eq!(again, piece[8..16], "a value depends on its place alone");
    }
}
