//! A training run: checkpoints that leave no trace, accumulation that loads no more, text from the same session.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use ebbtide::compile::{Budget, Options};
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, StepReport, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::{Cancel, Device, Source};
use ebbtide_tests::engine::{device, mix, wait};

const BUCKET: Bucket = Bucket { rows: 2, tokens: 16 };

fn model(name: &str, dtype: &str) -> Model {
    ebbtide_tests::refs::model(name, dtype)
}

fn micro(seed: u64) -> Micro {
    let n = BUCKET.rows * BUCKET.tokens;
    let token = |i: u64| (mix(seed << 20 | i) % 512) as i32;
    // Some tokens are not trained, so that weights matter.
    let label = |i: u64| if mix(seed ^ i).is_multiple_of(3) { -100 } else { token(i + 1) };
    Micro {
        bucket: BUCKET,
        ids: (0..n).map(token).collect(),
        labels: (0..n).map(label).collect(),
        rows: (0..BUCKET.rows).map(|r| (seed * BUCKET.rows + r) as i32).collect(),
    }
}

fn spec(accumulation: u64) -> RunSpec {
    RunSpec {
        buckets: vec![BUCKET],
        evaluations: vec![BUCKET],
        accumulation,
        writer: Some((8, 32)),
        adamw: AdamW { max_norm: 1.0, ..AdamW::default() },
    }
}

fn lora(dropout: f32) -> LoraSpec {
    LoraSpec { dropout, seed: 3, ..LoraSpec::default() }
}

fn trainer<'a>(device: &Device, model: &'a Model, adapter: &'a Adapter, spec: &RunSpec, budget: Budget) -> Trainer<'a> {
    let plan = RunPlan::new(model, Some(adapter), spec, device.caps(), budget, Options::default()).unwrap();
    wait(Trainer::new(device, model, adapter, spec, plan, &adapter.initial(7))).unwrap()
}

fn step(trainer: &mut Trainer<'_>, window: &[Micro]) -> StepReport {
    wait(trainer.step(window, 1e-3, &Cancel::new(), &mut NoEvents)).unwrap()
}

#[test]
fn a_resumed_run_has_the_bits_of_the_uninterrupted_one() {
    let device = device();
    let model = model("llama_tied", "f32");
    // With dropout, whose masks depend on the step.
    let adapter = Adapter::new(&model, lora(0.1)).unwrap();
    let spec = spec(2);
    let windows: Vec<[Micro; 2]> = (0..6).map(|i| [micro(2 * i), micro(2 * i + 1)]).collect();
    let mut whole = trainer(&device, &model, &adapter, &spec, Budget::Percent(50.0));
    let mut saved = Vec::new();
    for (i, window) in windows.iter().enumerate() {
        if i == 3 {
            saved = wait(whole.checkpoint(&BTreeMap::from([("position".into(), "6".into())]))).unwrap();
        }
        step(&mut whole, window);
    }
    let want = wait(whole.values()).unwrap();
    drop(whole);
    let source = || Source::memory("checkpoint", saved.clone());
    let mut warm = trainer(&device, &model, &adapter, &spec, Budget::Floor);
    let notes = wait(warm.resume(source())).unwrap();
    assert_eq!((notes["position"].as_str(), warm.step_count()), ("6", 3));
    windows[3..].iter().for_each(|w| _ = step(&mut warm, w));
    assert!(wait(warm.values()).unwrap() == want, "a resumed run differs");
    drop(warm);
    // Without the moments it would: the test can fail.
    let mut cold = trainer(&device, &model, &adapter, &spec, Budget::Floor);
    wait(cold.resume(source())).unwrap();
    wait(adapter.forget_moments(&mut cold.session)).unwrap();
    windows[3..].iter().for_each(|w| _ = step(&mut cold, w));
    assert!(wait(cold.values()).unwrap() != want);
}

