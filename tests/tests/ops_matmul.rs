//! Products in all their forms: batches, broadcast, transposed and sliced operands, factors, biases, nothing to sum.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::weights::DType;
use ebbtide::{Graph, Tensor};
use ebbtide_tests::engine::{self, device, random};
use ops::{Case, Given, WEIGHTS, check, stored};

/// a `[.., m, k]` · b `[.., k, n]`, leading dimensions broadcast.
fn product(a: &[f64], da: &[u64], b: &[f64], db: &[u64], to: &[u64]) -> Vec<f64> {
    let rank = to.len();
    let (m, n, k) = (to[rank - 2], to[rank - 1], da[da.len() - 1]);
    let batch = |i: u64, dims: &[u64]| {
        let lead = &dims[..dims.len() - 2];
        let (mut rest, mut at, mut step) = (i, 0, 1);
        for d in (0..rank - 2).rev() {
            let index = rest % to[d];
            rest /= to[d];
            if d + lead.len() >= rank - 2 {
                let extent = lead[d + lead.len() + 2 - rank];
                at += if extent == 1 { 0 } else { index * step };
                step *= extent;
            }
        }
        at
    };
    let mut y = Vec::new();
    for i in 0..to[..rank - 2].iter().product() {
        let (a, b) = (&a[(batch(i, da) * m * k) as usize..], &b[(batch(i, db) * k * n) as usize..]);
        for row in 0..m {
            for col in 0..n {
                y.push((0..k).map(|j| a[(row * k + j) as usize] * b[(j * n + col) as usize]).sum());
            }
        }
    }
    y
}

/// Rows and columns of the last two dimensions exchanged.
fn turned(x: &[f64], dims: &[u64]) -> Vec<f64> {
    let (m, n) = (dims[dims.len() - 2] as usize, dims[dims.len() - 1] as usize);
    x.chunks((m * n).max(1)).flat_map(|x| (0..n * m).map(|i| x[i % m * n + i / m]).collect::<Vec<_>>()).collect()
}

fn swapped(dims: &[u64]) -> Vec<u64> {
    let mut dims = dims.to_vec();
    let rank = dims.len();
    dims.swap(rank - 2, rank - 1);
    dims
}

#[test]
fn products_of_every_rank_and_transposition_equal_the_textbook_with_their_gradients() {
    let device = device();
    let cases: [(&[u64], &[u64], &[u64]); 11] = [
        (&[1, 1], &[1, 1], &[1, 1]),
        (&[3, 31], &[31, 33], &[3, 33]),
        (&[65, 127], &[127, 3], &[65, 3]),
        (&[2, 5, 33], &[33, 7], &[2, 5, 7]),
        (&[2, 5, 9], &[2, 9, 7], &[2, 5, 7]),
        (&[5, 9], &[3, 9, 7], &[3, 5, 7]),
        (&[2, 3, 5, 4], &[2, 3, 4, 6], &[2, 3, 5, 6]),
        (&[2, 1, 5, 4], &[1, 3, 4, 6], &[2, 3, 5, 6]),
        (&[2, 3, 2, 5, 4], &[4, 6], &[2, 3, 2, 5, 6]),
        (&[2, 1, 2, 3, 2, 5], &[5, 3], &[2, 1, 2, 3, 2, 3]),
        (&[3, 0], &[0, 2], &[3, 2]),
    ];
    for (da, db, to) in cases {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let stored = |dims: &[u64], t: bool| if t { swapped(dims) } else { dims.to_vec() };
            let given = vec![Given::random(1, &stored(da, ta), 1.0), Given::random(2, &stored(db, tb), 1.0)];
            let build = |g: &mut Graph, x: &[Tensor]| {
                let a = if ta { g.transpose(x[0])? } else { x[0] };
                let b = if tb { g.transpose(x[1])? } else { x[1] };
                g.matmul(a, b, None)
            };
            let reference = |x: &[Vec<f64>]| {
                let a = if ta { turned(&x[0], &swapped(da)) } else { x[0].clone() };
                let b = if tb { turned(&x[1], &swapped(db)) } else { x[1].clone() };
                product(&a, da, &b, db, to)
            };
            let name = format!("{da:?} · {db:?}, transposed {ta} {tb}");
            check(&device, &Case::new(name, given, &[0, 1], &build, &reference));
        }
    }
}

#[test]
fn slices_factors_and_biases_are_part_of_a_product() {
    let device = device();
    let given = vec![Given::random(1, &[7, 40], 1.0), Given::random(2, &[37, 9], 1.0), Given::random(3, &[5], 1.0)];
    let build = |g: &mut Graph, x: &[Tensor]| {
        let a = g.slice(x[0], 1, 2, 35)?;
        let a = g.slice(a, 0, 1, 6)?;
        let b = g.slice(x[1], 0, 3, 36)?;
        let b = g.slice(b, 1, 4, 9)?;
        g.scaled_matmul(a, b, Some(x[2]), -0.75)
    };
    let reference = |x: &[Vec<f64>]| {
        let at = |row: usize, col: usize| {
            let sum: f64 = (0..33).map(|k| x[0][(row + 1) * 40 + k + 2] * x[1][(k + 3) * 9 + col + 4]).sum();
            -0.75 * sum + x[2][col]
        };
        (0..25).map(|i| at(i / 5, i % 5)).collect()
    };
    check(&device, &Case::new("slices, factor, bias", given, &[0, 1, 2], &build, &reference));
}

#[test]
fn either_operand_may_be_narrow_and_a_cast_of_a_view_too() {
    let device = device();
    for dtype in WEIGHTS {
        let (w, kept) = stored("w", dtype, &[31, 33], &random(5, 31 * 33, 0.5));
        let catalog = engine::catalog(&[("w", engine::file(&[w]))]);
        let segment = catalog.segment("w").unwrap();
        // w · x, then the result times a narrowed part of w turned round.
        let build = |g: &mut Graph, x: &[Tensor]| {
            let w = g.weight(&segment, "w")?;
            let y = g.matmul(w, x[0], None)?;
            let part = g.slice(w, 0, 2, 7)?;
            let part = g.transpose(part)?;
            let part = g.cast(part, DType::BF16)?;
            let part = g.slice(part, 0, 1, 4)?;
            g.matmul(y, part, None)
        };
        let reference = |x: &[Vec<f64>]| {
            let y = product(&kept, &[31, 33], &x[0], &[33, 3], &[31, 3]);
            let narrow = |v: f64| half::bf16::from_f64(v).to_f64();
            let part: Vec<f64> = (0..15).map(|i| narrow(kept[(2 + i % 5) * 33 + 1 + i / 5])).collect();
            product(&y, &[31, 3], &part, &[3, 5], &[31, 5])
        };
        let case = Case::new(
            format!("{dtype:?} on the left"),
            vec![Given::random(1, &[33, 3], 1.0)],
            &[0],
            &build,
            &reference,
        );
        check(&device, &Case { catalog: Some(&catalog), tolerance: ops::CHAIN, ..case });
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_in_words() {
    let mut g = Graph::new();
    let a = g.input("a", [3, 4]).unwrap();
    let b = g.input("b", [5, 6]).unwrap();
    let error = g.matmul(a, b, None).unwrap_err().to_string();
    assert!(error.contains("inner extents 4 and 5"), "{error}");
    let v = g.input("v", [4]).unwrap();
    assert!(g.matmul(a, v, None).unwrap_err().to_string().contains("two dimensions"));
    let c = g.input("c", [4, 2]).unwrap();
    assert!(g.matmul(a, c, Some(v)).unwrap_err().to_string().contains("bias"));
}
