//! A small transformer with adapters, in the public API: what the tests of training share.

use ebbtide::compile::{Budget, Options, compile_with};
use ebbtide::graph::Shape;
use ebbtide::graph::{Binary, Unary};
use ebbtide::nn::{
    AdamW, Attention, Lora, Params, Part, Rope, RopeScaling, attention, cross_entropy, embedding_rows, linear,
    linear_lora, rms_norm, rope, rope_tables, train_part,
};
use ebbtide::{Catalog, Device, Graph, PlanSet, Program, Result, Session, Tensor};

use crate::engine::{f32s, file, random, wait};

/// Sizes of the stack.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    /// Transformer blocks.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Vocabulary.
    pub vocabulary: u64,
    /// Rank of the adapters on q and v.
    pub rank: u64,
}

/// Query heads.
pub const HEADS: u64 = 4;
/// Key heads.
pub const KEY_HEADS: u64 = 2;
const EPS: f32 = 1e-5;
const SCALE: f32 = 2.0;

/// A batch, with everything that a program of the stack asks for.
pub struct Batch {
    /// Rows.
    pub b: u64,
    /// Tokens of a row.
    pub t: u64,
    /// Token ids, `[b, t]`.
    pub ids: Vec<i32>,
    /// What each token should be followed by.
    pub labels: Vec<i32>,
    /// Weight of each token in the loss.
    pub weights: Vec<f32>,
    rows: Vec<i32>,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Batch {
    /// Random tokens; the loss is the mean over `of` tokens.
    pub fn new(stack: &Stack, seed: u64, b: u64, t: u64, of: u64) -> Batch {
        let token = |i: u64| (crate::engine::mix(seed << 32 | i) % stack.vocabulary) as i32;
        let positions: Vec<u32> = (0..t as u32).collect();
        let (cosines, sines) =
            rope_tables(10_000.0, RopeScaling::None, &positions, (stack.hidden / HEADS) as usize).unwrap();
        Batch {
            b,
            t,
            ids: (0..b * t).map(token).collect(),
            labels: (0..b * t).map(|i| token(i + 1)).collect(),
            weights: vec![1.0 / of as f32; (b * t) as usize],
            rows: (0..b).flat_map(|_| [0, t as i32]).collect(),
            cosines,
            sines,
        }
    }

    /// The rows `from .. to` of the batch, with their weights as they are.
    pub fn rows(&self, from: u64, to: u64) -> Batch {
        let cut = |n: u64| (from * n) as usize..(to * n) as usize;
        Batch {
            b: to - from,
            t: self.t,
            ids: self.ids[cut(self.t)].to_vec(),
            labels: self.labels[cut(self.t)].to_vec(),
            weights: self.weights[cut(self.t)].to_vec(),
            rows: self.rows[cut(2)].to_vec(),
            cosines: self.cosines.clone(),
            sines: self.sines.clone(),
        }
    }

    /// The inputs by name, with those of the optimizer.
    pub fn inputs<'a>(&'a self, hyper: &'a [f32]) -> Vec<(&'a str, &'a [u8])> {
        let mut inputs: Vec<(&str, &[u8])> = vec![
            ("ids", bytemuck::cast_slice(&self.ids)),
            ("labels", bytemuck::cast_slice(&self.labels)),
            ("weights", bytemuck::cast_slice(&self.weights)),
            ("rows", bytemuck::cast_slice(&self.rows)),
            ("cosines", bytemuck::cast_slice(&self.cosines)),
            ("sines", bytemuck::cast_slice(&self.sines)),
        ];
        if !hyper.is_empty() {
            inputs.push(("hyper", bytemuck::cast_slice(hyper)));
        }
        inputs
    }
}

