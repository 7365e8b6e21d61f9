//! `ebbtide probe scale`: one LoRA step of a model of Llama's shape that is far larger than its budget.
//!
//! The model is made on the spot, streaming, of counted random numbers under real names in real shards, so that the probe
//! needs no download and is the same everywhere. What it shows: the ledger's peak is the forecast and within the budget,
//! what is read in a step is what the residency plan says, and host memory does not know how large the model is.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use ebbtide::compile::{Breakdown, Options};
use ebbtide::error::Bytes;
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec};
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::rt::file::{NewFile, PositionedFile, files_with_extension, save_folder_atomically};
use ebbtide::weights::safetensors::{TensorSpec, Writer};
use ebbtide::weights::{DType, ReadAt};
use ebbtide::{Cancel, Caps, Catalog, Error, Result, Source};
use serde::Serialize;
use serde_json::{Value, json};

use crate::engine;
use crate::witness::{self, Witness};

/// Arguments of `ebbtide probe scale`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide probe scale                                   1.1 billion parameters, 2.2 GB on disk while it runs
  ebbtide probe scale --shape 7b --dir /big --keep      13.5 GB, used again by the next run
  ebbtide probe scale --budget floor --tokens 64 --json

Shapes: 1b (TinyLlama 1.1B), 3b (Llama 3.2 3B), 7b (Llama 2 7B), in f16.")]
pub struct ScaleArgs {
    /// The model's shape.
    #[arg(long, value_enum, default_value_t = Shape::B1)]
    shape: Shape,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, default_value = "1GiB", allow_hyphen_values = true)]
    budget: String,
    /// Tokens of the step's one row.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(2..=2048))]
    tokens: u64,
    /// Where the model is made; it is removed afterwards. Default: the system's folder for temporary files.
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Keep the model in --dir, and use the one there.
    #[arg(long, requires = "dir")]
    keep: bool,
    /// Part of the name of the adapter to use.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Shapes of published models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shape {
    /// Small enough for the tests: four blocks of 1.5 MB.
    #[value(hide = true)]
    Tiny,
    #[value(name = "1b")]
    B1,
    #[value(name = "3b")]
    B3,
    #[value(name = "7b")]
    B7,
}

impl Shape {
    fn name(self) -> &'static str {
        match self {
            Shape::Tiny => "tiny",
            Shape::B1 => "1b",
            Shape::B3 => "3b",
            Shape::B7 => "7b",
        }
    }

    /// Hidden, blocks, heads, heads of keys and values, feed-forward, vocabulary, tied.
    fn sizes(self) -> [u64; 7] {
        match self {
            Shape::Tiny => [256, 4, 4, 2, 704, 4096, 0],
            Shape::B1 => [2048, 22, 32, 4, 5632, 32_000, 0],
            Shape::B3 => [3072, 28, 24, 8, 8192, 128_256, 1],
            Shape::B7 => [4096, 32, 32, 32, 11_008, 32_000, 0],
        }
    }

    fn config(self) -> Value {
        let [hidden, layers, heads, kv_heads, ffn, vocabulary, tied] = self.sizes();
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128.min(hidden / heads),
            "intermediate_size": ffn,
            "vocab_size": vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied == 1,
            "torch_dtype": "float16",
        })
    }

    /// Names and shapes of all tensors, in the order of the computation.
    fn tensors(self) -> Vec<(String, Vec<u64>)> {
        let [d, layers, heads, kv_heads, ffn, vocabulary, tied] = self.sizes();
        let head = 128.min(d / heads);
        let mut all = vec![("model.embed_tokens.weight".to_string(), vec![vocabulary, d])];
        for block in 0..layers {
            let mut add = |name: &str, shape: &[u64]| {
                all.push((format!("model.layers.{block}.{name}.weight"), shape.to_vec()));
            };
            add("input_layernorm", &[d]);
            add("self_attn.q_proj", &[heads * head, d]);
            add("self_attn.k_proj", &[kv_heads * head, d]);
            add("self_attn.v_proj", &[kv_heads * head, d]);
            add("self_attn.o_proj", &[d, heads * head]);
            add("post_attention_layernorm", &[d]);
            add("mlp.gate_proj", &[ffn, d]);
            add("mlp.up_proj", &[ffn, d]);
            add("mlp.down_proj", &[d, ffn]);
        }
        all.push(("model.norm.weight".into(), vec![d]));
        if tied == 0 {
            all.push(("lm_head.weight".into(), vec![vocabulary, d]));
        }
        all
    }
}

