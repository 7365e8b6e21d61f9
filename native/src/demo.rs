//! `ebbtide demo`: a real training, small enough to watch, with a quarter of the model's weights on the device.
//!
//! It is `ebbtide train` over files that the program carries: what it shows is what anybody can repeat with the command
//! that it prints, on files that it leaves behind.

use std::path::{Path, PathBuf};

use clap::{Args, Parser};
use ebbtide::Event;
use ebbtide::compile::{Category, Forecast};
use ebbtide::rt::file::{io_error, make_folder, save_atomically};

use crate::engine::{self, short};
use crate::progress::{Progress, printable};
use crate::train::{TrainArgs, train};

/// The model: Llama's shape, trained on Shakespeare (native/assets/tiny-shakespeare-llama/MODEL_CARD.md).
const MODEL: [(&str, &[u8]); 4] = [
    ("config.json", include_bytes!("../assets/tiny-shakespeare-llama/config.json")),
    ("model.safetensors", include_bytes!("../assets/tiny-shakespeare-llama/model.safetensors")),
    ("tokenizer.json", include_bytes!("../assets/tiny-shakespeare-llama/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../assets/tiny-shakespeare-llama/tokenizer_config.json")),
];
/// The data: the log of a harbour keeper who does not exist.
const DATA: [(&str, &[u8]); 2] = [
    ("train.jsonl", include_bytes!("../assets/tide-log/train.jsonl")),
    ("valid.jsonl", include_bytes!("../assets/tide-log/valid.jsonl")),
];

/// Arguments of `ebbtide demo`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ebbtide demo
  ebbtide demo --budget floor
  ebbtide demo --budget all      the same losses and the same adapter, to the bit, with everything resident")]
pub struct DemoArgs {
    /// Device memory to use: BYTES, 6GiB, 50%, floor, all or auto.
    #[arg(long, value_name = "BUDGET", default_value = BUDGET, allow_hyphen_values = true)]
    pub budget: String,
    /// Folder for the model, the data, the adapter and the report.
    #[arg(long, value_name = "FOLDER", default_value = FOLDER)]
    pub out: PathBuf,
    /// Part of the name of the GPU adapter to use.
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Optimizer steps.
    #[arg(long, value_name = "N", default_value_t = STEPS, hide = true)]
    pub iters: u64,
}

const BUDGET: &str = "25%";
const FOLDER: &str = "ebbtide-demo";
const STEPS: u64 = 40;
const PROMPT: &str = "Day 212.";

impl Default for DemoArgs {
    fn default() -> DemoArgs {
        DemoArgs { budget: BUDGET.into(), out: FOLDER.into(), device: None, iters: STEPS }
    }
}

