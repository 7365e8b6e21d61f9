//! How long planning takes: a Llama of 1000 layers with an adapter on every linear layer, planned for a training step.
//!
//! `cargo run --release -p ebbtide-tests --example planning [LAYERS]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that measures")]

use std::time::Instant;

use ebbtide::compile::{Options, compile_with};
use ebbtide::llm::adapters::{Adapter, LoraSpec};
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, train};
use ebbtide::nn::{AdamW, Part};
use ebbtide::{Budget, Caps, Catalog, Source};
use ebbtide_tests::models::{llama_config, llama_file};

fn main() {
    let layers: u64 = std::env::args().nth(1).map_or(1000, |n| n.parse().unwrap());
    let config = llama_config(layers, 8, 32);
    let source = Source::memory("model.safetensors", llama_file(&config));
    let (mut last, mut total) = (Instant::now(), 0.0);
    let mut lap = |what: &str| {
        let ms = last.elapsed().as_secs_f64() * 1e3;
        total += ms;
        println!("{what:28} {ms:8.1} ms, {total:8.1} in all");
        last = Instant::now();
    };
    let catalog = pollster::block_on(Catalog::from_sources(vec![source])).unwrap();
    lap("catalog (headers read)");
    let model = Model::new(config, catalog).unwrap();
    lap("segments");
    let adapter = Adapter::new(&model, LoraSpec::default()).unwrap();
    lap("adapter");
    let bucket = Bucket { rows: 1, tokens: 8 };
    let program = train(&model, &adapter, bucket, &AdamW::default(), Part::Whole).unwrap();
    lap("graph, both ways");
    let programs = [program];
    for budget in [Budget::All, Budget::Floor] {
        let caps = Caps::webgpu_defaults();
        let set = compile_with(&programs, model.catalog(), &caps, budget, Options::default()).unwrap();
        let actions = set.plans[0].actions.len();
        lap(&format!("{budget:?}: {actions} actions"));
    }
}
