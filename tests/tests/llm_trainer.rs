//! A training run: checkpoints that leave no trace, accumulation that loads no more, text from the same session.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use ebbtide::compile::{Budget, Category, Options, Recompute};
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, StepReport, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::{Cancel, Device, Event, Source};
use ebbtide_tests::engine::{device, mix, wait};
use ebbtide_tests::models;

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

/// Two optimizer steps over the same eight rows, in so many micro-batches: the second's report, the adapter, the group.
fn accumulated(
    device: &Device,
    model: &Model,
    adapter: &Adapter,
    parts: u64,
    budget: Budget,
) -> (StepReport, Vec<Vec<f32>>, u64) {
    let rows: Vec<Micro> = (0..4).map(micro).collect();
    let bucket = Bucket { rows: 8 / parts, ..BUCKET };
    let all: (Vec<i32>, Vec<i32>, Vec<i32>) = (
        rows.iter().flat_map(|m| m.ids.clone()).collect(),
        rows.iter().flat_map(|m| m.labels.clone()).collect(),
        rows.iter().flat_map(|m| m.rows.clone()).collect(),
    );
    let n = (bucket.rows * bucket.tokens) as usize;
    let part = |i: usize| Micro {
        bucket,
        ids: all.0[i * n..][..n].to_vec(),
        labels: all.1[i * n..][..n].to_vec(),
        rows: all.2[i * bucket.rows as usize..][..bucket.rows as usize].to_vec(),
    };
    let window: Vec<Micro> = (0..parts as usize).map(part).collect();
    let spec = RunSpec { buckets: vec![bucket], evaluations: vec![], writer: None, ..spec(parts) };
    let plan = RunPlan::new(model, Some(adapter), &spec, device.caps(), budget, Options::default()).unwrap();
    let group = plan.group;
    let mut run = wait(Trainer::new(device, model, adapter, &spec, plan, &adapter.initial(7))).unwrap();
    step(&mut run, &window);
    let report = step(&mut run, &window);
    (report, wait(run.values()).unwrap(), group)
}

/// The floor of a training with batches of so many rows, and its loads in a step there.
fn floor_of(device: &Device, model: &Model, adapter: &Adapter, rows: u64) -> (u64, u64) {
    let bucket = Bucket { rows, ..BUCKET };
    let spec = RunSpec { buckets: vec![bucket], evaluations: vec![], writer: None, ..spec(1) };
    let plan = RunPlan::new(model, Some(adapter), &spec, device.caps(), Budget::Floor, Options::default()).unwrap();
    (plan.set.floor, plan.forecast(1).loads_per_step)
}

#[test]
fn accumulation_is_one_batch_of_its_rows_to_the_bit_and_loads_once_a_group() {
    let device = device();
    let model = model("llama_untied", "f32");
    let adapter = Adapter::new(&model, lora(0.1)).unwrap();
    let (one, want, _) = accumulated(&device, &model, &adapter, 1, Budget::Floor);
    let first = adapter.initial(7);
    assert!(want.iter().zip(&first).all(|(w, f)| w != f), "every A and B has moved");
    let (whole, _) = floor_of(&device, &model, &adapter, 8);
    for parts in [2, 4, 8] {
        // What one batch of all rows needs at its floor holds all boundary activations, and not one weight more.
        let (fits, values, group) = accumulated(&device, &model, &adapter, parts, Budget::Bytes(whole));
        assert_eq!((group, fits.loads), (parts, one.loads), "{parts} parts that fit");
        assert!(values == want, "{parts} parts that fit end with another adapter");
        assert_eq!(fits.loss.to_bits(), one.loss.to_bits());
        let (least, loads) = floor_of(&device, &model, &adapter, 8 / parts);
        let (floor, values, group) = accumulated(&device, &model, &adapter, parts, Budget::Floor);
        assert_eq!((group, floor.loads), (1, parts * loads), "{parts} parts at the floor of {least}");
        assert!(values == want, "{parts} parts at the floor end with another adapter");
        assert_eq!(floor.loss.to_bits(), one.loss.to_bits());
    }
    // Between the two: groups of two. Their three programs have some parameters more; no weight fits into that.
    let (pairs, loads) = floor_of(&device, &model, &adapter, 2);
    let (middle, values, group) = accumulated(&device, &model, &adapter, 8, Budget::Bytes(pairs + (64 << 10)));
    assert_eq!((group, middle.loads), (2, 4 * loads));
    assert!(values == want);
}

