//! The demo's model learns the demo's data as the reference library does: losses, adapters, validation, greedy samples.
//!
//! Ten steps always; all sixty with validation and samples in the long suite (`--ignored`), as they take minutes on two
//! cores.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ebbtide::compile::Budget;
use ebbtide::llm::adapters::{Adapter, Values};
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, Inputs, decode, evaluate, prefill, train};
use ebbtide::nn::{AdamW, Part};
use ebbtide::{Catalog, Device, Session};
use ebbtide_tests::engine::{device, wait};
use ebbtide_tests::refs::{self, Tensors, close, largest, worst};

const STEP: Bucket = Bucket { rows: 4, tokens: 64 };
const CAPACITY: u64 = 64;
const RATE: f64 = 2e-3;
/// Tolerances of the reference's README.
const LOSS: f32 = 1e-4;
const ADAPTER: f32 = 1e-3;
const GRADIENT: f32 = 3e-5;

fn tiny() -> Model {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../native/assets/tiny-shakespeare-llama");
    Model::new(refs::config(&folder.join("config.json")), wait(Catalog::open(&folder)).unwrap()).unwrap()
}

fn open(model: &Model, which: &str) -> (Adapter, Values) {
    wait(Adapter::open(&refs::path("tiny_shakespeare_lora").join(which), model)).unwrap()
}

/// Ids and labels of rows whose lengths say where padding begins: a token's label is its successor.
fn labels(ids: &[i32], lengths: &[i32], tokens: usize) -> Vec<i32> {
    let row = |(row, length): (&[i32], &i32)| {
        (0..tokens).map(|i| if i + 1 < *length as usize { row[i + 1] } else { -100 }).collect::<Vec<_>>()
    };
    ids.chunks(tokens).zip(lengths).flat_map(row).collect()
}

struct Run {
    device: Device,
    model: Model,
    adapter: Adapter,
    batches: Tensors,
}

impl Run {
    fn new() -> (Run, Values) {
        let model = tiny();
        let (adapter, init) = open(&model, "init");
        let batches = Tensors::read(refs::path("tiny_shakespeare_lora/batches.safetensors"));
        (Run { device: device(), model, adapter, batches }, init)
    }

    fn session(&self, values: &Values, budget: Budget) -> Session {
        let adamw = AdamW::default();
        let programs = [
            train(&self.model, &self.adapter, STEP, &adamw, Part::Whole).unwrap(),
            evaluate(&self.model, Some(&self.adapter), STEP).unwrap(),
            prefill(&self.model, Some(&self.adapter), 8, CAPACITY).unwrap(),
            decode(&self.model, Some(&self.adapter), CAPACITY).unwrap(),
            train(&self.model, &self.adapter, STEP, &adamw, Part::First).unwrap(),
        ];
        let mut session = refs::session(&self.device, &self.model, &programs, budget);
        wait(self.adapter.install(&mut session, values)).unwrap();
        session
    }

    fn batch(&self, step: usize) -> Inputs {
        let ids = &self.batches.ints("input_ids")[step * 256..][..256];
        let lengths = &self.batches.ints("lengths")[step * 4..][..4];
        let mut batch = refs::mean_batch(&self.model, STEP, ids, &labels(ids, lengths, 64));
        batch.hyper(&AdamW::default().hyper(RATE, step as u64 + 1));
        batch
    }

    fn train(&self, session: &mut Session, steps: usize) -> Vec<f32> {
        (0..steps).map(|s| refs::run(session, 0, &self.batch(s)).f32("loss").unwrap()[0]).collect()
    }

    /// The mean loss over all validation tokens, four rows at a time.
    fn validation(&self, session: &mut Session) -> f64 {
        let (ids, lengths) = (self.batches.ints("valid_input_ids"), self.batches.ints("valid_lengths"));
        let (mut sum, mut count) = (0.0, 0);
        for (ids, lengths) in ids.chunks(256).zip(lengths.chunks(4)) {
            let labels = labels(ids, lengths, 64);
            let weights: Vec<f32> = labels.iter().map(|l| if *l < 0 { 0.0 } else { 1.0 }).collect();
            let batch = Inputs::batch(&self.model, STEP, ids, &labels, &weights).unwrap();
            sum += f64::from(refs::run(session, 1, &batch).f32("loss").unwrap()[0]);
            count += labels.iter().filter(|l| **l >= 0).count();
        }
        sum / count as f64
    }