/// The most bytes of a shard.
const SHARD: u64 = 4 << 30;

/// Writes the model; seconds and bytes.
async fn make(shape: Shape, out: &Path, cancel: &Cancel, told: &mut dyn FnMut(u64)) -> Result<u64> {
    save_folder_atomically(out, async |place| {
        let tensors = shape.tensors();
        let bytes = |(_, dims): &(String, Vec<u64>)| 2 * dims.iter().product::<u64>();
        let (mut shards, mut size): (Vec<Vec<usize>>, u64) = (vec![vec![]], 0);
        for (i, tensor) in tensors.iter().enumerate() {
            if size + bytes(tensor) > SHARD {
                shards.push(vec![]);
                size = 0;
            }
            size += bytes(tensor);
            shards.last_mut().unwrap_or(&mut vec![]).push(i);
        }
        let (mut index, mut total) = (BTreeMap::new(), 0);
        for (number, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            let specs: Vec<TensorSpec> =
                shard.iter().map(|i| TensorSpec::new(&tensors[*i].0, DType::F16, tensors[*i].1.clone())).collect();
            let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
            let mut writer = Writer::new(NewFile::create(&place.join(&name))?, &name, &specs, &metadata)?;
            for at in writer.order().to_vec() {
                let (number, tensor) = (shard[at], &tensors[shard[at]]);
                index.insert(tensor.0.clone(), name.clone());
                let (all, mut done, mut buffer) = (bytes(tensor), 0, vec![0u8; 1 << 20]);
                while done < all {
                    if cancel.is_cancelled() {
                        return Err(Error::Cancelled);
                    }
                    let n = (all - done).min(1 << 20) as usize;
                    numbers(number as u64, done / 8, &tensor.1, &mut buffer[..n]);
                    writer.data(&buffer[..n])?;
                    done += n as u64;
                    told(n as u64);
                }
                total += all;
            }
            writer.finish()?.finish()?;
        }
        let text = json!({ "metadata": { "total_size": total }, "weight_map": index });
        for (name, value) in [("model.safetensors.index.json", text), ("config.json", shape.config())] {
            let path = place.join(name);
            let mut file = NewFile::create(&path)?;
            file.write_all(format!("{value:#}\n").as_bytes()).map_err(|e| ebbtide::rt::file::io_error(&path, e))?;
            file.finish()?;
        }
        Ok(total)
    })
    .await
}

/// Half floats of a tensor from its group of four on that has this index: ones for a norm, else numbers of either sign whose
/// size fits the width, of a counter's bits, so that any part of a file can be made alone.
fn numbers(tensor: u64, first: u64, dims: &[u64], out: &mut [u8]) {
    const ONE: u16 = 0x3c00;
    let [_, width] = dims else {
        out.chunks_exact_mut(2).for_each(|h| h.copy_from_slice(&ONE.to_le_bytes()));
        return;
    };
    // Between 2^-e and 2^(1-e): a product over the width keeps the size of what goes in.
    let exponent = 15 - (width.ilog2() as u16).div_ceil(2) - 1;
    for (i, four) in out.chunks_mut(8).enumerate() {
        let bits = mix((tensor << 40) ^ (first + i as u64));
        for (k, half) in four.chunks_exact_mut(2).enumerate() {
            let part = (bits >> (16 * k)) as u16;
            half.copy_from_slice(&((part & 0x83ff) | (exponent << 10)).to_le_bytes());
        }
    }
}

fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A file that notes how long its reads take.
struct Timed {
    file: PositionedFile,
    nanoseconds: Arc<AtomicU64>,
}

impl ReadAt for Timed {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        let began = Instant::now();
        let result = self.file.read_at(offset, buf);
        self.nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    fn unchanged(&self) -> Result<()> {
        self.file.unchanged()
    }
}

