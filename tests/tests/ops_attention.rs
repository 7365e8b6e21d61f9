//! Attention and rotary embedding: grouped heads, windows, caches longer than their content, views instead of copies.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::compile::{Action, Category};
use ebbtide::graph::Shape;
use ebbtide::nn::{Attention, Rope, RopeScaling, append, attention, rope, rope_tables};
use ebbtide::{Cancel, Graph, Session, Tensor};
use ebbtide_tests::engine::{device, random, same_bits, wait};
use ops::reference::{self as textbook, Heads};
use ops::{CHAIN, Case, Given, check, inputs, no_weights, run};

fn given(e: Heads, rows: &[i32]) -> Vec<Given> {
    let u = |n: usize| n as u64;
    vec![
        Given::random(1, &[u(e.b), u(e.t), u(e.h), u(e.d)], 1.0),
        Given::random(2, &[u(e.b), u(e.s), u(e.hk), u(e.d)], 1.0),
        Given::random(3, &[u(e.b), u(e.s), u(e.hk), u(e.d)], 1.0),
        Given::ints(&[u(e.b), 2], rows),
    ]
}

#[test]
fn attention_equals_a_materialised_softmax_and_its_gradients_the_differences() {
    let device = device();
    let full = |b: usize, s: usize| (0..b).flat_map(|_| [0, s as i32]).collect::<Vec<i32>>();
    let e = |b, t, s, h, hk, d| Heads { b, t, s, h, hk, d };
    let cases = [
        (e(1, 1, 1, 1, 1, 1), full(1, 1), true, 0),
        (e(1, 3, 3, 2, 1, 4), full(1, 3), true, 0),
        (e(2, 33, 33, 4, 2, 8), full(2, 33), true, 0),
        (e(1, 65, 65, 3, 3, 31), full(1, 65), true, 0),
        (e(1, 31, 31, 2, 2, 65), full(1, 31), false, 0),
        (e(1, 70, 70, 2, 1, 16), full(1, 70), true, 9),
        // Rows of their own length in a larger cache, and queries that begin late.
        (e(2, 5, 40, 4, 1, 8), vec![30, 35, 3, 8], true, 0),
        (e(2, 1, 64, 2, 1, 8), vec![63, 64, 0, 1], true, 0),
        // A row without any key gives zeros.
        (e(2, 3, 8, 1, 1, 4), vec![0, 0, 5, 8], true, 0),
    ];
    for (heads, rows, causal, window) in cases {
        let scale = 1.0 / (heads.d as f32).sqrt();
        let spec = Attention { causal, window, scale };
        let build = |g: &mut Graph, x: &[Tensor]| attention(g, x[0], x[1], x[2], x[3], spec);
        let reference = |x: &[Vec<f64>]| {
            textbook::attention(&x[0], &x[1], &x[2], &x[3], heads, causal, window as usize, f64::from(scale))
        };
        let name = format!("{heads:?} causal {causal} window {window}");
        let case = Case::new(name, given(heads, &rows), &[0, 1, 2], &build, &reference);
        check(&device, &Case { tolerance: CHAIN, ..case });
    }
}

#[test]
fn queries_keys_and_values_in_one_product_are_read_where_they_lie() {
    let device = device();
    let heads = Heads { b: 2, t: 9, s: 9, h: 4, hk: 2, d: 8 };
    let (q, kv) = (4 * 8u64, 2 * 8u64);
    let given = vec![Given::random(1, &[2, 9, q + 2 * kv], 1.0), Given::ints(&[2, 2], &[0, 9, 0, 9])];
    let spec = Attention { causal: true, window: 0, scale: 0.35 };
    // The parts as slices: no copy, no transpose.
    let parts = |g: &mut Graph, x: Tensor| -> ebbtide::Result<[Tensor; 3]> {
        let all = g.reshape(x, &[2, 9, 8, 8])?;
        Ok([g.slice(all, 2, 0, 4)?, g.slice(all, 2, 4, 6)?, g.slice(all, 2, 6, 8)?])
    };
    let build = |g: &mut Graph, x: &[Tensor]| {
        let [q, k, v] = parts(g, x[0])?;
        attention(g, q, k, v, x[1], spec)
    };
    let reference = |x: &[Vec<f64>]| {
        let pick =
            |from: usize, n: usize| x[0].chunks(64).flat_map(|r| r[from * 8..][..n * 8].to_vec()).collect::<Vec<f64>>();
        textbook::attention(&pick(0, 4), &pick(4, 2), &pick(6, 2), &x[1], heads, true, 0, f64::from(0.35f32))
    };
    let case = Case::new("one product", given, &[0], &build, &reference);
    check(&device, &Case { tolerance: CHAIN, ..case });

    let mut g = Graph::new();
    let x = g.input("x", [2, 9, 64]).unwrap();
    let rows = g.input_i32("rows", [2, 2]).unwrap();
    let [q, k, v] = parts(&mut g, x).unwrap();
    let y = attention(&mut g, q, k, v, rows, spec).unwrap();
    let program = g.outputs(&[("y", y)]).unwrap();
    let set = ebbtide::compile(&[program], &no_weights(), device.caps(), ebbtide::Budget::All).unwrap();
    let kernels = set.plans[0].actions.iter().filter(|a| matches!(a, Action::Dispatch { .. })).count();
    assert_eq!(kernels, 1, "nothing but attention itself runs");
}

