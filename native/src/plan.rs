//! `ebbtide plan`: the forecast of a training run. Reads headers, no weight byte, and needs no GPU.

use clap::Args;
use ebbtide::caps::Caps;
use ebbtide::compile::{Breakdown, Budget, Options};
use ebbtide::error::Bytes;
use ebbtide::llm::adapters::Adapter;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::trainer::{RunPlan, RunSpec};
use ebbtide::nn::AdamW;
use serde::Serialize;

use crate::engine;
use crate::model::{LoraArgs, ModelArgs};

/// Arguments of `ebbtide plan`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide plan --model my-model                          a table over budgets
  ebbtide plan --model my-model --budget 6GiB --batch-size 4 --max-seq-length 512
  ebbtide plan --model my-model --budget floor --json | jq .floor_bytes")]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    lora: LoraArgs,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto. Without it a table over several.
    #[arg(long)]
    budget: Option<String>,
    /// Rows of a micro-batch.
    #[arg(long, default_value_t = 4)]
    batch_size: u64,
    /// Tokens of a row.
    #[arg(long, default_value_t = 256)]
    max_seq_length: u64,
    /// Micro-batches of an optimizer step.
    #[arg(long, default_value_t = 1)]
    grad_accumulation_steps: u64,
    /// Print one JSON object (or a line for each budget of the table).
    #[arg(long)]
    pub json: bool,
}

/// The forecast at a budget.
#[derive(Clone, Debug, Serialize)]
struct Forecast {
    format: u32,
    budget: String,
    budget_bytes: u64,
    floor_bytes: u64,
    floor_set_by: String,
    peak_bytes: u64,
    peak_by_category: Breakdown,
    weight_bytes: u64,
    resident_weights: u64,
    loads_per_step: u64,
    bytes_per_step: u64,
    micro_batches_at_once: u64,
    recomputes: bool,
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let model = &engine::wait(args.model.open())?;
    let adapter = Adapter::new(model, args.lora.spec(model)?)?;
    let bucket = Bucket { rows: args.batch_size, tokens: args.max_seq_length };
    let spec = RunSpec {
        buckets: vec![bucket],
        evaluations: vec![bucket],
        accumulation: args.grad_accumulation_steps,
        writer: None,
        adamw: AdamW::default(),
    };
    let forecast = |text: &str| -> ebbtide::Result<Forecast> {
        let (budget, _) = engine::budget(text, None)?;
        plan(model, &adapter, &spec, text, budget)
    };
    if let Some(budget) = &args.budget {
        let forecast = forecast(budget)?;
        if args.json {
            println!("{}", serde_json::to_string(&forecast)?);
        } else {
            print(&forecast, &adapter);
        }
        return Ok(());
    }
    if !args.json {
        println!("{:<8} {:>12} {:>14} {:>10} {:>14}", "budget", "peak", "weights held", "loads/step", "read/step");
    }
    for text in ["floor", "25%", "50%", "75%", "all"] {
        let f = forecast(text)?;
        if args.json {
            println!("{}", serde_json::to_string(&f)?);
        } else {
            let short = |b: u64| Bytes(b).to_string().split(" (").next().unwrap_or_default().to_string();
            println!(
                "{text:<8} {:>12} {:>14} {:>10} {:>14}",
                short(f.peak_bytes),
                short(f.peak_by_category.get(ebbtide::compile::Category::Weights)),
                f.loads_per_step,
                short(f.bytes_per_step)
            );
        }
    }
    Ok(())
}

fn plan(
    model: &ebbtide::llm::models::Model,
    adapter: &Adapter,
    spec: &RunSpec,
    text: &str,
    budget: Budget,
) -> ebbtide::Result<Forecast> {
    let plan = RunPlan::new(model, Some(adapter), spec, &Caps::webgpu_defaults(), budget, Options::default())?;
    let (loads_per_step, bytes_per_step) = plan.per_step(spec.accumulation);
    let set = &plan.set;
    Ok(Forecast {
        format: 1,
        budget: text.into(),
        budget_bytes: set.budget,
        floor_bytes: set.floor,
        floor_set_by: set.floor_set_by.clone(),
        peak_bytes: set.planned_peak(),
        peak_by_category: set.planned,
        weight_bytes: set.weight_bytes,
        resident_weights: set.resident_bytes,
        loads_per_step,
        bytes_per_step,
        micro_batches_at_once: plan.group,
        recomputes: set.recomputes,
    })
}

fn print(f: &Forecast, adapter: &Adapter) {
    println!("budget             {} = {}", f.budget, Bytes(f.budget_bytes));
    println!("floor              {}, set by {}", Bytes(f.floor_bytes), f.floor_set_by);
    println!("peak               {}", Bytes(f.peak_bytes));
    for (category, bytes) in f.peak_by_category.iter() {
        println!("  {:<16} {}", category.name(), Bytes(bytes));
    }
    println!("weights            {}, of which stay {}", Bytes(f.weight_bytes), Bytes(f.resident_weights));
    println!("trained            {} numbers", adapter.trainable());
    println!("per optimizer step {} loads, {} read", f.loads_per_step, Bytes(f.bytes_per_step));
    let activations = if f.recomputes { "computed again in the backward pass" } else { "kept" };
    println!("activations        {activations}; {} micro-batches at once", f.micro_batches_at_once);
}
