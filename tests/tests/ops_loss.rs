//! Cross-entropy over large vocabularies: no cut of vocabulary, tokens, pieces or dispatches changes a bit.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::compile::{Action, Budget, Options};
use ebbtide::nn::{Blocks, cross_entropy, token_losses_in};
use ebbtide::weights::DType;
use ebbtide::{Catalog, Device, Graph, Outputs, Program, Tensor};
use ebbtide_tests::engine::{self, device, mix, random, same_bits};
use ebbtide_tests::kernel::near;
use ops::reference as textbook;
use ops::{CHAIN, Case, Given, WEIGHTS, check, cut, no_weights, run, stored};

fn labels(tokens: u64, vocabulary: u64) -> Given {
    let of = |i: u64| if i % 5 == 3 { -100 } else { (mix(i) % vocabulary) as i32 };
    Given::ints(&[tokens], &(0..tokens).map(of).collect::<Vec<i32>>())
}

#[test]
fn the_loss_equals_the_textbook_and_its_gradient_the_differences() {
    let device = device();
    for (t, v, d) in [(1u64, 1u64, 1u64), (3, 31, 33), (33, 1023, 3), (5, 1025, 31), (2, 4097, 5), (65, 127, 65)] {
        let given = vec![
            Given::random(1, &[t, d], 1.0),
            Given::random(2, &[v, d], 1.0),
            labels(t, v),
            Given::random(3, &[t], 1.0),
        ];
        let build = |g: &mut Graph, x: &[Tensor]| cross_entropy(g, x[0], &[x[1]], x[2], x[3]);
        let reference = |x: &[Vec<f64>]| vec![textbook::cross_entropy(&x[0], &x[1], d as usize, &x[2], &x[3])];
        // The head is an input here, whose gradient nobody asks for.
        let case =
            Case::new(format!("cross entropy {t} tokens of {v}, {d} features"), given, &[0, 3], &build, &reference);
        check(&device, &Case { tolerance: CHAIN, ..case });
    }
}

/// Per-token losses and the gradient of the hidden state, of a head in pieces and blocks.
fn step(given: &[Given], head: &dyn Fn(&mut Graph, &[Tensor]) -> Vec<Tensor>, blocks: Blocks) -> [Program; 2] {
    let build = |outputs: bool| {
        let mut g = Graph::new();
        let x = ops::inputs(&mut g, given);
        let pieces = head(&mut g, &x);
        let losses = token_losses_in(&mut g, x[0], &pieces, x[2], blocks).unwrap();
        if outputs {
            return g.outputs(&[("y", losses)]).unwrap();
        }
        let weighted = g.mul(losses, x[3]).unwrap();
        let loss = g.sum(weighted).unwrap();
        g.value_and_grad(loss, &[x[0]]).unwrap()
    };
    [build(true), build(false)]
}

fn same(what: &str, got: &[Outputs], want: &[Outputs]) {
    same_bits(&format!("{what}: losses"), got[0].bytes("y").unwrap(), want[0].bytes("y").unwrap());
    same_bits(&format!("{what}: loss"), got[1].bytes("loss").unwrap(), want[1].bytes("loss").unwrap());
    same_bits(&format!("{what}: gradient"), got[1].bytes("grad.0").unwrap(), want[1].bytes("grad.0").unwrap());
}

#[test]
fn blocks_of_tokens_and_vocabulary_and_pieces_of_the_head_leave_no_trace() {
    let device = device();
    let (t, v, d) = (65u64, 9000u64, 17u64);
    let given =
        vec![Given::random(1, &[t, d], 2.0), Given::random(2, &[v, d], 1.0), labels(t, v), Given::random(3, &[t], 1.0)];
    let whole = |_: &mut Graph, x: &[Tensor]| vec![x[1]];
    let all = Blocks { tokens: t, vocabulary: 9 * 1024 };
    let go = |head: &dyn Fn(&mut Graph, &[Tensor]) -> Vec<Tensor>, blocks: Blocks| {
        run(&device, &no_weights(), device.caps(), &step(&given, head, blocks), &given, &[])
    };
    let want = go(&whole, all);
    for (tokens, vocabulary) in [(256, 4096), (1, 9216), (7, 1024), (64, 2048), (65, 8192)] {
        same(&format!("{tokens} tokens by {vocabulary}"), &go(&whole, Blocks { tokens, vocabulary }), &want);
    }
    for cuts in [vec![1024], vec![4096, 8192], vec![2048, 3072, 8192]] {
        let pieces = |g: &mut Graph, x: &[Tensor]| {
            let ends: Vec<u64> = cuts.iter().copied().chain([v]).collect();
            let mut from = 0;
            ends.iter().map(|end| g.slice(x[1], 0, std::mem::replace(&mut from, *end), *end).unwrap()).collect()
        };
        same(&format!("pieces cut at {cuts:?}"), &go(&pieces, Blocks::default()), &want);
        same(&format!("pieces cut at {cuts:?}, small"), &go(&pieces, Blocks { tokens: 11, vocabulary: 1024 }), &want);
    }
    let small = run(&device, &no_weights(), &cut(&device), &step(&given, &whole, Blocks::default()), &given, &[]);
    same("dispatches cut small", &small, &want);
}