#[test]
fn decoding_against_a_cache_gives_the_bits_of_the_whole() {
    let device = device();
    let heads = Heads { b: 1, t: 40, s: 40, h: 2, hk: 1, d: 16 };
    let spec = Attention { causal: true, window: 0, scale: 0.25 };
    let all = given(heads, &[0, 40]);
    let program = |given: &[Given]| {
        let mut g = Graph::new();
        let x = inputs(&mut g, given);
        let y = attention(&mut g, x[0], x[1], x[2], x[3], spec).unwrap();
        g.outputs(&[("y", y)]).unwrap()
    };
    let whole = run(&device, &no_weights(), device.caps(), &[program(&all)], &all, &[]).remove(0);
    let row = 2 * 16 * 4;
    for position in [0usize, 31, 32, 39] {
        let Given::F32(_, q) = &all[0] else { unreachable!() };
        let one = Given::F32(vec![1, 1, 2, 16], q[position * 32..][..32].to_vec());
        // Keys behind the position are in the cache already and must not matter.
        let rows = Given::ints(&[1, 2], &[position as i32, position as i32 + 1]);
        let given = vec![one, all[1].clone(), all[2].clone(), rows];
        let out = run(&device, &no_weights(), device.caps(), &[program(&given)], &given, &[]).remove(0);
        same_bits(
            &format!("position {position}"),
            out.bytes("y").unwrap(),
            &whole.bytes("y").unwrap()[position * row..][..row],
        );
    }
}

#[test]
fn a_cache_filled_by_prompt_and_steps_gives_the_bits_of_one_pass() {
    // Two rows of different lengths; the cache outlives each run, positions are inputs.
    let device = device();
    let (t, room) = (12usize, 40u64);
    let (h, hk, d) = (2u64, 1u64, 8u64);
    let spec = Attention { causal: true, window: 0, scale: 0.3 };
    let lengths = [12i32, 7];
    let whole = given(Heads { b: 2, t, s: t, h: 2, hk: 1, d: 8 }, &[0, lengths[0], 0, lengths[1]]);
    let program = |t: u64| {
        let mut g = Graph::new();
        let kv = Shape::new(&[2, room, hk, d]).unwrap();
        let caches = ["k", "v"].map(|n| g.scratch(n, kv, Category::Kv));
        let q = g.input("q", [2, t, h, d]).unwrap();
        let new = ["new k", "new v"].map(|n| g.input(n, [2, t, hk, d]).unwrap());
        let rows = g.input_i32("rows", [2, 2]).unwrap();
        let k = append(&mut g, caches[0], new[0], rows).unwrap();
        let v = append(&mut g, caches[1], new[1], rows).unwrap();
        let y = attention(&mut g, q, k, v, rows, spec).unwrap();
        g.outputs(&[("y", y)]).unwrap()
    };
    // A prompt of 5 padded positions (of which the second row has 3), then steps of one.
    let none = no_weights();
    let set = ebbtide::compile(&[program(5), program(1)], &none, device.caps(), ebbtide::Budget::All).unwrap();
    let mut session = wait(Session::new(&device, &none, set)).unwrap();
    let part = |i: usize, from: [usize; 2], t: usize| -> Vec<f32> {
        let Given::F32(shape, x) = &whole[i] else { unreachable!() };
        let width = (shape[2] * shape[3]) as usize;
        // Past a row's end stands garbage, which must not matter.
        let entry = |b: usize, i: usize| {
            let at = from[b] + i;
            if at < lengths[b] as usize { x[(b * 12 + at) * width..][..width].to_vec() } else { vec![f32::MAX; width] }
        };
        (0..2).flat_map(|b| (0..t).flat_map(move |i| entry(b, i))).collect()
    };
    let mut got: [Vec<f32>; 2] = Default::default();
    let mut held = [0usize; 2];
    for step in 0..8 {
        let (plan, t) = if step == 0 { (0, 5) } else { (1, 1) };
        let counts = [0, 1].map(|b| (lengths[b] as usize - held[b]).min(if step == 0 { [5, 3][b] } else { 1 }));
        let rows: Vec<i32> = (0..2).flat_map(|b| [held[b] as i32, (held[b] + counts[b]) as i32]).collect();
        let parts = [0, 1, 2].map(|i| part(i, held, t));
        let inputs = [
            ("q", bytemuck::cast_slice(&parts[0])),
            ("new k", bytemuck::cast_slice(&parts[1])),
            ("new v", bytemuck::cast_slice(&parts[2])),
            ("rows", bytemuck::cast_slice(&rows)),
        ];
        let out = wait(session.run(plan, &inputs, &Cancel::new(), &mut Vec::new())).unwrap();
        let y = out.f32("y").unwrap();
        for b in 0..2 {
            got[b].extend(&y[b * t * 16..][..counts[b] * 16]);
            held[b] += counts[b];
        }
    }
    assert_eq!(held, lengths.map(|n| n as usize));
    let mut g = Graph::new();
    let x = inputs(&mut g, &whole);
    let y = attention(&mut g, x[0], x[1], x[2], x[3], spec).unwrap();
    let want = run(&device, &none, device.caps(), &[g.outputs(&[("y", y)]).unwrap()], &whole, &[]).remove(0);
    let want = want.f32("y").unwrap();
    for (b, length) in lengths.into_iter().enumerate() {
        let want = &want[b * t * 16..][..length as usize * 16];
        same_bits(&format!("row {b}"), bytemuck::cast_slice(&got[b]), bytemuck::cast_slice(want));
    }
}

