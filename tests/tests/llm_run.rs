//! A whole training as the library runs it: memory that stands still, failures that leave no trace, a plan that reads nothing.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use ebbtide::compile::{Budget, Options};
use ebbtide::event::{EventSink, Step};
use ebbtide::llm::adapters::{Adapter, LoraSpec, Values};
use ebbtide::llm::data::{Batches, DataOptions, Dataset, Encoder, Order};
use ebbtide::llm::models::Model;
use ebbtide::llm::run::{Host, Run, RunData, RunSettings, Saved};
use ebbtide::llm::schedule::Schedule;
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide::nn::AdamW;
use ebbtide::{Cancel, Caps, Catalog, Device, Error, Event, Result, Source};
use ebbtide_tests::engine::{Tampered, device, fixture, wait};
use ebbtide_tests::models::{llama, llama_config, llama_file};

fn encoder(model: &Model, max_tokens: u64) -> Arc<Encoder> {
    let tokenizer = Arc::new(wait(Tokenizer::open(fixture("tokenizers/tiny512"))).unwrap());
    let options = DataOptions { mask_prompt: false, max_tokens };
    Arc::new(Encoder::of_model(tokenizer, model.config(), options).unwrap())
}

/// A row of JSON with so many tokens, or one or two fewer.
fn row(encoder: &Encoder, tokens: u64) -> String {
    let mut text = String::from("sea");
    while encoder.tokenizer().encode(&text, true).unwrap().len() as u64 + 3 <= tokens {
        text.push_str(" sea");
    }
    format!("{{\"text\": \"{text}\"}}\n")
}

fn rows(model: &Model, lengths: impl Iterator<Item = u64>, most: u64) -> Dataset {
    let encoder = encoder(model, most);
    let text: String = lengths.map(|n| row(&encoder, n)).collect();
    wait(Dataset::scan(Source::memory("rows.jsonl", text.into_bytes()), encoder)).unwrap()
}

fn settings(steps: u64) -> RunSettings {
    RunSettings {
        steps,
        schedule: Schedule::constant(1e-3).unwrap(),
        adamw: AdamW { max_norm: 1.0, ..AdamW::default() },
        eval_every: 0,
        eval_batches: 0,
        save_every: 0,
        samples: None,
    }
}

fn adapter(model: &Model) -> Adapter {
    Adapter::new(model, LoraSpec { seed: 5, dropout: 0.1, ..LoraSpec::default() }).unwrap()
}

/// Keeps what happened; cancels or fails when it is told to.
#[derive(Default)]
struct Kept {
    steps: Vec<Step>,
    /// Per step: buffers that exist, bind groups aside.
    buffers: Vec<u64>,
    evals: Vec<f64>,
    values: Values,
    device: Option<Device>,
    /// Events until the token is set.
    until: Option<(u64, Cancel)>,
    refuse: bool,
}

impl EventSink for Kept {
    fn event(&mut self, event: Event) {
        if let Some((left, cancel)) = &mut self.until {
            if *left == 0 {
                cancel.cancel();
            }
            *left = left.saturating_sub(1);
        }
        match event {
            Event::Step(step) => {
                self.steps.push(step);
                self.buffers.extend(self.device.as_ref().map(|d| d.ledger().usage().buffers));
            }
            Event::Eval { loss, .. } => self.evals.push(loss),
            _ => {}
        }
    }
}

impl Host for Kept {
    fn save(&mut self, saved: &Saved<'_>) -> Result<String> {
        if self.refuse {
            return Err(Error::Io { file: "the disk".into(), reason: "full".into() });
        }
        self.values.clone_from(saved.values);
        Ok("here".into())
    }
}

fn begin<'a>(
    device: &Device,
    model: &'a Model,
    adapter: &'a Adapter,
    data: RunData,
    settings: RunSettings,
    budget: Budget,
) -> Run<'a> {
    let plan = Run::plan(model, adapter, &data, &settings, device.caps(), budget, Options::default()).unwrap();
    let first = adapter.initial(5);
    let mut sink = Kept::default();
    wait(Run::begin(device, model, adapter, data, settings, plan, &first, &Cancel::new(), &mut sink)).unwrap()
}

