//! Our folders in other hands: adapters that stock PEFT opens, merged models that transformers opens, adapters of PEFT's
//! own making. All compute the same logits.
//!
//! This needs PyTorch, so it runs only under `cargo xtask test --peft`, which sets up an environment and names its Python
//! in `EBBTIDE_PEFT_PYTHON`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebbtide::compile::{Budget, Options};
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec, Targets, Values};
use ebbtide::llm::fuse::{Fusion, fuse};
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, inspect};
use ebbtide::llm::trainer::{Micro, RunPlan, RunSpec, Trainer};
use ebbtide::nn::AdamW;
use ebbtide::weights::DType;
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::{Cancel, Catalog, Device};
use ebbtide_tests::engine::{device, wait};
use ebbtide_tests::refs::{self, Tensors, close, shifted, worst};

const BATCH: Bucket = Bucket { rows: 2, tokens: 32 };
const LOGITS: f32 = 2e-4;

fn open(folder: &Path) -> Model {
    Model::new(refs::config(&folder.join("config.json")), wait(Catalog::open(folder)).unwrap()).unwrap()
}

/// Whether this was asked for: the long suite runs ignored tests too.
fn asked() -> bool {
    let asked = std::env::var_os("EBBTIDE_PEFT_PYTHON").is_some();
    if !asked {
        eprintln!("not compared with PyTorch: EBBTIDE_PEFT_PYTHON is not set (`cargo xtask test --peft` sets it)");
    }
    asked
}

/// Runs the script beside the tests; its tensors.
fn python(place: &Path, args: &[&str]) -> Tensors {
    let python = std::env::var_os("EBBTIDE_PEFT_PYTHON").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/peft_reference.py");
    let out = place.join("out.safetensors");
    let status = Command::new(python).arg(script).args(args).arg(&out).status().unwrap();
    assert!(status.success(), "{args:?}");
    Tensors::read(out)
}

fn put(place: &Path, tensors: &[(&str, &[u64], &[i32])]) -> PathBuf {
    let data: Vec<(TensorSpec, &[u8])> = tensors
        .iter()
        .map(|(n, shape, ids)| (TensorSpec::new(*n, DType::I32, shape.to_vec()), bytemuck::cast_slice(ids)))
        .collect();
    let path = place.join("ids.safetensors");
    std::fs::write(&path, write(Vec::new(), "ids", &data, &BTreeMap::new()).unwrap()).unwrap();
    path
}

fn logits(device: &Device, model: &Model, adapter: Option<&(Adapter, Values)>, ids: &[i32]) -> Vec<f32> {
    let program = [inspect(model, adapter.map(|a| &a.0), BATCH).unwrap()];
    let mut session = refs::session(device, model, &program, Budget::Floor);
    if let Some((adapter, values)) = adapter {
        wait(adapter.install(&mut session, values)).unwrap();
    }
    let batch = refs::mean_batch(model, BATCH, ids, &shifted(ids, 32));
    refs::run(&mut session, 0, &batch).f32("logits").unwrap()
}

fn ids() -> Vec<i32> {
    Tensors::read(refs::path("llama_tied").join("ref_f32.safetensors")).ints("input_ids")
}