#[test]
fn one_load_serves_recompute_and_backward_where_only_q_is_trained() {
    let device = device();
    let model = model("llama_tied", "f32");
    let targets = ebbtide::llm::adapters::Targets::Named(vec!["q_proj".into()]);
    let adapter = Adapter::new(&model, LoraSpec { targets, ..lora(0.0) }).unwrap();
    let run = |recompute, budget| {
        let spec = RunSpec { writer: None, evaluations: vec![], ..spec(3) };
        let options = Options { recompute, ..Options::default() };
        let plan = RunPlan::new(&model, Some(&adapter), &spec, device.caps(), budget, options).unwrap();
        let (group, floor) = (plan.group, plan.set.floor);
        let mut run = wait(Trainer::new(&device, &model, &adapter, &spec, plan, &adapter.initial(7))).unwrap();
        let window = [micro(0), micro(1), micro(2)];
        step(&mut run, &window);
        let mut events: Vec<Event> = Vec::new();
        wait(run.step(&window, 1e-3, &Cancel::new(), &mut events)).unwrap();
        (events, wait(run.values()).unwrap(), group, floor)
    };
    let (_, resident, _, _) = run(Recompute::Off, Budget::All);
    for recompute in [Recompute::On, Recompute::Off] {
        let (events, values, group, _) = run(recompute, Budget::Floor);
        assert!(values == resident, "{recompute:?}: eviction after every micro-batch changes the adapter");
        assert_eq!(group, 1);
        for block in 0..4 {
            let name = ebbtide::llm::models::block_name(block);
            let of = |e: &&Event| matches!(e, Event::Load { segment, .. } if **segment == *name);
            let loads = events.iter().filter(of).count();
            // Forward and backward of each of three micro-batches; never a third for the recomputation.
            assert!((3..=6).contains(&loads), "{recompute:?}: {name} was loaded {loads} times in three micro-batches");
        }
        // Five segments, one slot: the turn and home save two of ten.
        assert_eq!(events.iter().filter(|e| matches!(e, Event::Load { .. })).count(), 3 * 8, "{recompute:?}");
    }
}

#[test]
fn sixteen_times_the_layers_have_the_same_floor_but_for_adapters_and_boundaries() {
    let planned = |layers| {
        let model = models::llama(layers, 64, 128);
        let adapter = Adapter::new(&model, lora(0.0)).unwrap();
        let spec = RunSpec {
            buckets: vec![BUCKET],
            evaluations: vec![],
            accumulation: 1,
            writer: None,
            adamw: AdamW::default(),
        };
        let caps = ebbtide::Caps::webgpu_defaults();
        RunPlan::new(&model, Some(&adapter), &spec, &caps, Budget::Floor, Options::default()).unwrap().set.planned
    };
    let (few, many) = (planned(2), planned(32));
    let grown = |category| many.get(category) - few.get(category);
    for category in [Category::Adapters, Category::Gradients] {
        assert_eq!(many.get(category), 16 * few.get(category), "{category:?}");
    }
    assert_eq!(many.get(Category::Optimizer), 16 * few.get(Category::Optimizer));
    assert_eq!(grown(Category::Activations), 30 * BUCKET.rows * BUCKET.tokens * 64 * 4, "one boundary a layer");
    for category in [Category::Weights, Category::Upload, Category::Readback, Category::Workspace, Category::Kv] {
        assert_eq!(grown(category), 0, "{category:?}");
    }
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
