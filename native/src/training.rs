//! What `train` and `plan` share: the flags that decide what a training needs, and the training they describe.
//!
//! A forecast that is made from other flags than the training is no forecast. So both commands read these, and what `plan`
//! prints is what `train` keeps.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use ebbtide::compile::{Budget, Options, Recompute};
use ebbtide::llm::adapters::Adapter;
use ebbtide::llm::data::{Batches, DataFiles, DataOptions, Dataset, Encoder, Order};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::models::Model;
use ebbtide::llm::run::{Prompt, Run, RunData, RunSettings, Samples};
use ebbtide::llm::schedule::{Decay, Schedule};
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide::llm::trainer::RunPlan;
use ebbtide::nn::AdamW;
use ebbtide::{Caps, Error, Result, Source};

use crate::model::{self, LoraArgs, ModelArgs};

/// Rows are cut after so many tokens where nobody says otherwise.
const MAX_SEQ_LENGTH: u64 = 2048;

/// What decides about memory.
#[derive(Args, Clone, Debug)]
pub struct TrainingArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub lora: LoraArgs,
    #[command(flatten)]
    pub samples: SampleArgs,
    /// Compute values of a block again in the backward pass: auto decides from the budget; the results have the same bits.
    #[arg(
        long, value_name = "auto|on|off", default_value = "auto", num_args = 0..=1, default_missing_value = "on",
        value_parser = recompute, help_heading = "Memory"
    )]
    pub grad_checkpoint: Recompute,
}

fn recompute(text: &str) -> std::result::Result<Recompute, String> {
    match text {
        "auto" => Ok(Recompute::Auto),
        "on" => Ok(Recompute::On),
        "off" => Ok(Recompute::Off),
        _ => Err("expected auto, on or off".into()),
    }
}

/// Which rows, and how they are batched.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    /// Folder with train.jsonl and perhaps valid.jsonl, or one file of rows: {"text"}, {"prompt","completion"} or
    /// {"messages"}.
    #[arg(long, value_name = "PATH", conflicts_with = "train_data")]
    pub data: Option<PathBuf>,
    /// Rows to learn from, instead of --data.
    #[arg(long, value_name = "FILE")]
    pub train_data: Option<PathBuf>,
    /// Rows to judge by, instead of valid.jsonl.
    #[arg(long, value_name = "FILE")]
    pub valid_data: Option<PathBuf>,
    /// Rows of a batch.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub batch_size: u64,
    /// Batches of an optimizer step.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub grad_accumulation_steps: u64,
    /// Rows are cut after so many tokens. [default: 2048, or the model's context where that is shorter]
    #[arg(long, value_name = "N")]
    pub max_seq_length: Option<u64>,
    /// Train only the completion, or the last message.
    #[arg(long)]
    pub mask_prompt: bool,
    /// Take the rows as they stand in the file.
    #[arg(long)]
    pub no_shuffle: bool,
    /// Batches of a validation; -1: all.
    #[arg(long, value_name = "N", default_value_t = 25, allow_negative_numbers = true)]
    pub val_batches: i64,
}

/// Samples in the course of a training.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Samples")]
pub struct SampleArgs {
    /// Write a text behind this prompt with each validation. May be given several times.
    #[arg(long, value_name = "TEXT")]
    pub sample_prompt: Vec<String>,
    /// Tokens of a sample.
    #[arg(long, value_name = "N", default_value_t = 48)]
    pub sample_tokens: u64,
    /// Temperature of samples; 0: the likeliest token.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub sample_temp: f32,
}

/// How it learns, and when it looks, reports and saves. Nothing of it changes memory.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Training")]
pub struct OptimizerArgs {
    /// Optimizer steps in all, those before a resumption included.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub iters: u64,
    /// Learning rate at its peak.
    #[arg(long, value_name = "X", default_value_t = 1e-4)]
    pub learning_rate: f64,
    /// What the rate does after the warm-up: constant, linear or cosine.
    #[arg(long, value_name = "NAME", default_value = "constant")]
    pub lr_schedule: String,
    /// Rate at the end of a linear or cosine schedule.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub lr_end: f64,
    /// Steps in which the rate climbs to its peak.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup: u64,
    /// Decoupled weight decay.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub weight_decay: f64,
    /// Largest global norm of the gradients; larger ones are scaled down. 0: none are.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub max_grad_norm: f64,
    /// Steps from one line of report to the next.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps_per_report: u64,
    /// Steps from one validation, with samples, to the next; 0: only before the first step and after the last.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub steps_per_eval: u64,
    /// Steps from one saving to the next; 0: only at the end.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub save_every: u64,
}

/// A training, opened: every file was looked at, nothing was computed.
pub struct Training {
    /// The model's folder.
    pub folder: PathBuf,
    /// The model.
    pub model: Model,
    /// The adapter, without values.
    pub adapter: Adapter,
    /// The rows.
    pub data: RunData,
    /// What the user should know about the rows.
    pub notes: Vec<String>,
    /// What is to be done with them.
    pub settings: RunSettings,
}