/// A command line of `ebbtide train`.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    train: TrainArgs,
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let (model, data) = (args.out.join("model"), args.out.join("data"));
    write_all(&model, &MODEL)?;
    write_all(&data, &DATA)?;
    let line = command(args, &model, &data);
    let train_args = Line::try_parse_from(&line)?.train;

    println!("ebbtide trains adapters over models that do not fit in GPU memory: each layer's weights are loaded just");
    println!("before they are used, released just after, and loaded again, in reverse, for the backward pass.\n");
    println!(
        "Here a small model that has read Shakespeare and nothing else learns to keep a harbour's log, while about a"
    );
    println!("quarter of its weights is on the device at a time. It is this command:\n");
    println!("  ebbtide {}\n", words(&line[1..]));

    let cancel = engine::cancel_on_ctrl_c();
    let mut progress = Progress::new(false, train_args.optimizer.steps_per_report);
    let mut show = |event: &Event| match event {
        Event::Plan(f) => {
            forecast(f);
            progress.budget(f.budget_bytes);
        }
        Event::Sample { step, prompt, text } => {
            let when = if *step == 0 { "Before" } else { "After" };
            let shown: Vec<String> =
                format!("{prompt}{text}").lines().map(|l| format!("    {}", printable(l))).collect();
            progress.line(&format!("\n{when} training, behind \"{prompt}\":\n\n{}\n", shown.join("\n")));
        }
        Event::Saved { .. } | Event::End { .. } => progress.clear(),
        Event::Note { text } if text.starts_with("stopped") => progress.event(event),
        Event::Note { .. } => {}
        _ => progress.event(event),
    };
    let outcome = engine::wait(train(&train_args, &cancel, &mut show))?;
    if let Some((first, last)) = outcome.steps {
        println!("loss               {:.4} in the first step, {:.4} in the last", first.loss, last.loss);
        let kept = if last.peak_bytes == last.planned_peak_bytes { "exactly" } else { "NOT" };
        println!("peak               {} measured, {kept} as forecast", short(last.peak_bytes));
        println!("read in a step     {} in {} loads", short(last.streamed_bytes), last.loads);
    }
    println!("adapter            {}, in PEFT's format", train_args.adapter_path.display());
    if let Some(page) = outcome.report {
        println!("report             {} (open it in a browser)", page.display());
    }
    println!("\nAt every budget it learns the same, to the bit: try `ebbtide demo --budget floor`, or `--budget all`.");
    println!("Next: `ebbtide plan --help`, `ebbtide train --help`, `ebbtide doctor`.");
    Ok(())
}

fn write_all(folder: &Path, files: &[(&str, &[u8])]) -> ebbtide::Result<()> {
    make_folder(folder)?;
    for (name, bytes) in files {
        let path = folder.join(name);
        save_atomically(&path, |out| out.write_all(bytes).map_err(|e| io_error(&path, e)))?;
    }
    Ok(())
}

fn command(args: &DemoArgs, model: &Path, data: &Path) -> Vec<String> {
    let path = |p: &Path| p.display().to_string();
    let mut line: Vec<String> =
        ["train", "--model", &path(model), "--data", &path(data), "--budget", &args.budget].map(String::from).to_vec();
    let (iters, warmup) = (args.iters.to_string(), args.iters.min(4).to_string());
    line.extend(
        [
            "--iters",
            &iters,
            "--batch-size",
            "2",
            "--learning-rate",
            "1e-2",
            "--lr-schedule",
            "cosine",
            "--warmup",
            &warmup,
        ]
        .map(String::from),
    );
    let report = args.out.display().to_string();
    line.extend(
        ["--max-seq-length", "64", "--val-batches", "6", "--steps-per-report", "5", "--sample-prompt", PROMPT]
            .map(String::from),
    );
    let adapter = path(&args.out.join("adapter"));
    line.extend(
        ["--sample-tokens", "28", "--adapter-path", &adapter, "--overwrite", "--report", &report].map(String::from),
    );
    if let Some(device) = &args.device {
        line.extend(["--device".into(), device.clone()]);
    }
    line
}

fn words(line: &[String]) -> String {
    let word = |w: &String| if w.contains(' ') { format!("\"{w}\"") } else { w.clone() };
    std::iter::once("train".to_string()).chain(line.iter().map(word)).collect::<Vec<_>>().join(" ")
}

fn forecast(f: &Forecast) {
    println!("forecast           peak {} of a budget of {}", short(f.peak_bytes), short(f.budget_bytes));
    let held = f.peak_by_category.get(Category::Weights);
    println!("  weights          {} of {} held at a time", short(held), short(f.weight_bytes));
    let rest: Vec<String> = f
        .peak_by_category
        .iter()
        .filter(|(c, _)| *c != Category::Weights)
        .map(|(c, bytes)| format!("{} {}", c.name(), short(bytes)))
        .collect();
    println!("  all else         {}", rest.join(", "));
    println!("  a step           reads {} in {} loads", short(f.bytes_per_step), f.loads_per_step);
    println!("floor              {}, set by {}", short(f.floor_bytes), f.floor_set_by);
}
