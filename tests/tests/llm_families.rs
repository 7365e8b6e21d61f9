//! What the references have no model for, against the textbook in f64: norms of q and k, sliding windows, all biases,
//! stretched rotary tables; and a head above the largest piece.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ebbtide::compile::Budget;
use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, evaluate, inspect};
use ebbtide::weights::{PIECE_BYTES, ReadAt};
use ebbtide::{Catalog, Result, Source};
use ebbtide_tests::engine::{Data, device, file, mix, same_bits, wait};
use ebbtide_tests::models::tensors;
use ebbtide_tests::refs::{self, close, shifted};
use serde_json::{Value, json};

const TOKENS: usize = 24;
const VOCABULARY: usize = 96;

fn config(architecture: &str, kind: &str, more: Value) -> ModelConfig {
    let mut all = json!({
        "architectures": [architecture], "model_type": kind, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ModelConfig::parse("config.json", all.to_string().as_bytes()).unwrap()
}

/// Logits of one row, written out.
fn textbook(c: &ModelConfig, tensors: &[Data], ids: &[i32], frequency: impl Fn(usize) -> f64) -> Vec<f32> {
    let all: BTreeMap<&str, Vec<f64>> = tensors
        .iter()
        .map(|t| (t.name.as_str(), bytemuck::cast_slice::<u8, f32>(&t.bytes).iter().map(|x| f64::from(*x)).collect()))
        .collect();
    let (d, hd, heads, kv) = (c.hidden as usize, c.head_dim as usize, c.heads as usize, c.kv_heads as usize);
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let one = |row: &[f64]| {
            let r = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / w.len() as f64 + c.eps).sqrt();
            row.iter().zip(w).map(|(v, w)| v * r * w).collect::<Vec<f64>>()
        };
        x.chunks(w.len()).flat_map(one).collect()
    };
    let product = |x: &[f64], w: &[f64], inner: usize| -> Vec<f64> {
        let dot = |row: &[f64], col: &[f64]| row.iter().zip(col).map(|(a, b)| a * b).sum::<f64>();
        x.chunks(inner).flat_map(|row| w.chunks(inner).map(|col| dot(row, col)).collect::<Vec<f64>>()).collect()
    };
    let embed = &all["model.embed_tokens.weight"];
    let mut h: Vec<f64> = ids.iter().flat_map(|id| embed[*id as usize * d..][..d].to_vec()).collect();
    for l in 0..c.layers {
        let w = |name: &str| all.get(format!("model.layers.{l}.{name}").as_str());
        let linear = |x: &[f64], name: &str, inner: usize| {
            let mut y = product(x, w(&format!("{name}.weight")).unwrap(), inner);
            if let Some(bias) = w(&format!("{name}.bias")) {
                y.chunks_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
            }
            y
        };
        let turned = |x: &[f64], name: &str, n: usize| {
            let mut x = linear(x, &format!("self_attn.{name}_proj"), d);
            if let Some(gain) = w(&format!("self_attn.{name}_norm.weight")) {
                x = norm(&x, gain);
            }
            for (p, row) in x.chunks_mut(n * hd).enumerate() {
                for head in row.chunks_mut(hd) {
                    for i in 0..hd / 2 {
                        let (s, c) = (p as f64 * frequency(i)).sin_cos();
                        let (a, b) = (head[i], head[i + hd / 2]);
                        (head[i], head[i + hd / 2]) = (a * c - b * s, b * c + a * s);
                    }
                }
            }
            x
        };
        let x = norm(&h, w("input_layernorm.weight").unwrap());
        let (q, k, v) = (turned(&x, "q", heads), turned(&x, "k", kv), linear(&x, "self_attn.v_proj", d));
        let mut a = vec![0.0; ids.len() * heads * hd];
        for i in 0..ids.len() {
            let from = c.window(l as usize).map_or(0, |window| (i + 1).saturating_sub(window as usize));
            for head in 0..heads {
                let key = |x: &[f64], j: usize| x[(j * kv + head * kv / heads) * hd..][..hd].to_vec();
                let query = &q[(i * heads + head) * hd..][..hd];
                let score =
                    |j: usize| query.iter().zip(key(&k, j)).map(|(a, b)| a * b).sum::<f64>() / (hd as f64).sqrt();
                let scores: Vec<f64> = (from..=i).map(|j| score(j).exp()).collect();
                let sum: f64 = scores.iter().sum();
                for (j, s) in (from..=i).zip(scores) {
                    let out = &mut a[(i * heads + head) * hd..][..hd];
                    out.iter_mut().zip(key(&v, j)).for_each(|(o, v)| *o += s / sum * v);
                }
            }
        }
        let o = linear(&a, "self_attn.o_proj", heads * hd);
        h.iter_mut().zip(o).for_each(|(h, o)| *h += o);
        let x = norm(&h, w("post_attention_layernorm.weight").unwrap());
        let (gate, up) = (linear(&x, "mlp.gate_proj", d), linear(&x, "mlp.up_proj", d));
        let m: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let down = linear(&m, "mlp.down_proj", c.ffn as usize);
        h.iter_mut().zip(down).for_each(|(h, o)| *h += o);
    }
    product(&norm(&h, &all["model.norm.weight"]), embed, d).into_iter().map(|x| x as f32).collect()
}

