//! Training: the engine's own loop, with a page as its host.

use std::rc::Rc;
use std::sync::Arc;

use ebbtide::compile::{Breakdown, Budget, Options};
use ebbtide::event::{Event, EventSink};
use ebbtide::llm::adapters::{Adapter, CONFIG_FILE, LoraSpec, Targets, Values, WEIGHTS_FILE};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::run::{self, Host, Prompt, Run, RunData, Samples, Saved};
use ebbtide::llm::schedule::{Decay, Schedule};
use ebbtide::llm::trainer::{Checkpoint, RunPlan};
use ebbtide::nn::AdamW;
use ebbtide::rt::Waiting;
use ebbtide::{Caps, Device, Error, Result, Source};

use super::material::Material;
use super::{Attachment, Bench, Sink, missing};
use crate::protocol::{ByCategory, Forecast, Progress, Reply, RunSettings, SampleSettings, Step};

/// Devices that may be lost, one after the other without a step between them, before a run gives up.
const MOST_LOST: u32 = 3;
/// Optimizer steps of a run where nothing is said.
const STEPS: u64 = 60;
/// Steps between two checkpoints.
const SAVE_EVERY: u64 = 10;

/// What a run has reached.
#[derive(Clone)]
pub(crate) struct Trained {
    pub run: RunSettings,
    pub steps: u64,
    pub values: Values,
    /// A safetensors file.
    pub checkpoint: Arc<[u8]>,
    /// Steps and their losses.
    pub losses: Vec<(u64, f64)>,
}

/// The adapter that settings describe.
pub(crate) fn adapter_of(material: &Material, run: &RunSettings) -> Result<Adapter> {
    let model = &material.model;
    let default = if model.linear_layers().contains(&"q_proj") { "q_proj,v_proj" } else { "c_attn" };
    let spec = LoraSpec {
        rank: run.rank.unwrap_or(8),
        alpha: run.alpha.unwrap_or(16.0),
        rslora: false,
        dropout: run.dropout.unwrap_or(0.0),
        seed: run.seed.unwrap_or(0),
        targets: Targets::parse(run.target_modules.as_deref().unwrap_or(default))?,
        blocks: None,
    };
    Adapter::new(model, spec)
}

/// The budget that settings ask for. `auto` knows no witness of free memory here.
pub(crate) fn budget_of(run: &RunSettings) -> Result<(String, Budget)> {
    let text = run.budget.clone().unwrap_or_else(|| "auto".into());
    let budget = match text.parse()? {
        Budget::Auto { .. } => Budget::Auto { limit: if is_phone() { 512 << 20 } else { 1 << 30 } },
        other => other,
    };
    Ok((text, budget))
}

fn is_phone() -> bool {
    let get = |of: &wasm_bindgen::JsValue, name: &str| js_sys::Reflect::get(of, &name.into()).unwrap_or_default();
    let navigator = get(&js_sys::global(), "navigator");
    let agent = get(&navigator, "userAgent").as_string().unwrap_or_default();
    agent.contains("Mobi") || agent.contains("Android")
}

/// How samples are drawn.
pub(crate) fn sampling_of(sample: &SampleSettings) -> Result<Sampling> {
    let sampling = Sampling {
        temperature: sample.temperature.unwrap_or(0.0),
        top_k: sample.top_k.unwrap_or(0) as usize,
        top_p: sample.top_p.unwrap_or(1.0),
        seed: sample.seed.unwrap_or(0).into(),
        ..Sampling::default()
    };
    sampling.check()?;
    Ok(sampling)
}

/// A prompt as tokens; an empty one is the token that begins a text.
pub(crate) fn prompt_of(material: &Material, sample: &SampleSettings) -> Result<Prompt> {
    let text = sample.prompt.clone().unwrap_or_default();
    let mut ids = material.tokenizer.encode(&text, true)?;
    if ids.is_empty() {
        let begin = material.tokenizer.bos().or(material.tokenizer.eos()).map(|s| s.id);
        ids.extend(begin.or(material.model.config().bos).or(material.model.config().eos.first().copied()));
    }
    let ids = ids.into_iter().filter_map(|id| i32::try_from(id).ok()).collect();
    Ok(Prompt { text: text.into(), ids })
}

