//! Linear layers, with and without adapters, of few rows and many, over whole weights and weights in pieces.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::nn::{Lora, MATVEC_ROWS, linear, linear_lora};
use ebbtide::{Graph, Tensor};
use ebbtide_tests::engine::{self, device, random, same_bits};
use ops::reference as textbook;
use ops::{CHAIN, Case, Given, WEIGHTS, check, inputs, no_weights, run, stored};

#[test]
fn a_linear_layer_equals_the_textbook_in_every_shape_and_its_gradients_the_differences() {
    let device = device();
    for (rows, k, n) in
        [(1, 1, 1), (3, 31, 33), (4, 127, 3), (5, 33, 65), (31, 65, 127), (127, 3, 31), (33, 127, 1), (65, 1, 65)]
    {
        for bias in [false, true] {
            let mut given = vec![Given::random(1, &[rows, k], 1.0), Given::random(2, &[n, k], 0.5)];
            if bias {
                given.push(Given::random(3, &[n], 0.5));
            }
            let (k, n) = (k as usize, n as usize);
            let build = |g: &mut Graph, x: &[Tensor]| linear(g, x[0], x[1], x.get(2).copied());
            let reference = |x: &[Vec<f64>]| textbook::linear(&x[0], &x[1], x.get(2).map(Vec::as_slice), k, n);
            let wrt = [0, 1, 2];
            let name = format!("linear {rows}x{k}->{n} bias {bias}");
            check(&device, &Case::new(name, given, &wrt[..2 + usize::from(bias)], &build, &reference));
        }
    }
}

#[test]
fn leading_dimensions_are_rows_and_no_rows_are_no_work() {
    let device = device();
    for shape in [vec![5], vec![2, 3, 5], vec![1, 2, 2, 3, 5], vec![2, 1, 1, 2, 1, 5], vec![0, 5], vec![2, 0, 5]] {
        let given = vec![Given::random(1, &shape, 1.0), Given::random(2, &[7, 5], 1.0)];
        let build = |g: &mut Graph, x: &[Tensor]| linear(g, x[0], x[1], None);
        let reference = |x: &[Vec<f64>]| textbook::linear(&x[0], &x[1], None, 5, 7);
        check(&device, &Case::new(format!("linear of {shape:?}"), given, &[0, 1], &build, &reference));
    }
}

#[test]
fn stored_weights_are_read_in_their_dtype() {
    let device = device();
    for dtype in WEIGHTS {
        for rows in [2u64, 33] {
            let (k, n) = (65usize, 31usize);
            let (w, kept) = stored("w", dtype, &[n as u64, k as u64], &random(5, n * k, 0.5));
            let (b, bias) = stored("b", dtype, &[n as u64], &random(6, n, 0.5));
            let catalog = engine::catalog(&[("layer", engine::file(&[w, b]))]);
            let segment = catalog.segment("layer").unwrap();
            let build = |g: &mut Graph, x: &[Tensor]| {
                let (w, b) = (g.weight(&segment, "w")?, g.weight(&segment, "b")?);
                linear(g, x[0], w, Some(b))
            };
            let reference = |x: &[Vec<f64>]| textbook::linear(&x[0], &kept, Some(&bias), k, n);
            let given = vec![Given::random(1, &[rows, k as u64], 1.0)];
            let case = Case::new(format!("{dtype:?} weight, {rows} rows"), given, &[0], &build, &reference);
            check(&device, &Case { catalog: Some(&catalog), ..case });
        }
    }
}

#[test]
fn the_number_of_rows_alone_chooses_between_matvec_and_matmul() {
    // The last row of four and the same row among five: other ops, so other bits are allowed; among three and four: the same.
    let device = device();
    let (k, n) = (127u64, 33u64);
    let w = Given::random(2, &[n, k], 0.5);
    let x = random(1, 5 * k as usize, 1.0);
    let rows_of = |count: u64| {
        let given = vec![Given::F32(vec![count, k], x[..(count * k) as usize].to_vec()), w.clone()];
        let mut g = Graph::new();
        let t = inputs(&mut g, &given);
        let y = linear(&mut g, t[0], t[1], None).unwrap();
        let program = g.outputs(&[("y", y)]).unwrap();
        run(&device, &no_weights(), device.caps(), &[program], &given, &[]).remove(0).bytes("y").unwrap().to_vec()
    };
    assert_eq!(MATVEC_ROWS, 4);
    let (three, four) = (rows_of(3), rows_of(4));
    same_bits("three rows of four", &four[..three.len()], &three);
    let five = rows_of(5);
    assert_ne!(five[..four.len()], four, "another op has other bits");
}