/// The shape of a weight of the stack.
pub fn weight_shape(stack: &Stack, name: &str) -> Vec<u64> {
    let (d, f) = (stack.hidden, 2 * stack.hidden);
    let kv = d / HEADS * KEY_HEADS;
    match name {
        "norm1" | "norm2" => vec![d],
        "q" | "o" => vec![d, d],
        "k" | "v" => vec![kv, d],
        "gate" | "up" => vec![f, d],
        "down" => vec![d, f],
        _ => vec![stack.vocabulary, d],
    }
}

/// Weights of a block, in order.
pub const BLOCK: [&str; 9] = ["norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down"];

/// Values of a weight.
pub fn weight_values(stack: &Stack, segment: u64, name: &str) -> Vec<f32> {
    let shape = weight_shape(stack, name);
    let n = shape.iter().product::<u64>() as usize;
    let seed = 1000 * segment + name.bytes().map(u64::from).sum::<u64>();
    if name.starts_with("norm") {
        return random(seed, n, 0.2).into_iter().map(|x| 1.0 + x).collect();
    }
    random(seed, n, 1.2 / (shape[shape.len() - 1] as f32).sqrt())
}

/// Embedding, blocks and head, a segment each.
pub fn catalog(stack: &Stack) -> Catalog {
    let data = |segment: u64, name: &str| f32s(name, &weight_shape(stack, name), &weight_values(stack, segment, name));
    let mut files = vec![("embed".to_string(), file(&[data(900, "embed")]))];
    for l in 0..stack.layers {
        let tensors: Vec<_> = BLOCK.iter().map(|name| data(l, name)).collect();
        files.push((format!("layer{l:02}"), file(&tensors)));
    }
    files.push(("head".to_string(), file(&[data(901, "head")])));
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    crate::engine::catalog(&files)
}

/// The adapters: A and B of q and v in each block.
pub fn params(stack: &Stack) -> Params {
    let mut params = Params::new();
    for l in 0..stack.layers {
        for target in ["q", "v"] {
            let out = weight_shape(stack, target)[0];
            params.add(&format!("{l}.{target}.a"), Shape::new(&[stack.rank, stack.hidden]).unwrap()).unwrap();
            params.add(&format!("{l}.{target}.b"), Shape::new(&[out, stack.rank]).unwrap()).unwrap();
        }
    }
    params
}

/// First values of the adapters. B is not zero, so that every gradient is there from the first step.
pub fn initial(stack: &Stack) -> Vec<f32> {
    let n = params(stack).arrays()[0] as usize;
    random(77, n, 0.1)
}

/// The loss of a batch of `b` rows of `t` tokens. Weights and adapters by name, from `w` and `lora`.
fn build(g: &mut Graph, stack: &Stack, catalog: &Catalog, windows: &[Tensor], b: u64, t: u64) -> Result<Tensor> {
    let (d, hd) = (stack.hidden, stack.hidden / HEADS);
    let ids = g.input_i32("ids", [b * t])?;
    let labels = g.input_i32("labels", [b * t])?;
    let weights = g.input("weights", [b * t])?;
    let rows = g.input_i32("rows", [b, 2])?;
    let cosines = g.input("cosines", [t, hd / 2])?;
    let sines = g.input("sines", [t, hd / 2])?;
    let mut h = embedding_rows(g, &catalog.segment("embed")?, "embed", ids)?;
    for l in 0..stack.layers {
        let s = catalog.segment(&format!("layer{l:02}"))?;
        let lora = |target: usize| {
            let at = (l as usize * 2 + target) * 2;
            Lora { a: windows[at], b: windows[at + 1], scale: SCALE, input: None }
        };
        h = g.block(|g| {
            let mut w = std::collections::BTreeMap::new();
            for name in BLOCK {
                w.insert(name, g.weight(&s, name)?);
            }
            let x = rms_norm(g, h, w["norm1"], EPS, 0.0)?;
            let q = linear_lora(g, x, w["q"], None, lora(0))?;
            let k = linear(g, x, w["k"], None)?;
            let v = linear_lora(g, x, w["v"], None, lora(1))?;
            let q = g.reshape(q, &[b, t, HEADS, hd])?;
            let k = g.reshape(k, &[b, t, KEY_HEADS, hd])?;
            let v = g.reshape(v, &[b, t, KEY_HEADS, hd])?;
            let q = rope(g, q, cosines, sines, Rope::HalfSplit)?;
            let k = rope(g, k, cosines, sines, Rope::HalfSplit)?;
            let spec = Attention { causal: true, window: 0, scale: 1.0 / (hd as f32).sqrt() };
            let a = attention(g, q, k, v, rows, spec)?;
            let a = g.reshape(a, &[b * t, d])?;
            let a = linear(g, a, w["o"], None)?;
            let h = g.add(h, a)?;
            let x = rms_norm(g, h, w["norm2"], EPS, 0.0)?;
            let gate = linear(g, x, w["gate"], None)?;
            let gate = g.unary(Unary::Silu, gate)?;
            let up = linear(g, x, w["up"], None)?;
            let m = g.binary(Binary::Mul, gate, up)?;
            let m = linear(g, m, w["down"], None)?;
            g.add(h, m)
        })?;
    }
    let head = g.weight(&catalog.segment("head")?, "head")?;
    cross_entropy(g, h, &[head], labels, weights)
}

