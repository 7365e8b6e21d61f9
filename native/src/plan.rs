//! `ebbtide plan`: the forecast of a training run. Reads headers, no weight byte, and needs no GPU.

use clap::Args;
use ebbtide::Caps;
use ebbtide::compile::{Budget, Category, Forecast};
use ebbtide::error::Bytes;
use ebbtide::llm::adapters::Adapter;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::trainer::{RunPlan, RunSpec};
use ebbtide::nn::AdamW;
use serde::Serialize;

use crate::engine::{self, short};
use crate::progress::time;
use crate::speeds::{Estimate, Speeds};
use crate::training::{OptimizerArgs, Training, TrainingArgs};

/// Tokens of a row where there are no rows to look at and nobody says otherwise.
const TOKENS: u64 = 256;
/// The budgets of the table.
const TABLE: [&str; 5] = ["floor", "25%", "50%", "75%", "all"];

/// Arguments of `ebbtide plan`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide plan --model my-model                          a table over budgets, for rows of 256 tokens
  ebbtide plan --model my-model --data my-data           for these rows
  ebbtide plan --model my-model --budget 6GiB --batch-size 4 --max-seq-length 512
  ebbtide plan --model my-model --budget floor --json | jq .floor_bytes

All flags of `train` are understood, so that its command line can be asked beforehand.")]
pub struct PlanArgs {
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto. Without it a table over several.
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true, help_heading = "Memory")]
    budget: Option<String>,
    /// Print one JSON object (or a line for each budget of the table).
    #[arg(long)]
    pub json: bool,
}

/// The forecast at a budget.
#[derive(Clone, Debug, Serialize)]
struct Line {
    budget: String,
    #[serde(flatten)]
    forecast: Forecast,
    #[serde(flatten)]
    time: Estimate,
}

/// What is planned.
enum Planned {
    /// A training over rows.
    Rows(Box<Training>),
    /// One over rows of this length, without data.
    Length(Box<(Model, Adapter, RunSpec)>),
}

impl Planned {
    async fn open(args: &PlanArgs) -> ebbtide::Result<Planned> {
        let t = &args.training;
        if t.data.given() {
            return Ok(Planned::Rows(Box::new(t.open(&args.optimizer).await?)));
        }
        let model = t.model.open().await?;
        let adapter = Adapter::new(&model, t.lora.spec(&model)?)?;
        let bucket = Bucket { rows: t.data.batch_size, tokens: t.max_tokens(&model, TOKENS) };
        let spec = RunSpec {
            buckets: vec![bucket],
            evaluations: vec![bucket],
            accumulation: t.data.grad_accumulation_steps,
            writer: None,
            adamw: AdamW::default(),
        };
        Ok(Planned::Length(Box::new((model, adapter, spec))))
    }

    fn adapter(&self) -> &Adapter {
        match self {
            Planned::Rows(training) => &training.adapter,
            Planned::Length(parts) => &parts.1,
        }
    }

    fn accumulation(&self) -> u64 {
        match self {
            Planned::Rows(training) => training.data.train.accumulation(),
            Planned::Length(parts) => parts.2.accumulation,
        }
    }

    fn plan(&self, budget: Budget, args: &PlanArgs) -> ebbtide::Result<RunPlan> {
        let (caps, options) = (Caps::webgpu_defaults(), args.training.options());
        match self {
            Planned::Rows(training) => training.plan(&caps, budget, options),
            Planned::Length(parts) => {
                let (model, adapter, spec) = &**parts;
                RunPlan::new(model, Some(adapter), spec, &caps, budget, options)
            }
        }
    }
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let planned = engine::wait(Planned::open(args))?;
    let speeds = Speeds::load();
    let line = |text: &str| -> ebbtide::Result<Line> {
        let (budget, _) = engine::budget(text, None)?;
        let forecast = planned.plan(budget, args)?.forecast(planned.accumulation());
        let time = speeds.estimate(forecast.work_per_step, forecast.bytes_per_step);
        Ok(Line { budget: text.into(), forecast, time })
    };
    if let Some(budget) = &args.budget {
        let line = line(budget)?;
        if args.json {
            println!("{}", serde_json::to_string(&line)?);
        } else {
            print(&line, &planned);
        }
        return Ok(());
    }
    if !args.json {
        println!(
            "{:<8} {:>12} {:>14} {:>10} {:>14} {:>12}",
            "budget", "peak", "weights held", "loads/step", "read/step", "time/step"
        );
    }
    let mut last = None;
    for text in TABLE {
        let line = line(text)?;
        let f = &line.forecast;
        if args.json {
            println!("{}", serde_json::to_string(&line)?);
        } else {
            println!(
                "{text:<8} {:>12} {:>14} {:>10} {:>14} {:>12}",
                short(f.peak_bytes),
                short(f.peak_by_category.get(Category::Weights)),
                f.loads_per_step,
                short(f.bytes_per_step),
                about(&line.time)
            );
        }
        last = Some(line);
    }
    if let Some(line) = last.filter(|_| !args.json) {
        println!("\nfloor: {}, set by {}", Bytes(line.forecast.floor_bytes), line.forecast.floor_set_by);
        println!("time: by {}", line.time.seconds_from);
    }
    Ok(())
}

/// A time, marked where it is a guess.
fn about(estimate: &Estimate) -> String {
    format!("{}{}", if estimate.seconds_estimated { "~" } else { "" }, time(estimate.seconds_per_step))
}

fn print(line: &Line, planned: &Planned) {
    let f = &line.forecast;
    println!("budget             {} = {}", line.budget, Bytes(f.budget_bytes));
    println!("floor              {}, set by {}", Bytes(f.floor_bytes), f.floor_set_by);
    println!("peak               {}", Bytes(f.peak_bytes));
    for (category, bytes) in f.peak_by_category.iter() {
        println!("  {:<16} {}", category.name(), Bytes(bytes));
    }
    println!("weights            {}, of which stay {}", Bytes(f.weight_bytes), Bytes(f.resident_weights));
    println!("trained            {} numbers", planned.adapter().trainable());
    if let Planned::Rows(training) = planned {
        let stats = training.data.train.set().stats();
        println!("rows               {}, the longest of {} tokens", stats.rows, stats.longest);
        training.notes.iter().for_each(|note| println!("note               {note}"));
    }
    println!("per optimizer step {} loads, {} read", f.loads_per_step, Bytes(f.bytes_per_step));
    let estimate = if line.time.seconds_estimated { " (an estimate)" } else { "" };
    println!("                   {}{estimate}, by {}", about(&line.time), line.time.seconds_from);
    let activations = if f.recomputes { "computed again in the backward pass" } else { "kept" };
    println!("activations        {activations}; {} micro-batches at once", f.micro_batches_at_once);
}
