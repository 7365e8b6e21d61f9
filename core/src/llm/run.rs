//! A whole training: steps, validations, samples and saving in their order. Command line and page run this same loop.
//!
//! Two loops would drift apart, and the one that is tested less would forget to save. What differs between them is a
//! [`Host`]: where files go, who listens, and who can tell the process's memory.
//!
//! Step number *n* takes window number *n* of the data, its rate from the schedule and its masks of dropout from *n*, so a
//! checkpoint's step is its place in the data and the state of every random number. A step that fails or is cancelled has
//! changed nothing; what was done before it is saved on the way out.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::adapters::{Adapter, Values};
use super::data::{Batches, Order};
use super::generate::Sampling;
use super::models::Model;
use super::programs::Bucket;
use super::schedule::Schedule;
use super::trainer::{Checkpoint, Micro, RunPlan, RunSpec, Trainer};
use crate::caps::Caps;
use crate::compile::{Budget, Options};
use crate::error::{Error, Result};
use crate::event::{Event, EventSink, Step};
use crate::gpu::Device;
use crate::nn::AdamW;
use crate::rt::{Instant, Waiting};
use crate::stream::Cancel;

/// Most tokens of a prompt that go through the model at once.
const PROMPT_CHUNK: u64 = 64;

/// Where a training lives: files, listeners, a witness.
pub trait Host: EventSink {
    /// Memory of the process as the system sees it, where it can be told.
    fn witness_bytes(&mut self) -> Option<u64> {
        None
    }

    /// Waited for before each step: a host that holds the training does it here.
    fn before_step(&mut self) -> Waiting<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Keeps a checkpoint and the adapter, each whole or not at all; says where.
    fn save(&mut self, saved: &Saved<'_>) -> Result<String>;
}

/// What is saved.
pub struct Saved<'a> {
    /// Optimizer steps done.
    pub step: u64,
    /// The adapter.
    pub adapter: &'a Adapter,
    /// Its values.
    pub values: &'a Values,
    /// Everything that is needed to go on, a safetensors file.
    pub checkpoint: &'a [u8],
}

/// A text to go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// For people.
    pub text: Arc<str>,
    /// As tokens, at least one.
    pub ids: Vec<i32>,
}

/// Samples written in the course of a training.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// What they go on from.
    pub prompts: Vec<Prompt>,
    /// New tokens of each.
    pub tokens: u64,
    /// How the next token is chosen.
    pub sampling: Sampling,
}

/// What a training is, apart from model, adapter and data. Intervals are in optimizer steps; 0: never.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// Optimizer steps in all, those before a resumption included.
    pub steps: u64,
    /// Learning rates.
    pub schedule: Schedule,
    /// The optimizer.
    pub adamw: AdamW,
    /// Steps from one validation, with samples, to the next. There is one before the first and after the last too.
    pub eval_every: u64,
    /// Most batches of a validation; 0: all.
    pub eval_batches: u64,
    /// Steps from one saving to the next. The end is always saved.
    pub save_every: u64,
    /// Samples, written with every validation.
    pub samples: Option<Samples>,
}

/// The data of a training.
#[derive(Clone, Debug)]
pub struct RunData {
    /// To learn from.
    pub train: Batches,
    /// To judge by.
    pub valid: Option<Batches>,
}

impl RunData {
    /// What a training over these rows needs.
    ///
    /// Errors: [`Error::Invalid`] if prompt and new tokens of a sample are longer than the model's context.
    pub fn spec(&self, model: &Model, settings: &RunSettings) -> Result<RunSpec> {
        let most = model.config().max_positions;
        let writer = settings.samples.as_ref().filter(|s| !s.prompts.is_empty()).map(|samples| {
            let longest = samples.prompts.iter().map(|p| p.ids.len() as u64).max().unwrap_or(0);
            if samples.prompts.iter().any(|p| p.ids.is_empty()) || longest + samples.tokens > most {
                let reason = format!(
                    "{longest} tokens and {} new ones: from 1 to {most} together are possible with this model",
                    samples.tokens
                );
                return Err(Error::Invalid { what: "--sample-prompt".into(), reason });
            }
            Ok((longest.clamp(2, PROMPT_CHUNK), longest + samples.tokens))
        });
        let evaluations = self.valid.as_ref().map(Batches::buckets).unwrap_or_default();
        let (buckets, accumulation) = (self.train.buckets(), self.train.accumulation());
        let longest = buckets.iter().chain(&evaluations).map(|b: &Bucket| b.tokens).max().unwrap_or(0);
        if longest > most {
            let reason = format!("the data has rows of {longest} tokens, but the model's context is {most}");
            return Err(Error::Invalid { what: "--max-seq-length".into(), reason });
        }
        Ok(RunSpec { buckets, evaluations, accumulation, writer: writer.transpose()?, adamw: settings.adamw })
    }