#[test]
fn a_rotary_embedding_equals_the_textbook_and_its_gradient_turns_back() {
    let device = device();
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    for (dims, half) in [([1usize, 1, 1, 2], 1usize), ([2, 5, 3, 8], 4), ([1, 33, 2, 31], 10), ([2, 3, 1, 64], 32)] {
        let [b, t, h, d] = dims;
        for interleaved in [false, true] {
            for own in [false, true] {
                let rows = if own { b } else { 1 };
                let positions: Vec<u32> = (0..rows * t).map(|i| (i * 7 + i / t * 100) as u32).collect();
                let (cos, sin) = rope_tables(10_000.0, scaling, &positions, 2 * half).unwrap();
                let u = |n: usize| n as u64;
                let table = if own { vec![u(b), u(t), u(half)] } else { vec![u(t), u(half)] };
                let given = vec![
                    Given::random(1, &[u(b), u(t), u(h), u(d)], 1.0),
                    Given::F32(table.clone(), cos),
                    Given::F32(table, sin),
                ];
                let pairs = if interleaved { Rope::Interleaved } else { Rope::HalfSplit };
                let build = |g: &mut Graph, x: &[Tensor]| rope(g, x[0], x[1], x[2], pairs);
                let reference = |x: &[Vec<f64>]| textbook::rope(&x[0], dims, &x[1], &x[2], half, interleaved);
                let name = format!("rope {dims:?} half {half} {pairs:?} own positions {own}");
                check(&device, &Case::new(name, given, &[0], &build, &reference));
            }
        }
    }
}

#[test]
fn a_row_is_turned_in_place_of_its_view() {
    let device = device();
    let (cos, sin) = rope_tables(10_000.0, RopeScaling::None, &[0, 1, 2], 4).unwrap();
    let given = vec![
        Given::F32(vec![1, 2, 3, 4], random(1, 24, 1.0)),
        Given::F32(vec![3, 2], cos),
        Given::F32(vec![3, 2], sin),
    ];
    // Heads outside positions, seen the other way round.
    let build = |g: &mut Graph, x: &[Tensor]| {
        let seen = g.permute(x[0], &[0, 2, 1, 3])?;
        rope(g, seen, x[1], x[2], Rope::HalfSplit)
    };
    let reference = |x: &[Vec<f64>]| {
        let at = |t: usize, h: usize| x[0][(h * 3 + t) * 4..][..4].to_vec();
        let seen: Vec<f64> = (0..3).flat_map(|t| (0..2).flat_map(move |h| at(t, h))).collect();
        textbook::rope(&seen, [1, 3, 2, 4], &x[1], &x[2], 2, false)
    };
    check(&device, &Case::new("rope of a view", given, &[0], &build, &reference));
}