#[test]
fn an_adapter_equals_the_textbook_and_its_gradients_the_differences() {
    let device = device();
    for (rows, k, n, r) in [(1u64, 1u64, 1u64, 1u64), (3, 31, 33, 2), (33, 65, 31, 8), (65, 127, 65, 3)] {
        for bias in [false, true] {
            let mut given = vec![
                Given::random(1, &[rows, k], 1.0),
                Given::random(2, &[n, k], 0.5),
                Given::random(3, &[r, k], 0.5),
                Given::random(4, &[n, r], 0.5),
            ];
            if bias {
                given.push(Given::random(5, &[n], 0.5));
            }
            let scale = 1.75f32;
            let build = |g: &mut Graph, x: &[Tensor]| {
                linear_lora(g, x[0], x[1], x.get(4).copied(), Lora { a: x[2], b: x[3], scale, input: None })
            };
            let (k, n, r) = (k as usize, n as usize, r as usize);
            let reference = |x: &[Vec<f64>]| {
                let plain = textbook::linear(&x[0], &x[1], x.get(4).map(Vec::as_slice), k, n);
                let low = textbook::linear(&x[0], &x[2], None, k, r);
                let part = textbook::linear(&low, &x[3], None, r, n);
                plain.iter().zip(part).map(|(p, q)| p + f64::from(scale) * q).collect()
            };
            let wrt = [0, 1, 2, 3, 4];
            let name = format!("adapter of rank {r}, {rows}x{k}->{n}, bias {bias}");
            let case = Case::new(name, given, &wrt[..4 + usize::from(bias)], &build, &reference);
            check(&device, &Case { tolerance: CHAIN, ..case });
        }
    }
}

#[test]
fn an_adapter_may_read_an_operand_of_its_own() {
    let device = device();
    let given = vec![
        Given::random(1, &[2, 5, 9], 1.0),
        Given::random(2, &[7, 9], 0.5),
        Given::random(3, &[3, 9], 0.5),
        Given::random(4, &[7, 3], 0.5),
        Given::random(5, &[2, 5, 9], 1.0),
    ];
    let build = |g: &mut Graph, x: &[Tensor]| {
        linear_lora(g, x[0], x[1], None, Lora { a: x[2], b: x[3], scale: 0.5, input: Some(x[4]) })
    };
    let reference = |x: &[Vec<f64>]| {
        let plain = textbook::linear(&x[0], &x[1], None, 9, 7);
        let low = textbook::linear(&x[4], &x[2], None, 9, 3);
        let part = textbook::linear(&low, &x[3], None, 3, 7);
        plain.iter().zip(part).map(|(p, q)| p + 0.5 * q).collect()
    };
    let case = Case::new("adapter behind a dropout", given, &[0, 1, 2, 3, 4], &build, &reference);
    check(&device, &Case { tolerance: CHAIN, ..case });
}

#[test]
fn the_adapters_product_is_carried_into_the_layers_and_not_added() {
    // The definition in f32, step by step: the accumulator starts from s·((x·A)·B) and the bias comes last.
    let device = device();
    let (rows, k, n, r) = (17usize, 65usize, 33usize, 4usize);
    let [x, w, a, b, bias]: [Vec<f32>; 5] =
        [(1, rows * k), (2, n * k), (3, r * k), (4, n * r), (5, n)].map(|(s, n)| random(s, n, 0.5));
    let scale = 1.3f32;
    // WGSL lets an adapter round `fma` once or twice; either way the order is the op's.
    let defined = |fma: fn(f32, f32, f32) -> f32| {
        let mut want = vec![0f32; rows * n];
        for row in 0..rows {
            let low: Vec<f32> =
                (0..r).map(|j| (0..k).fold(0f32, |acc, i| fma(x[row * k + i], a[j * k + i], acc))).collect();
            for col in 0..n {
                let part = scale * (0..r).fold(0f32, |acc, j| fma(low[j], b[col * r + j], acc));
                let sum = (0..k).fold(part, |acc, i| fma(x[row * k + i], w[col * k + i], acc));
                want[row * n + col] = sum + bias[col];
            }
        }
        want
    };
    let wants = [defined(f32::mul_add), defined(|a, b, c| a * b + c)];
    let u = |n: usize| n as u64;
    let given = vec![
        Given::F32(vec![u(rows), u(k)], x.clone()),
        Given::F32(vec![u(n), u(k)], w.clone()),
        Given::F32(vec![u(r), u(k)], a.clone()),
        Given::F32(vec![u(n), u(r)], b.clone()),
        Given::F32(vec![u(n)], bias.clone()),
    ];
    let mut g = Graph::new();
    let t = inputs(&mut g, &given);
    let y = linear_lora(&mut g, t[0], t[1], Some(t[4]), Lora { a: t[2], b: t[3], scale, input: None }).unwrap();
    let program = g.outputs(&[("y", y)]).unwrap();
    let out = run(&device, &no_weights(), device.caps(), &[program], &given, &[]).remove(0);
    let got = out.f32("y").unwrap();
    if got != wants[0] {
        same_bits("linear with an adapter", out.bytes("y").unwrap(), bytemuck::cast_slice(&wants[1]));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_in_words() {
    let mut g = Graph::new();
    let x = g.input("x", [3, 5]).unwrap();
    let w = g.input("w", [7, 4]).unwrap();
    let error = linear(&mut g, x, w, None).unwrap_err().to_string();
    assert!(error.contains("[3, 5]") && error.contains("[7, 4]"), "{error}");
    let w = g.input("w5", [7, 5]).unwrap();
    let a = g.input("a", [2, 5]).unwrap();
    let error = linear_lora(&mut g, x, w, None, Lora { a, b: a, scale: 1.0, input: None }).unwrap_err().to_string();
    assert!(error.contains("[2, 5]"), "{error}");
}
