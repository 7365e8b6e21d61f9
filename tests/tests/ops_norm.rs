//! Softmax and norms over rows of every length, weights in every dtype.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::nn::{layer_norm, rms_norm, softmax};
use ebbtide::{Graph, Tensor};
use ebbtide_tests::engine::{self, device, random};
use ops::reference as textbook;
use ops::{CHAIN, Case, Given, WEIGHTS, check, stored};

const ROWS: [(u64, u64); 8] = [(1, 1), (3, 31), (2, 33), (5, 65), (1, 127), (33, 3), (127, 65), (2, 1025)];
const EPS: f32 = 1e-5;

#[test]
fn softmax_equals_the_textbook_and_its_gradient_the_differences() {
    let device = device();
    for (rows, n) in ROWS {
        let build = |g: &mut Graph, x: &[Tensor]| softmax(g, x[0]);
        let reference = |x: &[Vec<f64>]| textbook::softmax(&x[0], n as usize);
        let case =
            Case::new(format!("softmax {rows}x{n}"), vec![Given::random(1, &[rows, n], 6.0)], &[0], &build, &reference);
        check(&device, &Case { tolerance: CHAIN, ..case });
    }
    let build = |g: &mut Graph, x: &[Tensor]| softmax(g, x[0]);
    let none = |_: &[Vec<f64>]| vec![];
    for shape in [vec![0, 5], vec![3, 0]] {
        check(&device, &Case::new("softmax of nothing", vec![Given::random(1, &shape, 1.0)], &[0], &build, &none));
    }
}

#[test]
fn a_norm_over_a_view_is_the_norm_of_its_elements() {
    let device = device();
    let given = vec![Given::random(1, &[7, 5, 2, 3], 1.0), Given::random(2, &[7], 1.0)];
    // [3, 5, 2, 7] from [7, 5, 2, 3], and a slice of that.
    let seen = |x: &[f64]| -> Vec<f64> {
        let at = |a: usize, b: usize, c: usize, d: usize| x[((d * 5 + b) * 2 + c) * 3 + a];
        let mut y = vec![];
        for a in 0..3 {
            for b in 1..4 {
                for c in 0..2 {
                    y.extend((0..7).map(|d| at(a, b, c, d)));
                }
            }
        }
        y
    };
    let view = |g: &mut Graph, x: Tensor| -> ebbtide::Result<Tensor> {
        let p = g.permute(x, &[3, 1, 2, 0])?;
        g.slice(p, 1, 1, 4)
    };
    let build = |g: &mut Graph, x: &[Tensor]| {
        let v = view(g, x[0])?;
        let y = rms_norm(g, v, x[1], EPS, 0.0)?;
        softmax(g, y)
    };
    let reference =
        |x: &[Vec<f64>]| textbook::softmax(&textbook::rms_norm(&seen(&x[0]), &x[1], f64::from(EPS), 0.0), 7);
    let case = Case::new("norm and softmax of a view", given, &[0, 1], &build, &reference);
    check(&device, &Case { tolerance: CHAIN, ..case });
}

#[test]
fn an_rms_norm_equals_the_textbook_and_its_gradients_the_differences() {
    let device = device();
    for (rows, n) in ROWS {
        for plus in [0f32, 1.0] {
            let build = |g: &mut Graph, x: &[Tensor]| rms_norm(g, x[0], x[1], EPS, plus);
            let reference = |x: &[Vec<f64>]| textbook::rms_norm(&x[0], &x[1], f64::from(EPS), f64::from(plus));
            let given = vec![Given::random(1, &[rows, n], 2.0), Given::random(2, &[n], 1.0)];
            // Of one feature only the sign passes: its derivative is what eps leaves of a difference, and is not compared.
            let wrt: &[usize] = if n == 1 { &[1] } else { &[0, 1] };
            check(&device, &Case::new(format!("rms norm {rows}x{n} plus {plus}"), given, wrt, &build, &reference));
        }
    }
}

#[test]
fn a_layer_norm_equals_the_textbook_and_its_gradients_the_differences() {
    let device = device();
    // One feature has no variance: its derivative is of the size of 1 / eps and is not compared.
    for (rows, n) in ROWS.into_iter().filter(|(_, n)| *n > 1) {
        for bias in [false, true] {
            let build = |g: &mut Graph, x: &[Tensor]| layer_norm(g, x[0], x[1], x.get(2).copied(), EPS);
            let reference =
                |x: &[Vec<f64>]| textbook::layer_norm(&x[0], &x[1], x.get(2).map(Vec::as_slice), f64::from(EPS));
            let mut given = vec![Given::random(1, &[rows, n], 2.0), Given::random(2, &[n], 1.0)];
            if bias {
                given.push(Given::random(3, &[n], 1.0));
            }
            let wrt = [0, 1, 2];
            let case = Case::new(
                format!("layer norm {rows}x{n} bias {bias}"),
                given,
                &wrt[..2 + usize::from(bias)],
                &build,
                &reference,
            );
            check(&device, &case);
        }
    }
}

#[test]
fn stored_weights_of_norms_are_read_in_their_dtype() {
    let device = device();
    let n = 33usize;
    for dtype in WEIGHTS {
        let (w, kept) = stored("w", dtype, &[n as u64], &random(5, n, 1.0));
        let (b, bias) = stored("b", dtype, &[n as u64], &random(6, n, 1.0));
        let catalog = engine::catalog(&[("norm", engine::file(&[w, b]))]);
        let segment = catalog.segment("norm").unwrap();
        let build = |g: &mut Graph, x: &[Tensor]| {
            let (w, b) = (g.weight(&segment, "w")?, g.weight(&segment, "b")?);
            let y = rms_norm(g, x[0], w, EPS, 1.0)?;
            layer_norm(g, y, w, Some(b), EPS)
        };
        let reference = |x: &[Vec<f64>]| {
            let y = textbook::rms_norm(&x[0], &kept, f64::from(EPS), 1.0);
            textbook::layer_norm(&y, &kept, Some(&bias), f64::from(EPS))
        };
        let case =
            Case::new(format!("norms of {dtype:?}"), vec![Given::random(1, &[5, 33], 1.0)], &[0], &build, &reference);
        check(&device, &Case { catalog: Some(&catalog), tolerance: CHAIN, ..case });
    }
}