pub(crate) const SAMPLE_TOKENS: u64 = 48;

fn settings_of(material: &Material, run: &RunSettings, done: u64) -> Result<run::RunSettings> {
    let steps = done + run.steps.unwrap_or(STEPS);
    if run.steps == Some(0) {
        return Err(Error::Invalid { what: "steps".into(), reason: "a training has at least one".into() });
    }
    let decay: Decay = run.lr_schedule.as_deref().unwrap_or("constant").parse()?;
    let samples = match &run.sample {
        Some(sample) => Some(Samples {
            prompts: vec![prompt_of(material, sample)?],
            tokens: sample.tokens.unwrap_or(SAMPLE_TOKENS).max(1),
            sampling: sampling_of(sample)?,
        }),
        None => None,
    };
    Ok(run::RunSettings {
        steps,
        schedule: Schedule::new(run.learning_rate.unwrap_or(2e-3), 0.0, run.warmup.unwrap_or(0), steps, decay)?,
        adamw: AdamW::default(),
        eval_every: run.steps_per_eval.unwrap_or(0),
        eval_batches: 0,
        save_every: run.save_every.unwrap_or(SAVE_EVERY),
        samples,
    })
}

/// Bytes by category, as the page reads them.
pub(crate) fn by_category(bytes: &Breakdown) -> ByCategory {
    bytes.iter().map(|(category, bytes)| (category.name().to_string(), bytes)).collect()
}

/// Everything that a run is planned from.
struct Plan<'a> {
    material: &'a Material,
    adapter: &'a Adapter,
    data: &'a RunData,
    settings: &'a run::RunSettings,
}

impl Plan<'_> {
    fn at(&self, caps: &Caps, budget: Budget) -> Result<RunPlan> {
        let model = &self.material.model;
        Run::plan(model, self.adapter, self.data, self.settings, caps, budget, Options::default())
    }
}

impl Bench {
    /// The forecast of a run.
    pub fn plan(&self, run: &RunSettings) -> Result<Reply> {
        let (material, data) = (self.model()?, self.data()?);
        let adapter = adapter_of(&material, run)?;
        let settings = settings_of(&material, run, 0)?;
        let data = data.for_run(run)?;
        let plan = Plan { material: &material, adapter: &adapter, data: &data, settings: &settings };
        let caps = self.device.borrow().as_ref().map_or_else(Caps::webgpu_defaults, |d| d.caps().clone());
        let (text, budget) = budget_of(run)?;
        let planned = plan.at(&caps, budget)?;
        Ok(Reply::Forecast { forecast: self.forecast(run, &plan, &planned, &text, &caps)? })
    }

    fn forecast(&self, run: &RunSettings, plan: &Plan<'_>, at: &RunPlan, text: &str, caps: &Caps) -> Result<Forecast> {
        let f = at.forecast(plan.data.train.accumulation());
        // The slider's right end depends on everything but the budget.
        let key = serde_json::to_string(&RunSettings { budget: None, ..run.clone() }).unwrap_or_default();
        let known = self.all_bytes.borrow().get(&key).copied();
        let all_bytes = match known {
            Some(bytes) => bytes,
            None => {
                let bytes = plan.at(caps, Budget::All)?.set.budget;
                self.all_bytes.borrow_mut().insert(key, bytes);
                bytes
            }
        };
        let catalog = plan.material.model.catalog();
        Ok(Forecast {
            budget: text.into(),
            budget_bytes: f.budget_bytes,
            floor_bytes: f.floor_bytes,
            floor_set_by: f.floor_set_by,
            all_bytes,
            peak_bytes: f.peak_bytes,
            peak_by_category: by_category(&f.peak_by_category),
            weight_bytes: f.weight_bytes,
            resident_weights: f.resident_weights,
            loads_per_step: f.loads_per_step,
            bytes_per_step: f.bytes_per_step,
            micro_batches_at_once: f.micro_batches_at_once,
            recomputes: f.recomputes,
            segments: plan.material.model.segments().map(|s| (s.name.to_string(), catalog.segment_bytes(s))).collect(),
            trainable: plan.adapter.trainable(),
        })
    }