/// What the probe measured.
#[derive(Debug, Serialize)]
struct Report {
    format: u32,
    shape: &'static str,
    parameters: u64,
    adapter: String,
    weight_bytes: u64,
    resident_weights: u64,
    largest_segment_bytes: u64,
    budget_bytes: u64,
    floor_bytes: u64,
    floor_set_by: String,
    planned_peak_bytes: u64,
    peak_bytes: u64,
    peak_by_category: Breakdown,
    process_baseline_bytes: Option<u64>,
    process_peak_bytes: Option<u64>,
    /// What the process took beyond the device's memory and what it had when the device was open.
    host_bytes: Option<u64>,
    loads_per_step: u64,
    bytes_per_step: u64,
    planned_bytes_per_step: u64,
    /// 2 · (weights − resident).
    twice_not_resident_bytes: u64,
    loss: f64,
    finite: bool,
    recomputes: bool,
    seconds: Seconds,
}

#[derive(Debug, Default, Serialize)]
struct Seconds {
    /// Making the files; 0 where they were there.
    make: f64,
    /// Plans.
    plan: f64,
    /// Device memory, kernels, the first weights.
    begin: f64,
    /// The step.
    step: f64,
    /// Of the step, reads of files; they run beside the device's work.
    reading: f64,
}

/// Runs the command.
pub fn run(args: &ScaleArgs) -> anyhow::Result<()> {
    let cancel = engine::cancel_on_ctrl_c();
    let temporary = match &args.dir {
        Some(dir) if args.keep => {
            std::fs::create_dir_all(dir).map_err(|e| ebbtide::rt::file::io_error(dir, e))?;
            None
        }
        dir => Some(engine::temporary_folder_in(dir.as_deref())?),
    };
    let place = temporary.as_ref().map_or(args.dir.as_deref(), |t| Some(t.path())).unwrap_or(Path::new("."));
    let folder = place.join(format!("ebbtide-scale-{}", args.shape.name()));
    let report = engine::wait(measure(args, &folder, &cancel))?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

async fn measure(args: &ScaleArgs, folder: &Path, cancel: &Cancel) -> anyhow::Result<Report> {
    let mut seconds = Seconds::default();
    let (budget, _) = engine::budget(&args.budget, args.device.as_deref())?;
    let config = ModelConfig::parse("config.json", args.shape.config().to_string().as_bytes())?;
    let parameters: u64 = args.shape.tensors().iter().map(|(_, dims)| dims.iter().product::<u64>()).sum();
    if !folder.exists() {
        let bar =
            if args.json { indicatif::ProgressBar::hidden() } else { indicatif::ProgressBar::new(2 * parameters) };
        bar.set_style(indicatif::ProgressStyle::with_template(
            "making the model  {bar:40} {bytes} of {total_bytes}, {eta} left",
        )?);
        let began = Instant::now();
        make(args.shape, folder, cancel, &mut |n| bar.inc(n)).await?;
        bar.finish_and_clear();
        seconds.make = began.elapsed().as_secs_f64();
    }

    let nanoseconds = Arc::new(AtomicU64::new(0));
    let mut sources = Vec::new();
    for path in files_with_extension(folder, "safetensors")? {
        let timed = Timed { file: PositionedFile::open(&path)?, nanoseconds: nanoseconds.clone() };
        sources.push(Source::custom(Arc::new(timed)));
    }
    let model = Model::new(config, Catalog::from_sources(sources).await?)?;
    let adapter = Adapter::new(&model, LoraSpec::default())?;
    let bucket = Bucket { rows: 1, tokens: args.tokens };
    let spec =
        RunSpec { buckets: vec![bucket], evaluations: vec![], accumulation: 1, writer: None, adamw: AdamW::default() };
    let plan = |caps: &Caps| RunPlan::new(&model, Some(&adapter), &spec, caps, budget, Options::default());
    // Refused before any GPU work.
    plan(&Caps::webgpu_defaults())?;
    let device = engine::open_device(args.device.as_deref()).await?;
    let began = Instant::now();
    let plan = plan(device.caps())?;
    seconds.plan = began.elapsed().as_secs_f64();
    let planned_bytes = plan.forecast(1).bytes_per_step;
    let set = plan.set.clone();

    let witness = Witness::start();
    device.reset_peak_memory();
    let began = Instant::now();
    let first = adapter.initial(0);
    let mut trainer = Trainer::new(&device, &model, &adapter, &spec, plan, &first).await?;
    drop(first);
    seconds.begin = began.elapsed().as_secs_f64();

    nanoseconds.store(0, Ordering::Relaxed);
    let token = |i: u64| (mix(i) % model.config().vocabulary) as i32;
    let micro = Micro {
        bucket,
        ids: (0..args.tokens).map(token).collect(),
        labels: (0..args.tokens).map(|i| token(i + 1)).collect(),
        rows: vec![0],
    };
    let began = Instant::now();
    let step = trainer.step(&[micro], 1e-4, cancel, &mut NoEvents).await?;
    seconds.step = began.elapsed().as_secs_f64();
    seconds.reading = Duration::from_nanos(nanoseconds.load(Ordering::Relaxed)).as_secs_f64();

    let usage = device.ledger().usage();
    let testimony = witness.finish();
    let process = witness::highest_bytes().or(testimony.peak_bytes);
    let largest = set.segments.iter().map(|s| s.bytes).max().unwrap_or(0);
    Ok(Report {
        format: 1,
        shape: args.shape.name(),
        parameters,
        adapter: device.caps().adapter.clone(),
        weight_bytes: set.weight_bytes,
        resident_weights: set.resident_bytes,
        largest_segment_bytes: largest,
        budget_bytes: set.budget,
        floor_bytes: set.floor,
        floor_set_by: set.floor_set_by.clone(),
        planned_peak_bytes: set.planned_peak(),
        peak_bytes: usage.peak,
        peak_by_category: usage.at_peak,
        process_baseline_bytes: testimony.baseline_bytes,
        process_peak_bytes: process,
        host_bytes: process.zip(testimony.baseline_bytes).map(|(p, b)| p.saturating_sub(b + usage.peak)),
        loads_per_step: step.loads,
        bytes_per_step: step.streamed_bytes,
        planned_bytes_per_step: planned_bytes,
        twice_not_resident_bytes: 2 * (set.weight_bytes - set.resident_bytes),
        loss: step.loss,
        finite: step.finite,
        recomputes: set.recomputes,
        seconds,
    })
}

fn print(r: &Report) {
    let of = |bytes: Option<u64>| bytes.map_or("unknown here".into(), |b| Bytes(b).to_string());
    println!("shape              {}: {:.2} billion parameters in f16", r.shape, r.parameters as f64 / 1e9);
    println!("adapter            {}", r.adapter);
    println!("weights            {}, of which stay {}", Bytes(r.weight_bytes), Bytes(r.resident_weights));
    println!("budget             {}", Bytes(r.budget_bytes));
    println!("floor              {}, set by {}", Bytes(r.floor_bytes), r.floor_set_by);
    println!("peak               {} (planned {})", Bytes(r.peak_bytes), Bytes(r.planned_peak_bytes));
    for (category, bytes) in r.peak_by_category.iter() {
        println!("  {:<16} {}", category.name(), Bytes(bytes));
    }
    println!(
        "process            {} at most, {} when the device was open",
        of(r.process_peak_bytes),
        of(r.process_baseline_bytes)
    );
    println!("host               {} beyond both", of(r.host_bytes));
    println!("read in the step   {} in {} loads", Bytes(r.bytes_per_step), r.loads_per_step);
    println!(
        "  2·(all − staying) {}; the largest segment {}",
        Bytes(r.twice_not_resident_bytes),
        Bytes(r.largest_segment_bytes)
    );
    println!("loss               {:.4}", r.loss);
    let s = &r.seconds;
    println!(
        "seconds            {:.1} making, {:.1} planning, {:.1} beginning, {:.1} step (reading {:.1} beside it)",
        s.make, s.plan, s.begin, s.step, s.reading
    );
}