/// Trains over rows of these lengths in this order, judging every `every` steps; memory must be the forecast's at every step.
fn steady(lengths: &[u64], order: Order, every: u64) {
    let device = device();
    let most = *lengths.iter().max().unwrap();
    let model = llama(2, 64, most);
    let adapter = adapter(&model);
    let train = Batches::new(rows(&model, lengths.iter().copied(), most), order, 1, 1).unwrap();
    let valid = Batches::new(rows(&model, [32, most / 2].into_iter(), most), Order::File, 1, 1).unwrap();
    assert!(train.buckets().last().unwrap().tokens == most);
    let settings = RunSettings { eval_every: every, ..settings(lengths.len() as u64) };
    let data = RunData { train, valid: Some(valid) };
    let mut run = begin(&device, &model, &adapter, data, settings, Budget::Percent(50.0));
    let mut kept = Kept { device: Some(device.clone()), ..Kept::default() };
    wait(run.fit(&Cancel::new(), &mut kept)).unwrap();
    let planned = run.trainer.session.set().planned_peak();
    assert_eq!(kept.steps.len(), lengths.len());
    for step in &kept.steps {
        assert_eq!((step.peak_bytes, step.active_bytes), (planned, planned), "step {}", step.step);
    }
    assert!(kept.buffers.windows(2).all(|w| w[0] == w[1]), "buffers were made: {:?}", kept.buffers);
    let tokens: Vec<u64> = kept.steps.iter().map(|s| s.tokens).collect();
    assert_eq!(tokens.iter().max(), Some(&most));
    if order == Order::File {
        assert_eq!(tokens.iter().position(|t| *t == most), Some(lengths.len() - 1), "the longest comes last");
    }
    assert!(kept.evals.last() < kept.evals.first(), "{:?}", kept.evals);
}

#[test]
fn lengths_in_any_order_never_leave_the_forecast() {
    let lengths: Vec<u64> = (0..16).map(|i| 32 * (1 + i % 4)).collect();
    steady(&lengths, Order::Shuffled { seed: 1 }, 5);
    let mut late = vec![32; 15];
    late.push(128);
    steady(&late, Order::File, 5);
}

#[test]
#[ignore = "takes minutes; the long suite runs it"]
fn two_hundred_steps_of_lengths_up_to_1024_never_leave_the_forecast() {
    let lengths: Vec<u64> = (0..200).map(|i| 32 * (1 + i % 32)).collect();
    steady(&lengths, Order::Shuffled { seed: 1 }, 20);
    let mut late = vec![32; 199];
    late.push(1024);
    steady(&late, Order::File, 20);
}

#[test]
fn a_plan_reads_the_header_and_no_weight_byte() {
    let config = llama_config(4, 64, 128);
    let bytes = llama_file(&config);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let end = Arc::new(AtomicU64::new(0));
    let seen = end.clone();
    let source = Tampered::source("model.safetensors", bytes, move |offset, buf| {
        seen.fetch_max(offset + buf.len() as u64, Ordering::SeqCst);
        None
    });
    let model = Model::new(config, wait(Catalog::from_sources(vec![source])).unwrap()).unwrap();
    let adapter = adapter(&model);
    let data = RunData {
        train: Batches::new(rows(&model, [40, 60].into_iter(), 64), Order::File, 1, 2).unwrap(),
        valid: None,
    };
    for budget in [Budget::Floor, Budget::Percent(50.0), Budget::All] {
        let caps = Caps::webgpu_defaults();
        Run::plan(&model, &adapter, &data, &settings(1), &caps, budget, Options::default()).unwrap();
    }
    assert!(end.load(Ordering::SeqCst) <= header, "bytes behind the header of {header} were read");
}