/// A train program of the stack for a batch of this shape.
pub fn train_program(stack: &Stack, catalog: &Catalog, b: u64, t: u64, part: Part) -> Program {
    let params = params(stack);
    let mut g = Graph::new();
    let values = params.bind(&mut g).unwrap();
    let loss = build(&mut g, stack, catalog, &values.windows, b, t).unwrap();
    train_part(g, loss, &params, &values, &adamw(), part).unwrap().named(&format!("train {b}x{t} {part:?}"))
}

/// An evaluation program of the stack.
pub fn eval_program(stack: &Stack, catalog: &Catalog, b: u64, t: u64) -> Program {
    let params = params(stack);
    let mut g = Graph::new();
    let values = params.bind(&mut g).unwrap();
    let loss = build(&mut g, stack, catalog, &values.windows, b, t).unwrap();
    g.outputs(&[("loss", loss)]).unwrap().named(&format!("eval {b}x{t}"))
}

/// The optimizer of the tests.
pub fn adamw() -> AdamW {
    AdamW { weight_decay: 0.01, max_norm: 1.0, ..AdamW::default() }
}

/// Hyper-parameters of a step, counted from 1.
pub fn hyper(step: u64) -> Vec<f32> {
    adamw().hyper(1e-2, step).to_vec()
}

/// Compiles programs of the stack.
pub fn compiled(device: &Device, catalog: &Catalog, programs: &[Program], budget: Budget, options: Options) -> PlanSet {
    compile_with(programs, catalog, device.caps(), budget, options).unwrap()
}

/// A session with the adapters' first values.
pub fn session(device: &Device, catalog: &Catalog, stack: &Stack, set: PlanSet) -> Session {
    let mut session = wait(Session::new(device, catalog, set)).unwrap();
    wait(session.write_state("values.0", bytemuck::cast_slice(&initial(stack)))).unwrap();
    session
}

