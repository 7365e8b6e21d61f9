//! LoRA training: windows of micro-batches through a session, evaluation and samples in between, checkpoints.
//!
//! Everything a run needs is compiled at once: a train step for every bucket, evaluations, the programs that write
//! samples. Accumulation is vertical: as many micro-batches as fit go through a segment together, as one larger batch;
//! groups of them carry on from one another's gradients. The bits are those of one batch of all rows.

use std::collections::BTreeMap;

use super::adapters::Adapter;
use super::generate::Writer;
use super::models::Model;
use super::programs::{self, Bucket, Inputs};
use crate::caps::Caps;
use crate::compile::{Budget, Forecast, Options, Plan, PlanSet, compile_with};
use crate::error::{Error, Result};
use crate::event::{EventSink, NoEvents};
use crate::graph::Program;
use crate::nn::{AdamW, CONTROL, Params, Part};
use crate::stream::{Cancel, Session};
use crate::weights::safetensors::{TensorSpec, write};
use crate::weights::{Catalog, DType, Source};

/// A micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Micro {
    /// Its shape.
    pub bucket: Bucket,
    /// Token ids, `[rows · tokens]`.
    pub ids: Vec<i32>,
    /// What each position is to predict; negative: nothing.
    pub labels: Vec<i32>,
    /// Identity of each row in the data, for dropout.
    pub rows: Vec<i32>,
}

impl Micro {
    /// Tokens that are trained.
    pub fn trained(&self) -> u64 {
        self.labels.iter().filter(|l| **l >= 0).count() as u64
    }
}

/// What a run needs, apart from the data.
#[derive(Clone, Debug)]
pub struct RunSpec {
    /// Shapes of the micro-batches.
    pub buckets: Vec<Bucket>,
    /// Shapes of the batches of an evaluation.
    pub evaluations: Vec<Bucket>,
    /// Micro-batches of an optimizer step.
    pub accumulation: u64,
    /// Prompt tokens at once and tokens in all, where samples are written.
    pub writer: Option<(u64, u64)>,
    /// The optimizer.
    pub adamw: AdamW,
}

/// A run's plans, and which is what.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// All plans over one table.
    pub set: PlanSet,
    /// Micro-batches that go through a segment together.
    pub group: u64,
    steps: BTreeMap<(Bucket, u8), usize>,
    evaluations: BTreeMap<Bucket, usize>,
    writer: Option<Writer>,
    /// Multiply-adds of each plan.
    work: Vec<u64>,
}

const PARTS: [Part; 4] = [Part::Whole, Part::First, Part::Middle, Part::Last];

fn number(part: Part) -> u8 {
    PARTS.iter().position(|p| *p == part).unwrap_or(0) as u8
}

