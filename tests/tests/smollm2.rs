//! A real model, SmolLM2-135M in f16, at a third of its weights: losses and answers of PyTorch, in the memory that was
//! planned, in a process that stays small.
//!
//! The model is no part of the repository: `cargo xtask test --long` fetches it, or `EBBTIDE_SMOLLM2` names its folder.
//! The process's own memory is looked at, so this file holds one test.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

use std::path::PathBuf;

use ebbtide::compile::{Budget, Options};
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec};
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::Bucket;
use ebbtide::llm::template::{ChatTemplate, Message};
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::{Cancel, Catalog, Source};
use ebbtide_tests::engine::{device, highest_rss, wait};
use ebbtide_tests::refs::{self, shifted};
use serde_json::Value;

const BUDGET: u64 = 96 << 20;
/// What the process may take in all.
const PROCESS: u64 = 300 << 20;
const ROW: Bucket = Bucket { rows: 1, tokens: 64 };
const LOSS: f64 = 1e-3;
const STEP_LOSS: f64 = 2e-3;

fn folder() -> PathBuf {
    let named = std::env::var_os("EBBTIDE_SMOLLM2");
    named.map(PathBuf::from).expect("EBBTIDE_SMOLLM2 must name the folder; `cargo xtask test --long` fetches it")
}

fn ids(v: &Value) -> Vec<i32> {
    v.as_array().unwrap().iter().map(|x| x.as_i64().unwrap() as i32).collect()
}

fn row(ids: Vec<i32>) -> Micro {
    Micro { bucket: ROW, labels: shifted(&ids, 64), ids, rows: vec![0] }
}

#[test]
#[ignore = "needs the real model and minutes; the long suite runs it"]
fn a_real_model_trains_and_answers_as_in_pytorch_in_a_third_of_its_weights_and_a_small_process() {
    let (folder, reference) = (folder(), refs::json("smollm2_135m.json"));
    let tokenizer = wait(Tokenizer::open(&folder)).unwrap();
    let config = wait(async { ModelConfig::read(&Source::open(folder.join("config.json")).unwrap()).await }).unwrap();
    let model = Model::new(config, wait(Catalog::open(&folder)).unwrap()).unwrap();

    // Values of our own, or those of a folder in PEFT's format; the reference has losses for either.
    let (adapter, first, want) = match std::env::var_os("EBBTIDE_SMOLLM2_INIT") {
        Some(init) => {
            let (adapter, values) = wait(Adapter::open(&PathBuf::from(init), &model)).unwrap();
            (adapter, values, &reference["peft_init"])
        }
        None => {
            let adapter = Adapter::new(&model, LoraSpec::default()).unwrap();
            let values = adapter.initial(0);
            (adapter, values, &reference["own_init"])
        }
    };
    let spec = RunSpec {
        buckets: vec![ROW],
        evaluations: vec![ROW],
        accumulation: 1,
        writer: Some((16, 64)),
        adamw: AdamW { weight_decay: 0.01, ..AdamW::default() },
    };
    let device = device();
    let budget = Budget::Bytes(BUDGET);
    let plan = RunPlan::new(&model, Some(&adapter), &spec, device.caps(), budget, Options::default()).unwrap();
    let (planned, weights) = (plan.set.planned_peak(), plan.set.weight_bytes);
    assert!(planned <= BUDGET && BUDGET * 2 < weights * 10 / 13, "{planned} of {weights}");
    device.reset_peak_memory();
    let mut run = wait(Trainer::new(&device, &model, &adapter, &spec, plan, &first)).unwrap();
    let (cancel, evaluation) = (Cancel::new(), [row(ids(&reference["eval_ids"]))]);
    let near = |what: &str, got: f64, want: &Value, tolerance: f64| {
        let want = want.as_f64().unwrap();
        eprintln!("{what}: {got:.6}, {:+.1e}", got - want);
        assert!((got - want).abs() < tolerance, "{what}: {got}, in PyTorch {want}");
    };
    let before = wait(run.evaluate(&evaluation, &cancel, &mut NoEvents)).unwrap();
    near("loss before", before, &reference["eval_loss"], LOSS);
    for step in 0..10 {
        let batch = row(ids(&reference["batches"][step % 4]));
        let report = wait(run.step(&[batch], 1e-3, &cancel, &mut NoEvents)).unwrap();
        near(&format!("step {step}"), report.loss, &want["losses"][step], STEP_LOSS);
    }
    let after = wait(run.evaluate(&evaluation, &cancel, &mut NoEvents)).unwrap();
    near("loss after", after, &want["eval_loss"], STEP_LOSS);

    // The bare model answers: the same session, the adapter taken out.
    wait(adapter.remove(&mut run.session)).unwrap();
    let template = ChatTemplate::of_tokenizer(&tokenizer).unwrap().unwrap();
    let text = template.render(&[Message::new("user", reference["prompt"].as_str().unwrap())], true).unwrap();
    let prompt: Vec<i32> = tokenizer.encode(&text, false).unwrap().into_iter().map(|id| id as i32).collect();
    assert_eq!(prompt, ids(&reference["prompt_ids"]));
    let (writer, greedy, end) = (run.writer().unwrap(), Sampling::default(), model.config().eos[0] as i32);
    let mut answer =
        wait(
            writer.write(&mut run.session, &model, &prompt, 16, &[end], &greedy, &cancel, &mut NoEvents, &mut |_| true),
        )
        .unwrap();
    answer.push(end);
    assert_eq!(answer, ids(&reference["answer_ids"]));
    assert_eq!(device.peak_memory(), planned);
    let process = highest_rss();
    eprintln!("device {planned} bytes, process {process}");
    if cfg!(target_os = "linux") && device.caps().class == ebbtide::caps::AdapterClass::Software {
        assert!(process <= PROCESS, "the process took {process} bytes, of which the device {planned}");
    }
}