/// An adapter after some steps at the floor.
fn trained(device: &Device, model: &Model, spec: LoraSpec) -> (Adapter, Values) {
    let adapter = Adapter::new(model, spec).unwrap();
    let run =
        RunSpec { buckets: vec![BATCH], evaluations: vec![], accumulation: 1, writer: None, adamw: AdamW::default() };
    let plan = RunPlan::new(model, Some(&adapter), &run, device.caps(), Budget::Floor, Options::default()).unwrap();
    let mut trainer = wait(Trainer::new(device, model, &adapter, &run, plan, &adapter.initial(5))).unwrap();
    for _ in 0..5 {
        let ids = ids();
        let micro = Micro { bucket: BATCH, labels: shifted(&ids, 32), ids, rows: vec![0, 1] };
        wait(trainer.step(&[micro], 2e-2, &Cancel::new(), &mut NoEvents)).unwrap();
    }
    let values = wait(trainer.values()).unwrap();
    drop(trainer);
    (adapter, values)
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --peft"]
fn stock_peft_opens_our_adapters_and_transformers_our_merged_models_with_the_same_logits() {
    if !asked() {
        return;
    }
    let (device, place) = (device(), tempfile::tempdir().unwrap());
    let file = put(place.path(), &[("ids", &[2, 32], &ids())]);
    for name in ["llama_untied", "llama_tied", "qwen2", "gpt2"] {
        let folder = refs::path(name).join("f32");
        let model = open(&folder);
        let first = if name == "gpt2" { "c_attn" } else { "q_proj,v_proj" };
        for (targets, rslora, blocks) in [(first, false, None), ("all-linear", true, None), (first, false, Some(1..3))]
        {
            let what = format!("{name} {targets} {blocks:?}");
            let spec = LoraSpec { targets: Targets::parse(targets).unwrap(), rslora, blocks, ..LoraSpec::default() };
            let known = trained(&device, &model, spec);
            let ours = logits(&device, &model, Some(&known), &ids());
            let moved = worst(&ours, &logits(&device, &model, None, &ids()));
            assert!(moved > 0.1, "{what}: the adapter does next to nothing: {moved}");
            let (adapter, merged) = (place.path().join(format!("{what} a")), place.path().join(format!("{what} m")));
            known.0.save(&adapter, &known.1, "base").unwrap();
            let args = |model: &Path, adapter: &str| {
                let theirs =
                    python(place.path(), &["logits", model.to_str().unwrap(), adapter, file.to_str().unwrap()]);
                theirs.f32("logits")
            };
            let theirs = args(&folder, adapter.to_str().unwrap());
            eprintln!("{what}: PEFT differs by {:.1e}, base by {moved:.1e}", worst(&ours, &theirs));
            close(&what, &ours, &theirs, LOGITS);
            if targets == first && name != "qwen2" {
                let fusion = wait(Fusion::open(&adapter, &model)).unwrap();
                wait(fuse(&model, &folder, &fusion, &merged, None, &Cancel::new(), &mut |_, _| ())).unwrap();
                close(&format!("{what} merged"), &ours, &args(&merged, "-"), LOGITS);
            }
        }
    }
}

#[test]
#[ignore = "needs PyTorch: cargo xtask test --peft"]
fn adapters_that_peft_made_of_head_and_embedding_of_a_tied_model_are_merged_to_the_same_logits() {
    if !asked() {
        return;
    }
    let (device, place) = (device(), tempfile::tempdir().unwrap());
    let file = put(place.path(), &[("ids", &[2, 32], &ids())]);
    let folder = refs::path("llama_tied").join("f32");
    let model = open(&folder);
    for targets in ["lm_head", "embed_tokens", "embed_tokens,lm_head,q_proj"] {
        let adapter = place.path().join(format!("{targets} adapter"));
        let args = ["make", folder.to_str().unwrap(), adapter.to_str().unwrap(), targets, file.to_str().unwrap()];
        let theirs = python(place.path(), &args).f32("logits");
        let out = place.path().join(targets);
        let fusion = wait(Fusion::open(&adapter, &model)).unwrap_or_else(|e| panic!("{targets}: {e}"));
        let report = wait(fuse(&model, &folder, &fusion, &out, None, &Cancel::new(), &mut |_, _| ())).unwrap();
        assert!(report.untied);
        let ours = logits(&device, &open(&out), None, &ids());
        eprintln!("{targets}: {:.1e}", worst(&ours, &theirs));
        close(targets, &ours, &theirs, LOGITS);
    }
}

#[test]
#[ignore = "needs PyTorch and the real model: cargo xtask test --peft --long"]
fn the_losses_that_the_real_models_test_expects_are_those_of_pytorch() {
    let Some(folder) = std::env::var_os("EBBTIDE_SMOLLM2").map(PathBuf::from).filter(|_| asked()) else { return };
    let place = tempfile::tempdir().unwrap();
    let reference = refs::json("smollm2_135m.json");
    let row = |v: &serde_json::Value| -> Vec<i32> {
        v.as_array().unwrap().iter().map(|x| x.as_i64().unwrap() as i32).collect()
    };
    let batches: Vec<i32> = reference["batches"].as_array().unwrap().iter().flat_map(row).collect();
    let file = put(place.path(), &[("batches", &[4, 64], &batches), ("eval", &[1, 64], &row(&reference["eval_ids"]))]);
    let model = open(&folder);
    let adapter = Adapter::new(&model, LoraSpec::default()).unwrap();
    let first = place.path().join("first");
    adapter.save(&first, &adapter.initial(0), "base").unwrap();
    let args = ["train", folder.to_str().unwrap(), first.to_str().unwrap(), file.to_str().unwrap()];
    let theirs = python(place.path(), &args);
    let got = [theirs.f32("losses"), theirs.f32("eval_loss")].concat();
    eprintln!("{got:?}");
    let own = &reference["own_init"];
    let want = own["losses"].as_array().unwrap().iter().chain([&own["eval_loss"]]).map(|x| x.as_f64().unwrap() as f32);
    close("losses", &got, &want.collect::<Vec<_>>(), 1e-4);
}