/// A head stored as segments of so many rows each.
fn stored_head(dtype: DType, v: u64, d: u64, rows: u64) -> (Catalog, Vec<f64>) {
    let values = random(9, (v * d) as usize, 1.0);
    let (mut files, mut kept) = (Vec::new(), Vec::new());
    for (i, part) in values.chunks((rows * d) as usize).enumerate() {
        let (data, k) = stored("w", dtype, &[part.len() as u64 / d, d], part);
        kept.extend(k);
        files.push((format!("head{i}"), engine::file(&[data])));
    }
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    (engine::catalog(&files), kept)
}

fn weights(catalog: &Catalog) -> impl Fn(&mut Graph, &[Tensor]) -> Vec<Tensor> + '_ {
    |g, _| catalog.segments().map(|s| g.weight(s, "w").unwrap()).collect()
}

#[test]
fn a_streamed_head_gives_the_bits_of_a_whole_one_in_every_dtype() {
    let device = device();
    let (t, v, d) = (33u64, 5000u64, 9u64);
    for dtype in WEIGHTS {
        // Operand 1 stands unused where the head is stored.
        let given = vec![
            Given::random(1, &[t, d], 2.0),
            Given::random(2, &[1], 1.0),
            labels(t, v),
            Given::random(3, &[t], 1.0),
        ];
        let (whole, kept) = stored_head(dtype, v, d, v);
        let want = run(&device, &whole, device.caps(), &step(&given, &weights(&whole), Blocks::default()), &given, &[]);
        let numbers = |g: &Given| match g {
            Given::F32(_, x) => x.iter().map(|x| f64::from(*x)).collect(),
            Given::I32(_, x) => x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>(),
        };
        let twin = textbook::token_losses(&numbers(&given[0]), &kept, d as usize, &numbers(&given[2]));
        near(&format!("{dtype:?} head"), &want[0].f32("y").unwrap(), &twin, CHAIN);
        for rows in [1024, 2048] {
            let (parts, _) = stored_head(dtype, v, d, rows);
            let got =
                run(&device, &parts, device.caps(), &step(&given, &weights(&parts), Blocks::default()), &given, &[]);
            same(&format!("{dtype:?} head in pieces of {rows}"), &got, &want);
        }
    }
}

#[test]
fn the_backward_pass_meets_the_pieces_of_the_head_in_reverse() {
    let device = device();
    let (t, v, d) = (300u64, 5 * 1024u64, 8u64);
    let (parts, _) = stored_head(DType::BF16, v, d, 1024);
    let given =
        vec![Given::random(1, &[t, d], 2.0), Given::random(2, &[1], 1.0), labels(t, v), Given::random(3, &[t], 1.0)];
    let [_, program] = step(&given, &weights(&parts), Blocks::default());
    let options = Options { once: true, ..Options::default() };
    let set = ebbtide::compile_with(&[program], &parts, device.caps(), Budget::Floor, options).unwrap();
    let loads: Vec<u32> = set.plans[0]
        .actions
        .iter()
        .filter_map(|a| match a {
            Action::Load { segment, .. } => Some(*segment),
            _ => None,
        })
        .collect();
    // One slot: each piece once on the way there and, but for the last, once on the way back.
    assert_eq!(loads, [0, 1, 2, 3, 4, 3, 2, 1, 0]);
    // All logits would be 300 × 5,120; a block and its gradient, hidden states and stats are far less.
    assert!(set.planned_peak() < t * v * 4 * 2, "{}", set.planned_peak());
}

#[test]
fn all_tokens_masked_is_a_loss_of_zero_and_no_token_no_work() {
    let device = device();
    let given = |t: u64| {
        vec![
            Given::random(1, &[t, 3], 1.0),
            Given::random(2, &[5, 3], 1.0),
            Given::ints(&[t], &vec![-1; t as usize]),
            Given::random(3, &[t], 1.0),
        ]
    };
    let go = |device: &Device, t: u64| {
        let mut g = Graph::new();
        let x = ops::inputs(&mut g, &given(t));
        let loss = cross_entropy(&mut g, x[0], &[x[1]], x[2], x[3]).unwrap();
        let program = g.value_and_grad(loss, &[x[0]]).unwrap();
        run(device, &no_weights(), device.caps(), &[program], &given(t), &[]).remove(0)
    };
    let out = go(&device, 4);
    assert_eq!(out.f32("loss").unwrap(), [0.0]);
    assert_eq!(out.f32("grad.0").unwrap(), [0.0; 12]);
    assert_eq!(go(&device, 0).f32("loss").unwrap(), [0.0]);
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let mut g = Graph::new();
    let h = g.input("h", [4, 3]).unwrap();
    let w = g.input("w", [5, 3]).unwrap();
    let labels = g.input_i32("labels", [4]).unwrap();
    let floats = g.input("floats", [4]).unwrap();
    assert!(cross_entropy(&mut g, h, &[w], floats, floats).unwrap_err().to_string().contains("integers"));
    assert!(cross_entropy(&mut g, h, &[], labels, floats).unwrap_err().to_string().contains("no rows"));
    let error = cross_entropy(&mut g, h, &[w, w], labels, floats).unwrap_err().to_string();
    assert!(error.contains("1024"), "{error}");
    let odd = Blocks { tokens: 1, vocabulary: 1000 };
    assert!(token_losses_in(&mut g, h, &[w], labels, odd).unwrap_err().to_string().contains("1024"));
    // A head that is to be trained.
    let loss = cross_entropy(&mut g, h, &[w], labels, floats).unwrap();
    assert!(g.value_and_grad(loss, &[w]).unwrap_err().to_string().contains("frozen"));
}