fn check(what: &str, c: ModelConfig, frequency: impl Fn(usize) -> f64) {
    let tensors = tensors(&c);
    let catalog = wait(Catalog::from_sources(vec![Source::memory("model.safetensors", file(&tensors))])).unwrap();
    let ids: Vec<i32> = (0..TOKENS as u64).map(|i| (mix(i) % VOCABULARY as u64) as i32).collect();
    let want = textbook(&c, &tensors, &ids, frequency);
    let model = Model::new(c, catalog).unwrap();
    let bucket = Bucket { rows: 1, tokens: TOKENS as u64 };
    let batch = refs::mean_batch(&model, bucket, &ids, &shifted(&ids, TOKENS));
    let mut session = refs::session(&device(), &model, &[inspect(&model, None, bucket).unwrap()], Budget::Floor);
    let got = refs::run(&mut session, 0, &batch).f32("logits").unwrap();
    close(what, &got, &want, 2e-4);
}

fn plain(theta: f64, dim: f64) -> impl Fn(usize) -> f64 {
    move |i| theta.powf(-2.0 * i as f64 / dim)
}

#[test]
fn qwen3_normalizes_queries_and_keys_by_head_before_it_turns_them() {
    let c = config("Qwen3ForCausalLM", "qwen3", json!({ "head_dim": 16, "rope_theta": 1e6 }));
    assert!(c.qk_norm);
    check("qwen3", c, plain(1e6, 16.0));
}

#[test]
fn mistral_looks_back_by_its_window_only() {
    let c = config("MistralForCausalLM", "mistral", json!({ "sliding_window": 7 }));
    assert_eq!(c.window(1), Some(7));
    check("mistral", c, plain(1e4, 8.0));
}

#[test]
fn llama_may_have_biases_everywhere() {
    let c = config("LlamaForCausalLM", "llama", json!({ "attention_bias": true, "mlp_bias": true }));
    assert!(c.biases.qkv && c.biases.o && c.biases.mlp);
    check("biases", c, plain(1e4, 8.0));
}

#[test]
fn llama_3_stretches_long_waves() {
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128 });
    let c = config("LlamaForCausalLM", "llama", json!({ "rope_theta": 500.0, "rope_scaling": scaling }));
    check("llama 3", c, |i| {
        let f = 500f64.powf(-2.0 * i as f64 / 8.0);
        let wave = std::f64::consts::TAU / f;
        let smooth = ((128.0 / wave - 1.0) / 3.0).clamp(0.0, 1.0);
        (1.0 - smooth) * f / 8.0 + smooth * f
    });
}

/// A model with a head just above the largest piece, made as it is read.
struct Large {
    header: Vec<u8>,
    len: u64,
}

impl ReadAt for Large {
    fn name(&self) -> &str {
        "model.safetensors"
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        for (i, byte) in buf.iter_mut().enumerate() {
            let at = offset + i as u64;
            *byte = match self.header.get(at as usize) {
                Some(byte) => *byte,
                // f16 values below 1/64: the upper byte is small, the lower one anything.
                None if (at - self.header.len() as u64) % 2 == 1 => 0x20 | (mix(at) % 4) as u8 | (mix(at) as u8 & 0x80),
                None => (at.wrapping_mul(0x9e37_79b9) >> 13) as u8,
            };
        }
        Ok(buf.len().min(self.len.saturating_sub(offset) as usize))
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_head_above_the_largest_piece_streams_in_pieces_with_the_same_bits() {
    let (v, d) = (66_000u64, 1024u64);
    let c = config(
        "LlamaForCausalLM",
        "llama",
        json!({ "hidden_size": d, "num_hidden_layers": 1, "vocab_size": v, "head_dim": 8 }),
    );
    let mut entries = Vec::new();
    let mut at = 0;
    for t in tensors_shapes(&c) {
        let end = at + 2 * t.1.iter().product::<u64>();
        entries.push(format!(r#""{}":{{"dtype":"F16","shape":{:?},"data_offsets":[{at},{end}]}}"#, t.0, t.1));
        at = end;
    }
    let mut text = format!("{{{}}}", entries.join(","));
    while text.len() % 8 > 0 {
        text.push(' ');
    }
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.bytes());
    let len = header.len() as u64 + at;
    let catalog = wait(Catalog::from_sources(vec![Source::custom(Arc::new(Large { header, len }))])).unwrap();
    let model = Model::new(c, catalog).unwrap();
    let names: Vec<&str> = model.segments().map(|s| &*s.name).collect();
    assert_eq!(names, ["block.00", "head.0", "head.1"]);
    let rows: Vec<u64> = model.segments().skip(1).map(|s| s.entries.last().unwrap().shape[0]).collect();
    assert_eq!(rows, [PIECE_BYTES / (2 * d), v - PIECE_BYTES / (2 * d)]);

    let bucket = Bucket { rows: 1, tokens: 4 };
    let batch = refs::mean_batch(&model, bucket, &[3, 65_999, 40_000, 1], &[65_999, 65_536, 65_535, 0]);
    let program = [evaluate(&model, None, bucket).unwrap()];
    let device = device();
    let run = |budget| refs::run(&mut refs::session(&device, &model, &program, budget), 0, &batch);
    let (all, floor) = (run(Budget::All), run(Budget::Floor));
    same_bits("the loss", floor.bytes("loss").unwrap(), all.bytes("loss").unwrap());
    let loss = all.f32("loss").unwrap()[0];
    assert!((loss - (v as f32).ln()).abs() < 2.0, "{loss}");
}

/// Names and shapes of a model's tensors.
fn tensors_shapes(c: &ModelConfig) -> Vec<(String, Vec<u64>)> {
    let small = ModelConfig { vocabulary: 2, ..c.clone() };
    let mut all: Vec<_> = tensors(&small).into_iter().map(|t| (t.name, t.shape)).collect();
    all[0].1[0] = c.vocabulary;
    all
}
