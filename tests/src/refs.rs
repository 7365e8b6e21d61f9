//! Models and values of the reference library (`tests/fixtures/refs`), as the tests of language models use them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ebbtide::compile::{Budget, Options, compile_with};
use ebbtide::event::NoEvents;
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, Inputs};
use ebbtide::weights::DType;
use ebbtide::{Cancel, Catalog, Device, Outputs, Program, Session, Source};

use crate::engine::{Data, f32s, file, fixture, wait};

/// Tensors of a file by name.
pub struct Tensors(BTreeMap<String, (Vec<u64>, DType, Vec<u8>)>);

impl Tensors {
    /// Reads a whole file.
    pub fn read(path: PathBuf) -> Tensors {
        let catalog = wait(Catalog::open(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tensors = catalog.names().map(|name| {
            let id = catalog.find(name).unwrap();
            let weight = catalog.weight(id);
            (name.to_string(), (weight.shape.clone(), weight.dtype, wait(catalog.read(id)).unwrap()))
        });
        Tensors(tensors.collect())
    }

    /// Names of all.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The values of an f32 tensor.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        let (_, dtype, bytes) = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        assert_eq!(*dtype, DType::F32, "{name}");
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// The values of an integer tensor.
    pub fn ints(&self, name: &str) -> Vec<i32> {
        let (_, dtype, bytes) = self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        match dtype {
            DType::I64 => bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32).collect(),
            DType::I32 => bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect(),
            other => panic!("{name} is {other}"),
        }
    }
}

/// A path among the references.
pub fn path(path: &str) -> PathBuf {
    fixture("refs").join(path)
}

/// A text among the references, as JSON.
pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path(name)).unwrap()).unwrap()
}

/// A model of the references. `variant` is its folder: `f32`, `bf16`, `f16`, `f32_sharded`, `f32_hub_style`; what is not
/// stored is made from `f32`, with the same values as the reference's own files (checked when those were left out).
pub fn model(name: &str, variant: &str) -> Model {
    let folder = path(name).join(variant);
    let stored = folder.is_dir();
    let config = config(&if stored { folder.clone() } else { path(name).join("f32") }.join("config.json"));
    let made = |bytes| wait(Catalog::from_sources(vec![Source::memory("model.safetensors", bytes)])).unwrap();
    let catalog = match (stored, variant) {
        (true, _) => wait(Catalog::open(&folder)).unwrap(),
        (false, "f32_hub_style") => made(hub_style(name)),
        (false, _) => made(rounded(name, variant)),
    };
    Model::new(config, catalog).unwrap_or_else(|e| panic!("{name}/{variant}: {e}"))
}

/// The configuration in a file.
pub fn config(path: &std::path::Path) -> ModelConfig {
    let text = std::fs::read_to_string(path).unwrap();
    ModelConfig::parse(&path.display().to_string(), text.as_bytes())
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A file of GPT-2 as the hub has it: keys without `transformer.`, and a mask of ones below the diagonal in every block.
pub fn hub_style(name: &str) -> Vec<u8> {
    let (source, config) =
        (Tensors::read(path(name).join("f32/model.safetensors")), json(&format!("{name}/f32/config.json")));
    let number = |key: &str| config[key].as_u64().unwrap();
    let (n, layers) = (number("n_positions"), number("n_layer"));
    let mask: Vec<f32> = (0..n * n).map(|i| f32::from(u8::from(i % n <= i / n))).collect();
    let mut tensors: Vec<Data> = source
        .0
        .iter()
        .map(|(key, (shape, dtype, bytes))| Data {
            name: key.trim_start_matches("transformer.").into(),
            dtype: *dtype,
            shape: shape.clone(),
            bytes: bytes.clone(),
        })
        .collect();
    tensors.extend((0..layers).map(|i| f32s(&format!("h.{i}.attn.bias"), &[1, 1, n, n], &mask)));
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    file(&tensors)
}

fn rounded(name: &str, variant: &str) -> Vec<u8> {
    let source = Tensors::read(path(name).join("f32/model.safetensors"));
    let dtype = if variant == "bf16" { DType::BF16 } else { DType::F16 };
    let tensors: Vec<Data> = source
        .names()
        .map(|n| {
            let halves = source.f32(n).into_iter().flat_map(|x| match dtype {
                DType::BF16 => half::bf16::from_f32(x).to_le_bytes(),
                _ => half::f16::from_f32(x).to_le_bytes(),
            });
            Data { name: n.into(), dtype, shape: source.0[n].0.clone(), bytes: halves.collect() }
        })
        .collect();
    file(&tensors)
}

/// Each token's successor in its row as its label; the last has none. What is masked has a negative label.
pub fn shifted(labels: &[i32], tokens: usize) -> Vec<i32> {
    let row = |r: &[i32]| r[1..].iter().copied().chain([-100]).collect::<Vec<_>>();
    labels.chunks(tokens).flat_map(row).collect()
}

/// A batch whose loss is the mean over its unmasked tokens.
pub fn mean_batch(model: &Model, bucket: Bucket, ids: &[i32], labels: &[i32]) -> Inputs {
    let count = labels.iter().filter(|l| **l >= 0).count();
    let weights: Vec<f32> = labels.iter().map(|l| if *l < 0 { 0.0 } else { 1.0 / count as f32 }).collect();
    Inputs::batch(model, bucket, ids, labels, &weights).unwrap()
}

/// A session of programs.
pub fn session(device: &Device, model: &Model, programs: &[Program], budget: Budget) -> Session {
    let set = compile_with(programs, model.catalog(), device.caps(), budget, Options::default()).unwrap();
    wait(Session::new(device, model.catalog(), set)).unwrap()
}

/// Runs a plan.
pub fn run(session: &mut Session, plan: usize, inputs: &Inputs) -> Outputs {
    let plans = session.set().plans.clone();
    wait(session.run(plan, &inputs.of_plan(&plans[plan]), &Cancel::new(), &mut NoEvents)).unwrap()
}

/// Fails with the first five mismatches unless every value is within the tolerance. With `EBBTIDE_FIGURES` set it says how
/// near they are.
#[allow(clippy::print_stderr, reason = "figures on request")]
pub fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let bad: Vec<_> = got
        .iter()
        .zip(want)
        .enumerate()
        .filter(|(_, (g, w))| (*g - *w).abs() > tolerance || (*g - *w).is_nan())
        .collect();
    let worst = worst(got, want);
    if std::env::var_os("EBBTIDE_FIGURES").is_some() {
        eprintln!("{what}: {worst:.2e} of {tolerance:.2e}");
    }
    assert!(
        bad.is_empty(),
        "{what}: {} of {} off by up to {worst}; (index, (got, want)): {:?}",
        bad.len(),
        got.len(),
        &bad[..bad.len().min(5)]
    );
}

/// The largest difference.
pub fn worst(got: &[f32], want: &[f32]) -> f32 {
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max)
}

/// The largest entry.
pub fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}