#[test]
fn a_checkpoint_of_another_base_or_adapter_is_refused_by_name() {
    let device = device();
    let (tied, untied) = (model("llama_tied", "f32"), model("llama_untied", "f32"));
    let adapter = Adapter::new(&tied, lora(0.0)).unwrap();
    let mut run = trainer(&device, &tied, &adapter, &spec(1), Budget::All);
    let saved = wait(run.checkpoint(&BTreeMap::new())).unwrap();
    drop(run);
    let other = Adapter::new(&untied, lora(0.0)).unwrap();
    let mut run = trainer(&device, &untied, &other, &spec(1), Budget::All);
    let error = wait(run.resume(Source::memory("checkpoint", saved.clone()))).unwrap_err();
    assert!(error.to_string().contains("another base"), "{error}");
    drop(run);
    let other = Adapter::new(&tied, LoraSpec { rank: 4, ..lora(0.0) }).unwrap();
    let mut run = trainer(&device, &tied, &other, &spec(1), Budget::All);
    let error = wait(run.resume(Source::memory("checkpoint", saved))).unwrap_err();
    assert!(error.to_string().contains("another adapter"), "{error}");
}

#[test]
fn accumulation_that_fits_loads_no_more_and_at_the_floor_once_a_group() {
    let device = device();
    let model = model("llama_untied", "f32");
    let adapter = Adapter::new(&model, lora(0.0)).unwrap();
    let run = |accumulation: u64, budget| {
        let spec = RunSpec { writer: None, evaluations: vec![], ..spec(accumulation) };
        let mut run = trainer(&device, &model, &adapter, &spec, budget);
        let window: Vec<Micro> = (0..accumulation).map(micro).collect();
        step(&mut run, &window);
        let report = step(&mut run, &window);
        (report, wait(run.values()).unwrap())
    };
    // One batch of eight rows is what four micro-batches of two must equal, and what any grouping must equal.
    let (one, _) = run(1, Budget::Floor);
    let generous = Budget::Bytes(3 << 20);
    let (four, values) = run(4, generous);
    let (floor, at_floor) = run(4, Budget::Floor);
    assert!(values == at_floor, "groups change the bits");
    assert_eq!(floor.loss.to_bits() as u32 >> 16, four.loss.to_bits() as u32 >> 16);
    assert!(four.loads <= one.loads, "{} loads with accumulation, {} without", four.loads, one.loads);
    assert_eq!(floor.loads % one.loads, 0);
}

#[test]
fn the_same_session_trains_evaluates_and_writes() {
    let device = device();
    let model = model("llama_tied", "bf16");
    let adapter = Adapter::new(&model, lora(0.0)).unwrap();
    let spec = spec(1);
    let mut run = trainer(&device, &model, &adapter, &spec, Budget::Percent(40.0));
    let planned = run.session.set().planned_peak();
    device.reset_peak_memory();
    let data = [micro(1), micro(2)];
    let before = wait(run.evaluate(&data, &Cancel::new(), &mut NoEvents)).unwrap();
    let text = |run: &mut Trainer<'_>| {
        let writer = run.writer().unwrap();
        let prompt = [5, 9, 200, 31, 7, 11, 13, 17, 19, 23];
        let (greedy, cancel) = (Sampling::default(), Cancel::new());
        wait(writer.write(&mut run.session, &model, &prompt, 8, &[], &greedy, &cancel, &mut NoEvents, &mut |_| true))
            .unwrap()
    };
    let first = text(&mut run);
    assert_eq!(first.len(), 8);
    for i in 0..12 {
        let report = step(&mut run, &data[i % 2..=i % 2]);
        assert!(report.finite && report.norm > 0.0);
    }
    let after = wait(run.evaluate(&data, &Cancel::new(), &mut NoEvents)).unwrap();
    assert!(after < before, "{before} → {after}");
    text(&mut run);
    assert_eq!(device.peak_memory(), planned);
}