#[test]
fn a_failure_anywhere_leaves_the_next_step_as_if_nothing_had_happened() {
    let device = device();
    let config = llama_config(3, 64, 64);
    let bytes = llama_file(&config);
    // Each counts down to the read that fails; below zero none does.
    let (weights, data) = (Arc::new(AtomicI64::new(-1)), Arc::new(AtomicI64::new(-1)));
    let (weight_reads, data_reads) = (weights.clone(), data.clone());
    let failing = |left: &AtomicI64| left.load(Ordering::SeqCst) >= 0 && left.fetch_sub(1, Ordering::SeqCst) == 0;
    let source = Tampered::source("model.safetensors", bytes, move |_, _| {
        failing(&weight_reads).then(|| Err(std::io::Error::other("injected")))
    });
    let model = Model::new(config, wait(Catalog::from_sources(vec![source])).unwrap()).unwrap();
    let encoder = encoder(&model, 32);
    let text: String = (0..8).map(|i| row(&encoder, 20 + i)).collect();
    let panics = Arc::new(AtomicI64::new(-1));
    let panicking = panics.clone();
    let source = Tampered::source("rows.jsonl", text.into_bytes(), move |_, _| {
        assert!(!failing(&panicking), "a callback of the user panics");
        failing(&data_reads).then(|| Err(std::io::Error::other("injected")))
    });
    let set = wait(Dataset::scan(source, encoder)).unwrap();
    let adapter = adapter(&model);
    let new = || {
        let train = Batches::new(set.clone(), Order::Shuffled { seed: 2 }, 1, 2).unwrap();
        begin(&device, &model, &adapter, RunData { train, valid: None }, settings(1), Budget::Floor)
    };
    let (want_loss, want_values) = {
        let (mut run, mut kept) = (new(), Kept::default());
        wait(run.fit(&Cancel::new(), &mut kept)).unwrap();
        (kept.steps[0].loss, kept.values)
    };
    let mut run = new();
    let before = device.ledger().usage();
    let settled = |what: &str| {
        let now = device.ledger().usage();
        assert_eq!((now.active, now.buffers), (before.active, before.buffers), "after {what}");
    };
    for row in 0..2 {
        data.store(row, Ordering::SeqCst);
        let error = wait(run.fit(&Cancel::new(), &mut Kept::default())).unwrap_err();
        assert_eq!(error.code(), "io", "{error}");
        settled("a read of the data that fails");
    }
    panics.store(1, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| wait(run.fit(&Cancel::new(), &mut Kept::default())))).is_err());
    settled("a callback that panics");
    // Every read of a step in turn, until a step gets through with fewer.
    let mut reads = 0;
    loop {
        weights.store(reads, Ordering::SeqCst);
        let mut kept = Kept { refuse: true, ..Kept::default() };
        let error = wait(run.fit(&Cancel::new(), &mut kept)).unwrap_err();
        settled("a load that fails");
        if kept.steps.len() == 1 {
            // The step was done; what failed is the saving.
            assert!(error.to_string().contains("the disk") && kept.steps[0].loss == want_loss, "{error}");
            break;
        }
        assert!(error.to_string().contains("injected"), "{error}");
        reads += if reads < 8 { 1 } else { 7 };
    }
    weights.store(-1, Ordering::SeqCst);
    assert!(reads > 10, "a step has {reads} reads");
    // Saved at last, the adapter is the one of the run that nothing befell.
    let mut kept = Kept::default();
    wait(run.fit(&Cancel::new(), &mut kept)).unwrap();
    assert!(kept.values == want_values, "another adapter");
    drop(run);

    // Ctrl-C after every few events.
    let mut run = new();
    let mut event = 0;
    loop {
        let cancel = Cancel::new();
        let mut kept = Kept { until: Some((event, cancel.clone())), ..Kept::default() };
        match wait(run.fit(&cancel, &mut kept)) {
            Ok(()) => {
                assert!(kept.steps[0].loss == want_loss && kept.values == want_values, "after {event} events");
                break;
            }
            Err(error) => assert_eq!(error.code(), "cancelled", "{error}"),
        }
        settled("an interruption");
        event += 5;
    }
    assert!(event > 20, "a step has {event} events");
}