/// The loss of the stack in f64, written out: the oracle of the first step.
pub fn reference_loss(stack: &Stack, batch: &Batch) -> f64 {
    let (d, hd, t) = (stack.hidden as usize, (stack.hidden / HEADS) as usize, batch.t as usize);
    let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<f64>>();
    let lora = wide(initial(stack));
    let list: Vec<_> = params(stack).iter().map(|p| (p.offset as usize, p.shape.elements() as usize)).collect();
    let product = |x: &[f64], w: &[f64], n: usize| -> Vec<f64> {
        let k = w.len() / n;
        x.chunks(k)
            .flat_map(|row| w.chunks(k).map(|col| row.iter().zip(col).map(|(a, b)| a * b).sum()).collect::<Vec<f64>>())
            .collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        x.chunks(d)
            .flat_map(|row| {
                let r = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / d as f64 + f64::from(EPS)).sqrt();
                row.iter().zip(w).map(|(v, w)| v * r * w).collect::<Vec<f64>>()
            })
            .collect()
    };
    let embed = wide(weight_values(stack, 900, "embed"));
    let head = wide(weight_values(stack, 901, "head"));
    let mut loss = 0.0;
    for row in 0..batch.b as usize {
        let ids = &batch.ids[row * t..(row + 1) * t];
        let mut h: Vec<f64> =
            ids.iter().flat_map(|id| embed[*id as usize * d..(*id as usize + 1) * d].to_vec()).collect();
        for l in 0..stack.layers {
            let w = |name: &str| wide(weight_values(stack, l, name));
            let adapted = |x: &[f64], name: &str, target: usize| -> Vec<f64> {
                let out = weight_shape(stack, name)[0] as usize;
                let at = (l as usize * 2 + target) * 2;
                let part = |i: usize| &lora[list[i].0..list[i].0 + list[i].1];
                let low = product(x, part(at), stack.rank as usize);
                let add = product(&low, part(at + 1), out);
                product(x, &w(name), out).iter().zip(add).map(|(a, b)| a + f64::from(SCALE) * b).collect()
            };
            let turn = |x: &mut Vec<f64>, heads: usize| {
                for (p, row) in x.chunks_mut(heads * hd).enumerate() {
                    for head in row.chunks_mut(hd) {
                        for i in 0..hd / 2 {
                            let angle = p as f64 / 10_000f64.powf(2.0 * i as f64 / hd as f64);
                            let (a, b) = (head[i], head[i + hd / 2]);
                            head[i] = a * angle.cos() - b * angle.sin();
                            head[i + hd / 2] = b * angle.cos() + a * angle.sin();
                        }
                    }
                }
            };
            let x = norm(&h, &w("norm1"));
            let (mut q, v) = (adapted(&x, "q", 0), adapted(&x, "v", 1));
            let mut k = product(&x, &w("k"), KEY_HEADS as usize * hd);
            turn(&mut q, HEADS as usize);
            turn(&mut k, KEY_HEADS as usize);
            let mut a = vec![0.0; t * d];
            for i in 0..t {
                for head in 0..HEADS as usize {
                    let kv = head / (HEADS / KEY_HEADS) as usize;
                    let at = |x: &[f64], p: usize, n: usize, head: usize| x[p * n * hd + head * hd..][..hd].to_vec();
                    let query = at(&q, i, HEADS as usize, head);
                    let scores: Vec<f64> = (0..=i)
                        .map(|j| {
                            let key = at(&k, j, KEY_HEADS as usize, kv);
                            query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (hd as f64).sqrt()
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    for (j, s) in scores.iter().enumerate() {
                        let value = at(&v, j, KEY_HEADS as usize, kv);
                        for c in 0..hd {
                            a[i * d + head * hd + c] += (s - top).exp() / sum * value[c];
                        }
                    }
                }
            }
            let o = product(&a, &w("o"), d);
            h.iter_mut().zip(o).for_each(|(h, o)| *h += o);
            let x = norm(&h, &w("norm2"));
            let (gate, up) = (product(&x, &w("gate"), 2 * d), product(&x, &w("up"), 2 * d));
            let m: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = product(&m, &w("down"), d);
            h.iter_mut().zip(down).for_each(|(h, o)| *h += o);
        }
        let logits = product(&h, &head, stack.vocabulary as usize);
        for (i, row_logits) in logits.chunks(stack.vocabulary as usize).enumerate() {
            let top = row_logits.iter().copied().fold(f64::MIN, f64::max);
            let lse = top + row_logits.iter().map(|l| (l - top).exp()).sum::<f64>().ln();
            let label = batch.labels[row * t + i] as usize;
            loss += (lse - row_logits[label]) * f64::from(batch.weights[row * t + i]);
        }
    }
    loss
}