impl RunPlan {
    /// Plans a run. The largest group of micro-batches that the budget holds is taken; without an adapter the set only
    /// evaluates and writes. The floor is that of single micro-batches, and a share of the weights is counted from there.
    pub fn new(
        model: &Model,
        adapter: Option<&Adapter>,
        spec: &RunSpec,
        caps: &Caps,
        budget: Budget,
        options: Options,
    ) -> Result<RunPlan> {
        let all = spec.accumulation.max(1);
        let of = |budget, group| RunPlan::with_group(model, adapter, spec, caps, budget, options, group);
        if all == 1 || adapter.is_none() {
            return of(budget, 1);
        }
        let least = of(if budget == Budget::All { Budget::Floor } else { budget }, 1)?;
        let budget = match budget {
            Budget::Floor | Budget::Percent(_) => Budget::Bytes(least.set.budget),
            other => other,
        };
        for group in (2..=all).rev().filter(|g| all.is_multiple_of(*g)) {
            match of(budget, group) {
                Ok(plan) => {
                    let (floor, floor_set_by) = (least.set.floor, least.set.floor_set_by);
                    return Ok(RunPlan { set: PlanSet { floor, floor_set_by, ..plan.set }, ..plan });
                }
                // A larger batch may also be too large for a binding.
                Err(Error::BudgetBelowFloor { .. } | Error::Limit { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        if budget == Budget::All { of(budget, 1) } else { Ok(least) }
    }

    fn with_group(
        model: &Model,
        adapter: Option<&Adapter>,
        spec: &RunSpec,
        caps: &Caps,
        budget: Budget,
        options: Options,
        group: u64,
    ) -> Result<RunPlan> {
        let groups = spec.accumulation.max(1) / group;
        let parts: &[Part] = match groups {
            1 => &PARTS[..1],
            2 => &[Part::First, Part::Last],
            _ => &PARTS[1..],
        };
        let mut buckets = spec.buckets.clone();
        // The largest first: its order of use is the set's home.
        buckets.sort_by_key(|b| std::cmp::Reverse((b.rows * b.tokens, b.tokens)));
        buckets.dedup();
        let (mut programs, mut steps): (Vec<Program>, _) = (Vec::new(), BTreeMap::new());
        for bucket in &buckets {
            let Some(adapter) = adapter else { break };
            let wide = Bucket { rows: bucket.rows * group, ..*bucket };
            for part in parts {
                steps.insert((*bucket, number(*part)), programs.len());
                programs.push(programs::train(model, adapter, wide, &spec.adamw, *part)?);
            }
        }
        let mut evaluations = BTreeMap::new();
        for bucket in &spec.evaluations {
            if !evaluations.contains_key(bucket) {
                evaluations.insert(*bucket, programs.len());
                programs.push(programs::evaluate(model, adapter, *bucket)?);
            }
        }
        let mut writer = None;
        if let Some((chunk, capacity)) = spec.writer {
            writer = Some(Writer { first: programs.len(), chunk: chunk.clamp(2, capacity.max(2)), capacity });
            programs.extend(Writer::programs(model, adapter, chunk, capacity)?);
        }
        let set = compile_with(&programs, model.catalog(), caps, budget, options)?;
        let work = set.plans.iter().map(Plan::work).collect();
        Ok(RunPlan { set, group, steps, evaluations, writer, work })
    }

    /// The forecast; what it says of a step is said of the largest bucket.
    pub fn forecast(&self, accumulation: u64) -> Forecast {
        self.set.forecast(accumulation.max(1) / self.group.max(1), self.group)
    }

    /// What writes samples.
    pub fn writer(&self) -> Option<Writer> {
        self.writer
    }
}

/// What an optimizer step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Mean loss over the trained tokens, before the update.
    pub loss: f64,
    /// Trained tokens.
    pub trained: u64,
    /// Tokens, padding included.
    pub tokens: u64,
    /// Segments loaded.
    pub loads: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// Multiply-adds, an estimate.
    pub work: u64,
    /// Global norm of the gradients.
    pub norm: f32,
    /// Whether loss and gradients were finite; if not, nothing was updated.
    pub finite: bool,
}

/// A run: a model, an adapter and a session.
pub struct Trainer<'a> {
    /// The base.
    pub model: &'a Model,
    /// The adapter.
    pub adapter: &'a Adapter,
    /// The session.
    pub session: Session,
    plan: RunPlan,
    adamw: AdamW,
    accumulation: u64,
    step: u64,
}

impl<'a> Trainer<'a> {
    /// Begins a run with the values of `first` (see [`Adapter::initial`]) and fresh moments.
    pub async fn new(
        device: &crate::gpu::Device,
        model: &'a Model,
        adapter: &'a Adapter,
        spec: &RunSpec,
        plan: RunPlan,
        first: &[Vec<f32>],
    ) -> Result<Trainer<'a>> {
        Trainer::begin(device, model, adapter, spec, plan, first, &Cancel::new(), &mut NoEvents).await
    }

    /// As [`Trainer::new`], which for a large model takes long: with events of its loads, and to be cancelled.
    #[allow(clippy::too_many_arguments)] // a session's and an adapter's beginning in one
    pub async fn begin(
        device: &crate::gpu::Device,
        model: &'a Model,
        adapter: &'a Adapter,
        spec: &RunSpec,
        plan: RunPlan,
        first: &[Vec<f32>],
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<Trainer<'a>> {
        let mut session = Session::begin(device, model.catalog(), plan.set.clone(), cancel, events).await?;
        adapter.install(&mut session, first).await?;
        let (adamw, accumulation) = (spec.adamw, spec.accumulation.max(1));
        Ok(Trainer { model, adapter, session, plan, adamw, accumulation, step: 0 })
    }

    /// Optimizer steps done.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// One optimizer step over a window of micro-batches of one bucket, at a learning rate. A step that fails or is
    /// cancelled has changed nothing.
    pub async fn step(
        &mut self,
        window: &[Micro],
        rate: f64,
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<StepReport> {
        let refuse = |reason: String| Err(Error::Invalid { what: "a training window".into(), reason });
        let Some(first) = window.first() else { return refuse("it is empty".into()) };
        if window.len() as u64 != self.accumulation || window.iter().any(|m| m.bucket != first.bucket) {
            return refuse(format!("{} micro-batches of one bucket are needed", self.accumulation));
        }
        let trained: u64 = window.iter().map(Micro::trained).sum();
        if trained == 0 {
            return refuse("no token of it is trained".into());
        }
        let (mut report, mut sum) = (StepReport { trained, ..StepReport::default() }, 0.0);
        let groups: Vec<&[Micro]> = window.chunks(self.plan.group as usize).collect();
        for (i, group) in groups.iter().enumerate() {
            let part = match (groups.len(), i) {
                (1, _) => Part::Whole,
                (_, 0) => Part::First,
                (n, i) if i + 1 == n => Part::Last,
                _ => Part::Middle,
            };
            let Some(index) = self.plan.steps.get(&(first.bucket, number(part))).copied() else {
                return refuse(format!("{:?} was not planned", first.bucket));
            };
            let mut inputs = batch(self.model, group, 1.0 / trained as f64)?;
            let rows: Vec<i32> = group.iter().flat_map(|m| m.rows.iter().copied()).collect();
            inputs.dropout(&rows, self.step as u32 + 1);
            inputs.hyper(&self.adamw.hyper(rate, self.step + 1));
            let given = inputs.of_plan(&self.plan.set.plans[index]);
            let out = self.session.run(index, &given, cancel, events).await?;
            // Token by token: sums of whatever went through together would have other bits at another budget.
            sum = out.f32(programs::LOSSES)?.into_iter().fold(sum, |sum, loss| sum + f64::from(loss));
            report.loads += out.loads;
            report.work += self.plan.work.get(index).copied().unwrap_or(0);
            report.streamed_bytes += out.streamed_bytes;
            report.tokens += group.iter().map(|m| m.ids.len() as u64).sum::<u64>();
            if matches!(part, Part::Whole | Part::Last) {
                let control = out.bytes(CONTROL)?;
                report.finite = control.first_chunk::<4>() == Some(&[0; 4]);
                report.norm = out.f32(CONTROL)?.get(2).copied().unwrap_or(f32::NAN);
            }
        }
        self.step += 1;
        report.loss = sum / trained as f64;
        Ok(report)
    }

    /// Mean loss over the trained tokens of these batches.
    pub async fn evaluate(&mut self, batches: &[Micro], cancel: &Cancel, events: &mut dyn EventSink) -> Result<f64> {
        evaluate(&mut self.session, &self.plan, self.model, batches, cancel, events).await
    }

    /// What writes samples.
    pub fn writer(&self) -> Option<Writer> {
        self.plan.writer
    }

    /// The adapter's values now.
    pub async fn values(&mut self) -> Result<Vec<Vec<f32>>> {
        self.adapter.values(&mut self.session).await
    }

    /// A checkpoint: values, moments, step, and `notes` of the caller (data position, seed …), as a safetensors file.
    pub async fn checkpoint(&mut self, notes: &BTreeMap<String, String>) -> Result<Vec<u8>> {
        let mut tensors = Vec::new();
        for name in self.state_names() {
            tensors.push((name.clone(), self.session.read_state(&name).await?));
        }
        let specs: Vec<(TensorSpec, &[u8])> = tensors
            .iter()
            .map(|(name, bytes)| {
                (TensorSpec::new(name.clone(), DType::F32, [bytes.len() as u64 / 4]), bytes.as_slice())
            })
            .collect();
        let mut metadata = notes.clone();
        metadata.insert("format".into(), FORMAT.into());
        metadata.insert("engine".into(), env!("CARGO_PKG_VERSION").into());
        metadata.insert("step".into(), self.step.to_string());
        metadata.insert("base".into(), format!("{:016x}", self.model.catalog().fingerprint()));
        metadata.insert("adapter".into(), format!("{:?}", self.adapter.spec()));
        write(Vec::new(), "checkpoint", &specs, &metadata)
    }

    /// Goes on from a checkpoint; gives its notes. Errors: as [`Checkpoint::open`]; what reading it returns.
    pub async fn resume(&mut self, source: Source) -> Result<BTreeMap<String, String>> {
        let checkpoint = Checkpoint::open(source, self.model, self.adapter).await?;
        self.resume_from(&checkpoint).await?;
        Ok(checkpoint.notes)
    }

    /// As [`Trainer::resume`], from one that was looked at before. All of it is read before any of it is used.
    pub async fn resume_from(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let mut states = Vec::new();
        for name in self.state_names() {
            states.push((checkpoint.catalog.read(checkpoint.catalog.find(&name)?).await?, name));
        }
        for (bytes, name) in states {
            self.session.write_state(&name, &bytes).await?;
        }
        self.step = checkpoint.step;
        Ok(())
    }

    fn state_names(&self) -> Vec<String> {
        let arrays = 0..self.adapter.params().arrays().len();
        let names = |i| std::iter::once(Params::values_name(i)).chain(Params::moment_names(i));
        arrays.flat_map(names).collect()
    }
}

const FORMAT: &str = "1";

/// A checkpoint, looked at and not yet used: no device is needed to see whether it fits.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The file's name.
    pub file: String,
    /// Optimizer steps done.
    pub step: u64,
    /// What it says of itself, and what the caller noted when it was made.
    pub notes: BTreeMap<String, String>,
    catalog: Catalog,
}

impl Checkpoint {
    /// Reads the header.
    ///
    /// Errors: [`Error::Format`] if it is no checkpoint, of a newer format, or of another base or another adapter.
    pub async fn open(source: Source, model: &Model, adapter: &Adapter) -> Result<Checkpoint> {
        let file = source.name().to_string();
        let catalog = Catalog::from_sources(vec![source]).await?;
        let notes = catalog.files().first().map(|f| f.header.metadata.clone()).unwrap_or_default();
        let refuse = |reason: String| Error::Format { file: file.clone(), tensor: None, reason };
        let note = |name: &str| {
            notes.get(name).cloned().ok_or_else(|| refuse(format!("it has no `{name}`: not a checkpoint")))
        };
        if note("format")? != FORMAT {
            return Err(refuse(format!(
                "checkpoints of format {} are not known; this engine writes {FORMAT}",
                note("format")?
            )));
        }
        let base = format!("{:016x}", model.catalog().fingerprint());
        if note("base")? != base {
            return Err(refuse(format!("it was made over another base model ({}, this one is {base})", note("base")?)));
        }
        let adapter = format!("{:?}", adapter.spec());
        if note("adapter")? != adapter {
            return Err(refuse(format!("it holds another adapter: {}, but asked for is {adapter}", note("adapter")?)));
        }
        let step = note("step")?.parse().map_err(|_| refuse("its step is not a number".into()))?;
        Ok(Checkpoint { file, step, notes, catalog })
    }
}

/// The inputs of several micro-batches as one batch, each trained token weighing the same.
fn batch(model: &Model, group: &[Micro], weight: f64) -> Result<Inputs> {
    let rows = group.iter().map(|m| m.bucket.rows).sum();
    let tokens = group.first().map_or(0, |m| m.bucket.tokens);
    let ids: Vec<i32> = group.iter().flat_map(|m| m.ids.iter().copied()).collect();
    let labels: Vec<i32> = group.iter().flat_map(|m| m.labels.iter().copied()).collect();
    let weights: Vec<f32> = labels.iter().map(|l| if *l < 0 { 0.0 } else { weight as f32 }).collect();
    Inputs::batch(model, Bucket { rows, tokens }, &ids, &labels, &weights)
}

/// Mean loss over the trained tokens of batches whose buckets were planned.
pub async fn evaluate(
    session: &mut Session,
    plan: &RunPlan,
    model: &Model,
    batches: &[Micro],
    cancel: &Cancel,
    events: &mut dyn EventSink,
) -> Result<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for micro in batches {
        let Some(index) = plan.evaluations.get(&micro.bucket).copied() else {
            let reason = format!("{:?} was not planned", micro.bucket);
            return Err(Error::Invalid { what: "an evaluation batch".into(), reason });
        };
        let trained = micro.trained();
        if trained == 0 {
            continue;
        }
        // The mean of the batch, then weighed: sums of many losses would lose digits in f32.
        let inputs = batch(model, std::slice::from_ref(micro), 1.0 / trained as f64)?;
        let out = session.run(index, &inputs.of_plan(&plan.set.plans[index]), cancel, events).await?;
        sum += f64::from(out.f32("loss")?[0]) * trained as f64;
        count += trained;
    }
    if count == 0 {
        return Err(Error::Invalid { what: "evaluation".into(), reason: "no token of it counts".into() });
    }
    Ok(sum / count as f64)
}