    fn sample(&self, session: &mut Session, prompt: &[i32], count: usize) -> Vec<i32> {
        let mut step = |plan: usize, start: usize, ids: &[i32]| {
            let inputs = Inputs::text(&self.model, if plan == 2 { 8 } else { 1 }, CAPACITY, start as u64, ids).unwrap();
            let logits = refs::run(session, plan, &inputs).f32("logits").unwrap();
            (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as i32
        };
        let mut new = vec![step(2, 0, prompt)];
        while new.len() < count {
            new.push(step(3, prompt.len() + new.len() - 1, &new[new.len() - 1..]));
        }
        new
    }

    fn samples(&self, session: &mut Session, reference: &serde_json::Value) {
        let ints = |v: &serde_json::Value| {
            v.as_array().unwrap().iter().map(|x| x.as_i64().unwrap() as i32).collect::<Vec<_>>()
        };
        for sample in reference.as_array().unwrap() {
            let want = ints(&sample["new_ids"]);
            let got = self.sample(session, &ints(&sample["prompt_ids"]), want.len());
            assert_eq!(got, want, "behind {}", sample["prompt"]);
        }
    }
}

#[test]
fn ten_steps_give_the_losses_of_the_reference_and_the_same_bits_at_the_floor() {
    let (run, init) = Run::new();
    let reference = run.batches.f32("losses");
    let mut session = run.session(&init, Budget::Percent(25.0));
    let losses = run.train(&mut session, 10);
    close("losses", &losses, &reference[..10], LOSS);
    let values = wait(run.adapter.values(&mut session)).unwrap();
    drop(session);
    let mut floor = run.session(&init, Budget::Floor);
    assert_eq!(run.train(&mut floor, 10), losses);
    assert!(wait(run.adapter.values(&mut floor)).unwrap() == values);
}

#[test]
fn the_first_gradients_are_those_of_the_reference() {
    let (run, init) = Run::new();
    let want = Tensors::read(refs::path("tiny_shakespeare_lora/grads.safetensors"));
    let mut session = run.session(&init, Budget::Percent(50.0));
    refs::run(&mut session, 4, &run.batch(0));
    let got = wait(run.adapter.read_arrays(&mut session, |i| format!("gradients.{i}"))).unwrap();
    for (p, g) in run.adapter.params().iter().zip(&got) {
        let reference = want.f32(&format!("step0/base_model.model.{}", p.name));
        close(&p.name, g, &reference, GRADIENT * largest(&reference));
    }
}

#[test]
fn the_untrained_model_says_what_the_reference_says() {
    let (run, init) = Run::new();
    let reference = refs::json("tiny_shakespeare_lora/reference.json");
    let mut session = run.session(&init, Budget::Percent(25.0));
    run.samples(&mut session, &reference["samples_before"]);
}

#[test]
#[ignore = "takes minutes; the long suite runs it"]
fn sixty_steps_give_the_losses_adapters_validation_and_samples_of_the_reference() {
    let (run, init) = Run::new();
    let reference = refs::json("tiny_shakespeare_lora/reference.json");
    let valid = |which: &str| reference["valid"][which].as_f64().unwrap();
    let mut session = run.session(&init, Budget::Percent(25.0));
    assert!((run.validation(&mut session) - valid("loss_before")).abs() < f64::from(LOSS));
    let losses = run.train(&mut session, 60);
    close("losses", &losses, &run.batches.f32("losses"), LOSS);
    let values = wait(run.adapter.values(&mut session)).unwrap().concat();
    let last = open(&run.model, "final").1.concat();
    assert!(worst(&values, &last) < ADAPTER, "the adapters are off by {}", worst(&values, &last));
    assert!((run.validation(&mut session) - valid("loss_after")).abs() < f64::from(LOSS));
    run.samples(&mut session, &reference["samples_after"]);
}