    /// Whether a training over these rows may go on from a checkpoint.
    ///
    /// Errors: [`Error::Invalid`], naming the flag, if the rows or the way they are batched are others, or if it has all the
    /// steps already.
    pub fn accepts(&self, checkpoint: &Checkpoint, settings: &RunSettings) -> Result<()> {
        let (file, done) = (&checkpoint.file, checkpoint.step);
        for (name, here) in self.notes() {
            let there = checkpoint.notes.get(&name);
            if there != Some(&here) {
                let there = there.map_or("nothing", String::as_str);
                let flag = if name == ORDER { "--seed or --no-shuffle".into() } else { format!("--{name}") };
                let reason = format!(
                    "the training of {file} had {there}, this one has {here}; it would not be the same training"
                );
                return Err(Error::Invalid { what: flag, reason });
            }
        }
        if done >= settings.steps {
            let reason = format!("{file} has {done} of {} steps already; ask for more to go on", settings.steps);
            return Err(Error::Invalid { what: "--iters".into(), reason });
        }
        Ok(())
    }

    /// What a checkpoint says of the data, so that a training goes on over the same rows in the same order.
    fn notes(&self) -> BTreeMap<String, String> {
        let order = match self.train.order() {
            Order::File => "as in the file".into(),
            Order::Shuffled { seed } => format!("shuffled by seed {seed}"),
        };
        let notes = [
            (DATA, format!("{:016x}", self.train.set().fingerprint())),
            (ROWS, self.train.rows().to_string()),
            (ACCUMULATION, self.train.accumulation().to_string()),
            (ORDER, order),
        ];
        notes.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }
}

const DATA: &str = "data";
const ROWS: &str = "batch-size";
const ACCUMULATION: &str = "grad-accumulation-steps";
const ORDER: &str = "order";

/// A training under way.
pub struct Run<'a> {
    /// The session with the adapter, for whatever comes between and after.
    pub trainer: Trainer<'a>,
    data: RunData,
    settings: RunSettings,
    /// The step that was last saved.
    saved: Option<u64>,
    resumed: bool,
}

impl<'a> Run<'a> {
    /// Plans a training. Pure: reads no weight byte and needs no device.
    ///
    /// Errors: as [`RunPlan::new`] and [`RunData::spec`].
    pub fn plan(
        model: &Model,
        adapter: &Adapter,
        data: &RunData,
        settings: &RunSettings,
        caps: &Caps,
        budget: Budget,
        options: Options,
    ) -> Result<RunPlan> {
        RunPlan::new(model, Some(adapter), &data.spec(model, settings)?, caps, budget, options)
    }

    /// Makes the session and gives the adapter its first values. The first event is the plan.
    #[allow(clippy::too_many_arguments)] // all that a training is
    pub async fn begin(
        device: &Device,
        model: &'a Model,
        adapter: &'a Adapter,
        data: RunData,
        settings: RunSettings,
        plan: RunPlan,
        first: &[Vec<f32>],
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<Run<'a>> {
        let spec = data.spec(model, &settings)?;
        events.event(Event::Plan(Arc::new(plan.forecast(spec.accumulation))));
        device.reset_peak_memory();
        let trainer = Trainer::begin(device, model, adapter, &spec, plan, first, cancel, events).await?;
        Ok(Run { trainer, data, settings, saved: None, resumed: false })
    }

    /// Goes on from a checkpoint of the same training. Errors: as [`RunData::accepts`]; what reading it returns. Nothing is
    /// changed then.
    pub async fn resume(&mut self, checkpoint: &Checkpoint, events: &mut dyn EventSink) -> Result<()> {
        self.data.accepts(checkpoint, &self.settings)?;
        self.trainer.resume_from(checkpoint).await?;
        for (name, here) in self.optimizer_notes() {
            if let Some(there) = checkpoint.notes.get(&name).filter(|there| **there != here) {
                let text = format!("{name} was {there}; from here on it is {here}");
                events.event(Event::Note { text: text.into() });
            }
        }
        let step = checkpoint.step;
        (self.saved, self.resumed) = (Some(step), true);
        events.event(Event::Resumed { step });
        Ok(())
    }

    fn optimizer_notes(&self) -> BTreeMap<String, String> {
        let (schedule, adamw) = (&self.settings.schedule, &self.settings.adamw);
        BTreeMap::from([
            ("learning rate".to_string(), format!("{schedule:?}")),
            ("optimizer".to_string(), format!("{adamw:?}")),
        ])
    }

    /// Trains until all steps are done. When it fails or is cancelled, the steps done so far are saved first.
    pub async fn fit(&mut self, cancel: &Cancel, host: &mut dyn Host) -> Result<()> {
        let start = Instant::now();
        let result = self.steps(cancel, host).await;
        let step = self.trainer.step_count();
        if let Err(error) = result {
            let worth = step > 0 || matches!(error, Error::Cancelled);
            if worth && self.saved != Some(step) {
                // A lost device has nothing left to save; the error to report is the first one.
                let _ = self.save(host).await;
            }
            return Err(error);
        }
        if self.saved != Some(step) {
            self.save(host).await?;
        }
        host.event(Event::End { step, seconds: start.elapsed().as_secs_f64() });
        Ok(())
    }