impl TrainingArgs {
    /// Opens everything that the flags name.
    pub async fn open(&self, optimizer: &OptimizerArgs) -> Result<Training> {
        let folder = self.model.folder().await?;
        let model = model::open(&folder).await?;
        let adapter = Adapter::new(&model, self.lora.spec(&model)?)?;
        let max_tokens = self.max_tokens(&model, MAX_SEQ_LENGTH);
        let (train, valid) = self.data.files()?;
        let tokenizer = Arc::new(Tokenizer::open(&folder).await?);
        let options = DataOptions { mask_prompt: self.data.mask_prompt, max_tokens };
        let encoder = Arc::new(Encoder::of_model(tokenizer.clone(), model.config(), options)?);
        let mut notes = model.config().notes.clone();
        let train = Dataset::scan(train, encoder.clone()).await?;
        notes.extend(train.stats().notes(max_tokens));
        let order = if self.data.no_shuffle { Order::File } else { Order::Shuffled { seed: self.lora.seed.into() } };
        let train = Batches::new(train, order, self.data.batch_size, self.data.grad_accumulation_steps)?;
        let valid = match valid {
            Some(source) => {
                let valid = Dataset::scan(source, encoder).await?;
                notes.extend(valid.stats().notes(max_tokens).into_iter().map(|n| format!("validation: {n}")));
                Some(Batches::new(valid, Order::File, self.data.batch_size, 1)?)
            }
            None => None,
        };
        let settings = self.settings(optimizer, &tokenizer)?;
        Ok(Training { folder, model, adapter, data: RunData { train, valid }, notes, settings })
    }

    /// Tokens that a row has at most.
    pub fn max_tokens(&self, model: &Model, default: u64) -> u64 {
        self.data.max_seq_length.unwrap_or(default).min(model.config().max_positions)
    }

    /// How plans are lowered.
    pub fn options(&self) -> Options {
        Options { recompute: self.grad_checkpoint, ..Options::default() }
    }

    fn settings(&self, o: &OptimizerArgs, tokenizer: &Tokenizer) -> Result<RunSettings> {
        let refuse = |what: &str, reason: String| Err(Error::Invalid { what: what.into(), reason });
        if o.iters == 0 {
            return refuse("--iters", "a training has at least one step".into());
        }
        for (flag, value) in [("--weight-decay", o.weight_decay), ("--max-grad-norm", o.max_grad_norm)] {
            if !value.is_finite() || value < 0.0 {
                return refuse(flag, format!("{value} is not a finite number of at least 0"));
            }
        }
        let eval_batches = match self.data.val_batches {
            -1 => 0,
            n if n > 0 => n as u64,
            n => return refuse("--val-batches", format!("{n} is not possible; -1 for all, or 1 and more")),
        };
        let decay: Decay = o.lr_schedule.parse()?;
        // A constant schedule never comes to its end.
        let end = if decay == Decay::Constant { 0.0 } else { o.lr_end };
        Ok(RunSettings {
            steps: o.iters,
            schedule: Schedule::new(o.learning_rate, end, o.warmup, o.iters, decay)?,
            adamw: AdamW { weight_decay: o.weight_decay, max_norm: o.max_grad_norm, ..AdamW::default() },
            eval_every: o.steps_per_eval,
            eval_batches,
            save_every: o.save_every,
            samples: self.samples.of(tokenizer, self.lora.seed)?,
        })
    }
}

impl DataArgs {
    /// Whether rows were named.
    pub fn given(&self) -> bool {
        self.data.is_some() || self.train_data.is_some()
    }

    fn files(&self) -> Result<(Source, Option<Source>)> {
        let files = match (&self.data, &self.train_data) {
            (_, Some(file)) => DataFiles { train: Source::open(file)?, valid: None },
            (Some(path), None) => DataFiles::open(path)?,
            (None, None) => {
                let reason = "say what to learn from: a folder with train.jsonl, or a file of rows".into();
                return Err(Error::Invalid { what: "--data".into(), reason });
            }
        };
        let valid = self.valid_data.as_ref().map(Source::open).transpose()?;
        Ok((files.train, valid.or(files.valid)))
    }
}

impl SampleArgs {
    fn of(&self, tokenizer: &Tokenizer, seed: u32) -> Result<Option<Samples>> {
        if self.sample_prompt.is_empty() {
            return Ok(None);
        }
        if self.sample_tokens == 0 {
            return Err(Error::Invalid { what: "--sample-tokens".into(), reason: "a sample has at least one".into() });
        }
        let prompt = |text: &String| -> Result<Prompt> {
            let ids = tokenizer.encode(text, true)?;
            let ids = ids.into_iter().filter_map(|id| i32::try_from(id).ok()).collect();
            Ok(Prompt { text: text.as_str().into(), ids })
        };
        let sampling = Sampling { temperature: self.sample_temp, seed: seed.into(), ..Sampling::default() };
        sampling.check()?;
        let prompts = self.sample_prompt.iter().map(prompt).collect::<Result<Vec<Prompt>>>()?;
        Ok(Some(Samples { prompts, tokens: self.sample_tokens, sampling }))
    }
}

impl Training {
    /// Plans it.
    pub fn plan(&self, caps: &Caps, budget: Budget, options: Options) -> Result<RunPlan> {
        Run::plan(&self.model, &self.adapter, &self.data, &self.settings, caps, budget, options)
    }
}