    pub async fn train(self: &Rc<Bench>, id: u32, run: &RunSettings) -> Result<Reply> {
        let (material, data) = (self.model()?, self.data()?);
        if !material.trainable() {
            let reason =
                "its files are on a server, where every row of a batch would be a request; `copy` it first".into();
            return Err(Error::Invalid { what: format!("training {}", material.name), reason });
        }
        let before = if run.resume == Some(true) { self.trained() } else { None };
        let adapter = adapter_of(&material, run)?;
        let settings = settings_of(&material, run, before.as_ref().map_or(0, |t| t.steps))?;
        let rows = data.for_run(run)?;
        let plan = Plan { material: &material, adapter: &adapter, data: &rows, settings: &settings };
        let (text, budget) = budget_of(run)?;
        let mut reached: Option<Trained> = before.as_deref().cloned();
        if let Some(reached) = &mut reached {
            reached.run = run.clone();
        }
        let mut lost = 0;
        let mut losses_of_last_try = 0;
        loop {
            self.phase(id, "opening the GPU");
            let device = self.device().await?;
            let planned = plan.at(device.caps(), budget)?;
            let forecast = self.forecast(run, &plan, &planned, &text, device.caps())?;
            let planned_peak_bytes = forecast.peak_bytes;
            self.progress(id, Progress::Forecast { forecast });
            let mut host = PageHost {
                sink: Sink::new(self, id, &device),
                run,
                losses: reached.as_ref().map(|r| r.losses.clone()).unwrap_or_default(),
                reached,
                validation: None,
            };
            let result = attempt(self, id, &device, &plan, planned, &mut host, lost > 0).await;
            host.sink.flush();
            let usage = device.ledger().usage();
            let (validation_loss, now) = (host.validation, host.reached);
            reached = now;
            if let Some(reached) = &reached {
                *self.trained.borrow_mut() = Some(Rc::new(reached.clone()));
            }
            let stopped = match result {
                Ok(()) => false,
                Err(Error::Cancelled) => true,
                Err(error @ Error::DeviceLost { .. }) => {
                    self.forget_lost(&error);
                    // Steps done since the last loss show that it is not the run itself that loses devices.
                    let steps = reached.as_ref().map_or(0, |r| r.losses.len());
                    lost = if steps > losses_of_last_try { 1 } else { lost + 1 };
                    losses_of_last_try = steps;
                    if lost > MOST_LOST || self.cancel().is_cancelled() {
                        return Err(error);
                    }
                    if let Error::DeviceLost { reason } = error {
                        self.progress(id, Progress::Lost { reason });
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let losses = reached.as_ref().map(|r| r.losses.as_slice()).unwrap_or_default();
            let last = &losses[losses.len().saturating_sub(10)..];
            let mean = last.iter().map(|(_, loss)| loss).sum::<f64>() / last.len().max(1) as f64;
            return Ok(Reply::Trained {
                steps: reached.as_ref().map_or(0, |r| r.steps),
                stopped,
                loss: (!last.is_empty()).then_some(mean),
                validation_loss,
                peak_bytes: usage.peak,
                planned_peak_bytes,
                peak_by_category: by_category(&usage.at_peak),
            });
        }
    }

    /// The adapter in PEFT's format.
    pub fn export(&self) -> Result<(Reply, Vec<Attachment>)> {
        let material = self.model()?;
        let trained = self.trained().ok_or_else(|| missing("adapter"))?;
        let adapter = adapter_of(&material, &trained.run)?;
        let files = vec![
            (CONFIG_FILE.to_string(), adapter.config_json(&material.name).into_bytes()),
            (WEIGHTS_FILE.to_string(), adapter.weights_file(&trained.values)?),
        ];
        Ok((Reply::Adapter { steps: trained.steps }, files))
    }
}

/// One try on one device, from the last checkpoint where there is one.
async fn attempt(
    bench: &Rc<Bench>,
    id: u32,
    device: &Device,
    plan: &Plan<'_>,
    planned: RunPlan,
    host: &mut PageHost<'_>,
    again: bool,
) -> Result<()> {
    bench.phase(id, "compiling kernels and loading weights");
    let (model, adapter, cancel) = (&plan.material.model, plan.adapter, bench.cancel());
    let first = adapter.initial(adapter.spec().seed.into());
    let (data, settings) = (plan.data.clone(), plan.settings.clone());
    let mut run = Run::begin(device, model, adapter, data, settings, planned, &first, &cancel, &mut host.sink).await?;
    if let Some(checkpoint) = host.reached.as_ref().map(|r| r.checkpoint.clone()) {
        let checkpoint = Checkpoint::open(Source::memory("the last checkpoint", checkpoint), model, adapter).await?;
        run.resume(&checkpoint, host).await?;
    }
    let step = run.trainer.step_count();
    host.losses.retain(|(s, _)| *s <= step);
    if again {
        host.sink.say(Progress::Rebuilt { step });
    }
    bench.phase(id, "training");
    run.fit(&cancel, host).await
}

/// The page, as the engine's loop sees it.
struct PageHost<'a> {
    sink: Sink,
    run: &'a RunSettings,
    losses: Vec<(u64, f64)>,
    reached: Option<Trained>,
    validation: Option<f64>,
}

impl EventSink for PageHost<'_> {
    fn event(&mut self, event: Event) {
        match event {
            Event::Step(s) => {
                self.losses.push((s.step, s.loss));
                self.sink.say(Progress::Step {
                    step: Step {
                        step: s.step,
                        loss: s.loss,
                        learning_rate: s.learning_rate,
                        grad_norm: s.norm,
                        finite: s.finite,
                        trained_tokens: s.trained_tokens,
                        tokens_per_second: s.tokens_per_second,
                        milliseconds: s.seconds * 1e3,
                        loads: s.loads,
                        streamed_bytes: s.streamed_bytes,
                        peak_bytes: s.peak_bytes,
                    },
                });
            }
            Event::Eval { step, loss, .. } => {
                self.validation = Some(loss);
                self.sink.say(Progress::Validation { step, loss });
            }
            Event::Sample { step, prompt, text } => {
                self.sink.say(Progress::Sample { step, prompt: prompt.to_string(), text: text.to_string() });
            }
            Event::Note { text } => self.sink.say(Progress::Phase { phase: text.to_string() }),
            other => self.sink.event(other),
        }
    }
}

impl Host for PageHost<'_> {
    fn save(&mut self, saved: &Saved<'_>) -> Result<String> {
        self.reached = Some(Trained {
            run: self.run.clone(),
            steps: saved.step,
            values: saved.values.clone(),
            checkpoint: saved.checkpoint.into(),
            losses: self.losses.clone(),
        });
        let bytes = saved.checkpoint.len() as u64;
        self.sink.say(Progress::Checkpoint { step: saved.step, bytes });
        Ok("memory".into())
    }

    fn before_step(&mut self) -> Waiting<'_, ()> {
        let bench = self.sink.bench.clone();
        Box::pin(async move {
            if !bench.pause.held.get() {
                return;
            }
            self.sink.say(Progress::Paused { paused: true });
            while bench.pause.held.get() && !bench.cancel().is_cancelled() {
                let _ = bench.pause.wake.1.recv().await;
            }
            self.sink.say(Progress::Paused { paused: false });
        })
    }
}