    async fn steps(&mut self, cancel: &Cancel, host: &mut dyn Host) -> Result<()> {
        if !self.resumed {
            self.look(cancel, host).await?;
        }
        while self.trainer.step_count() < self.settings.steps {
            host.before_step().await;
            if cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            self.step(cancel, host).await?;
            let (step, last) = (self.trainer.step_count(), self.settings.steps);
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            if due(self.settings.eval_every) || step == last {
                self.look(cancel, host).await?;
            }
            if due(self.settings.save_every) && step < last {
                self.save(host).await?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, cancel: &Cancel, host: &mut dyn Host) -> Result<()> {
        let start = Instant::now();
        let number = self.trainer.step_count();
        let window = self.data.train.window(number).await?;
        let rate = self.settings.schedule.rate(number);
        let report = self.trainer.step(&window, rate, cancel, host).await?;
        let seconds = start.elapsed().as_secs_f64();
        let usage = self.trainer.session.device().ledger().usage();
        let witness_bytes = host.witness_bytes();
        host.event(Event::Step(Step {
            step: number + 1,
            steps: self.settings.steps,
            loss: report.loss,
            finite: report.finite,
            norm: f64::from(report.norm),
            learning_rate: rate,
            trained_tokens: report.trained,
            tokens: report.tokens,
            seconds,
            tokens_per_second: report.trained as f64 / seconds.max(1e-9),
            peak_bytes: usage.peak,
            planned_peak_bytes: self.trainer.session.set().planned_peak(),
            active_bytes: usage.active.total(),
            loads: report.loads,
            streamed_bytes: report.streamed_bytes,
            work: report.work,
            witness_bytes,
        }));
        Ok(())
    }

    /// Validation and samples.
    async fn look(&mut self, cancel: &Cancel, host: &mut dyn Host) -> Result<()> {
        let step = self.trainer.step_count();
        if self.data.valid.is_some() {
            let start = Instant::now();
            let loss = self.evaluate(cancel, host).await?;
            host.event(Event::Eval { step, loss, seconds: start.elapsed().as_secs_f64() });
        }
        let Some(samples) = self.settings.samples.clone() else { return Ok(()) };
        for prompt in &samples.prompts {
            let text = self.sample(prompt, &samples, cancel, host).await?;
            host.event(Event::Sample { step, prompt: prompt.text.clone(), text: text.into() });
        }
        Ok(())
    }

    /// Mean loss over the validation's trained tokens. One batch is in host memory at a time.
    async fn evaluate(&mut self, cancel: &Cancel, host: &mut dyn Host) -> Result<f64> {
        let Some(valid) = &self.data.valid else {
            return Err(Error::Invalid { what: "--data".into(), reason: "there are no rows to judge by".into() });
        };
        let all = valid.evaluation_batches();
        let count = if self.settings.eval_batches == 0 { all } else { all.min(self.settings.eval_batches) };
        let (mut sum, mut tokens) = (0.0, 0);
        for index in 0..count {
            let batch = valid.evaluation(index).await?;
            let trained = batch.trained();
            sum += self.trainer.evaluate(std::slice::from_ref(&batch), cancel, host).await? * trained as f64;
            tokens += trained;
        }
        Ok(sum / tokens.max(1) as f64)
    }

    async fn sample(
        &mut self,
        prompt: &Prompt,
        samples: &Samples,
        cancel: &Cancel,
        host: &mut dyn Host,
    ) -> Result<String> {
        let Some(writer) = self.trainer.writer() else { return Ok(String::new()) };
        let encoder = self.data.train.set().encoder();
        let mut stop: Vec<i32> = self.trainer.model.config().eos.iter().map(|id| *id as i32).collect();
        stop.push(encoder.end() as i32);
        let (model, sampling, count) = (self.trainer.model, &samples.sampling, samples.tokens as usize);
        let session = &mut self.trainer.session;
        let ids =
            writer.write(session, model, &prompt.ids, count, &stop, sampling, cancel, host, &mut |_| true).await?;
        let ids: Vec<u32> = ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
        self.data.train.set().encoder().tokenizer().decode(&ids, true)
    }

    /// Saves now.
    pub async fn save(&mut self, host: &mut dyn Host) -> Result<()> {
        let step = self.trainer.step_count();
        let mut notes = self.data.notes();
        notes.extend(self.optimizer_notes());
        let checkpoint = self.trainer.checkpoint(&notes).await?;
        let values = self.trainer.values().await?;
        let adapter = self.trainer.adapter;
        let place = host.save(&Saved { step, adapter, values: &values, checkpoint: &checkpoint })?;
        self.saved = Some(step);
        host.event(Event::Saved { step, place: place.into() });
        Ok(())
    }

    /// The data.
    pub fn data(&self) -> &RunData {
        &self.data
    }

    /// The micro-batches of a step, as it will take them: for tests and for looking.
    pub async fn window(&mut self, step: u64) -> Result<Vec<Micro>> {
        self.data.train.window(step).await
    }
}
