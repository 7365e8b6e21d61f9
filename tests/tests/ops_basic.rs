//! Elementwise functions, folds, views, tables and masks, each with its gradient.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::graph::{Binary, CustomGrad, Fold, Region, Shape, Unary, View};
use ebbtide::nn::{Dropout, dropout, embedding, embedding_rows};
use ebbtide::weights::DType;
use ebbtide::{Graph, Tensor};
use ebbtide_shaders::cpu;
use ebbtide_tests::engine::{self, device, random, same_bits};
use ebbtide_tests::kernel::{BRAIN, EXACT, HALF, STRICT, TRIGONOMETRIC, Tolerance, near};
use ops::{CHAIN, Case, Given, WEIGHTS, check, inputs, no_weights, run, stored};

/// Shapes of every rank, with extents on both sides of a wave.
const SHAPES: [&[u64]; 9] =
    [&[1], &[3], &[127], &[31, 33], &[65, 3, 2], &[2, 3, 1, 5], &[1, 2, 3, 2, 3], &[2, 1, 3, 1, 2, 5], &[0, 4]];

fn positive(seed: u64, shape: &[u64]) -> Given {
    let n = shape.iter().product::<u64>() as usize;
    Given::F32(shape.to_vec(), random(seed, n, 1.0).iter().map(|x| 1.3 + x).collect())
}

#[test]
fn functions_of_one_operand_have_their_derivatives() {
    let device = device();
    let gelu_erf = |x: f64| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()));
    let gelu_tanh =
        |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh());
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    type Row<'a> = (Unary, &'a dyn Fn(f64) -> f64, Tolerance);
    let table: [Row<'_>; 16] = [
        (Unary::Copy, &|x| x, EXACT),
        (Unary::Neg, &|x| -x, EXACT),
        (Unary::Abs, &f64::abs, EXACT),
        (Unary::Exp, &f64::exp, STRICT),
        (Unary::Log, &f64::ln, CHAIN),
        (Unary::Sqrt, &f64::sqrt, STRICT),
        (Unary::Rsqrt, &|x| 1.0 / x.sqrt(), STRICT),
        (Unary::Recip, &|x| 1.0 / x, STRICT),
        (Unary::Tanh, &f64::tanh, CHAIN),
        (Unary::Sigmoid, &sigmoid, STRICT),
        (Unary::Relu, &|x| x.max(0.0), EXACT),
        (Unary::Silu, &|x| x * sigmoid(x), STRICT),
        (Unary::GeluErf, &gelu_erf, CHAIN),
        (Unary::GeluTanh, &gelu_tanh, CHAIN),
        (Unary::Sin, &f64::sin, TRIGONOMETRIC),
        (Unary::Cos, &f64::cos, TRIGONOMETRIC),
    ];
    for (i, (f, of, tolerance)) in table.into_iter().enumerate() {
        let domain = matches!(f, Unary::Log | Unary::Sqrt | Unary::Rsqrt | Unary::Recip);
        // Two shapes a function: every shape is met, and every function off the edge of a wave.
        for shape in [SHAPES[i % SHAPES.len()], SHAPES[(i + 4) % SHAPES.len()]] {
            let given = if domain { positive(i as u64, shape) } else { Given::random(i as u64, shape, 2.0) };
            let build = |g: &mut Graph, x: &[Tensor]| g.unary(f, x[0]);
            let reference = |x: &[Vec<f64>]| x[0].iter().map(|v| of(*v)).collect();
            let case = Case::new(format!("{f:?} of {shape:?}"), vec![given], &[0], &build, &reference);
            let slopes = if tolerance.of_largest == TRIGONOMETRIC.of_largest { TRIGONOMETRIC } else { CHAIN };
            check(&device, &Case { tolerance, slopes, ..case });
        }
    }
}

/// The error function by its series, which converges everywhere (Abramowitz and Stegun 7.1.6).
fn erf(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// Elements of `x` of shape `from`, repeated to `to`.
fn broadcast(x: &[f64], from: &[u64], to: &[u64]) -> Vec<f64> {
    let n = to.iter().product::<u64>();
    let shift = to.len() - from.len();
    (0..n)
        .map(|i| {
            let (mut rest, mut at, mut step) = (i, 0, 1);
            for d in (0..to.len()).rev() {
                let index = rest % to[d];
                rest /= to[d];
                if d >= shift {
                    at += if from[d - shift] == 1 { 0 } else { index * step };
                    step *= from[d - shift];
                }
            }
            x[at as usize]
        })
        .collect()
}

#[test]
fn functions_of_two_operands_broadcast_and_have_both_derivatives() {
    let device = device();
    let shapes: [(&[u64], &[u64], &[u64]); 6] = [
        (&[3], &[3], &[3]),
        (&[31, 33], &[33], &[31, 33]),
        (&[65, 1], &[1, 3], &[65, 3]),
        (&[2, 1, 3, 1, 2, 1], &[3, 3, 1, 2, 5], &[2, 3, 3, 1, 2, 5]),
        (&[1], &[127], &[127]),
        (&[2, 3, 4], &[1, 3, 1], &[2, 3, 4]),
    ];
    type Row<'a> = (Binary, &'a dyn Fn(f64, f64) -> f64);
    let table: [Row<'_>; 10] = [
        (Binary::Add, &|a, b| a + b),
        (Binary::Sub, &|a, b| a - b),
        (Binary::Mul, &|a, b| a * b),
        (Binary::Div, &|a, b| a / b),
        (Binary::Min, &f64::min),
        (Binary::Max, &f64::max),
        (Binary::Pow, &f64::powf),
        (Binary::Lt, &|a, b| f64::from(u8::from(a < b))),
        (Binary::Le, &|a, b| f64::from(u8::from(a <= b))),
        (Binary::Eq, &|a, b| f64::from(u8::from(a == b))),
    ];
    for (i, (f, of)) in table.into_iter().enumerate() {
        for (a, b, to) in [shapes[i % 6], shapes[(i + 3) % 6]] {
            let build = |g: &mut Graph, x: &[Tensor]| g.binary(f, x[0], x[1]);
            let reference = |x: &[Vec<f64>]| {
                broadcast(&x[0], a, to).iter().zip(broadcast(&x[1], b, to)).map(|(p, q)| of(*p, q)).collect()
            };
            let given = vec![positive(2 * i as u64, a), positive(2 * i as u64 + 1, b)];
            let case = Case::new(format!("{f:?} of {a:?} and {b:?}"), given, &[0, 1], &build, &reference);
            check(&device, &Case { tolerance: CHAIN, ..case });
        }
    }
}

#[test]
fn a_choice_passes_the_gradient_to_what_was_chosen() {
    let device = device();
    let given = vec![Given::random(1, &[5, 1], 1.0), Given::random(2, &[5, 33], 1.0), Given::random(3, &[33], 1.0)];
    // The condition depends on an operand whose gradient is asked for, through what is chosen alone.
    let build = |g: &mut Graph, x: &[Tensor]| {
        let zero = g.fill(Shape::scalar(), 0.0);
        let low = g.binary(Binary::Lt, x[0], zero)?;
        let other = g.mul(x[2], x[0])?;
        g.select(low, x[1], other)
    };
    let reference = |x: &[Vec<f64>]| {
        (0..5 * 33).map(|i| if x[0][i / 33] < 0.0 { x[1][i] } else { x[2][i % 33] * x[0][i / 33] }).collect()
    };
    check(&device, &Case::new("select", given, &[0, 1, 2], &build, &reference));
}

#[test]
fn folds_over_any_dimensions_have_their_derivatives() {
    let device = device();
    let cases: [(&[u64], &[usize]); 8] = [
        (&[1], &[0]),
        (&[31, 33], &[0]),
        (&[31, 33], &[1]),
        (&[3, 65, 2], &[0, 2]),
        (&[127], &[0]),
        (&[2, 3, 1, 5], &[1, 3]),
        (&[2, 1, 3, 2, 2, 5], &[0, 2, 4]),
        (&[5, 300], &[1]),
    ];
    for (shape, dims) in cases {
        for fold in [Fold::Sum, Fold::Mean, Fold::Max] {
            let groups = |x: &[f64]| -> Vec<Vec<f64>> {
                let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
                let mut out = vec![vec![]; kept.iter().map(|d| shape[*d] as usize).product()];
                for (i, v) in x.iter().enumerate() {
                    let (mut rest, mut index) = (i as u64, vec![0; shape.len()]);
                    for d in (0..shape.len()).rev() {
                        (index[d], rest) = (rest % shape[d], rest / shape[d]);
                    }
                    let at = kept.iter().fold(0, |at, d| at * shape[*d] + index[*d]);
                    out[at as usize].push(*v);
                }
                out
            };
            let build = |g: &mut Graph, x: &[Tensor]| g.reduce(fold, x[0], dims);
            let reference = |x: &[Vec<f64>]| {
                let of = |g: &Vec<f64>| match fold {
                    Fold::Sum => g.iter().sum(),
                    Fold::Mean => g.iter().sum::<f64>() / g.len() as f64,
                    _ => g.iter().fold(f64::MIN, |m, v| m.max(*v)),
                };
                groups(&x[0]).iter().map(of).collect()
            };
            let name = format!("{fold:?} of {shape:?} over {dims:?}");
            check(&device, &Case::new(name, vec![Given::random(7, shape, 1.0)], &[0], &build, &reference));
        }
    }
}

#[test]
fn the_place_of_the_largest_is_an_integer() {
    let device = device();
    let mut x = random(1, 3 * 65, 1.0);
    x[65 + 7] = 5.0;
    x[65 + 9] = 5.0;
    let given = vec![Given::F32(vec![3, 65], x.clone())];
    let mut g = Graph::new();
    let t = inputs(&mut g, &given);
    let y = g.reduce(Fold::Argmax, t[0], &[1]).unwrap();
    assert_eq!(g.dtype(y), DType::I32);
    // Read through a view, it stays one.
    let turned = g.reshape(y, &[3, 1]).and_then(|y| g.broadcast_to(y, Shape::new(&[3, 2])?)).unwrap();
    let program = g.outputs(&[("y", y), ("turned", turned)]).unwrap();
    let out = run(&device, &no_weights(), device.caps(), &[program], &given, &[]).remove(0);
    let want: Vec<i32> =
        x.chunks(65).map(|r| (0..65).rev().fold(64, |best, i| if r[i] >= r[best] { i } else { best }) as i32).collect();
    assert_eq!(want[1], 7, "of equal values the first");
    assert_eq!(bytemuck::cast_slice::<u8, i32>(out.bytes("y").unwrap()), want);
    let twice: Vec<i32> = want.iter().flat_map(|i| [*i, *i]).collect();
    assert_eq!(bytemuck::cast_slice::<u8, i32>(out.bytes("turned").unwrap()), twice);
}

#[test]
fn views_lead_gradients_back_to_where_the_elements_lie() {
    let device = device();
    let given = vec![Given::random(1, &[4, 3, 2, 5], 1.0), Given::random(2, &[4, 2, 2, 5], 1.0)];
    // concat → permute → slice → reshape → broadcast → transpose, times something that is not constant.
    let build = |g: &mut Graph, x: &[Tensor]| {
        let joined = g.concat(&[x[0], x[1], x[0]], 1)?;
        let turned = g.permute(joined, &[2, 0, 3, 1])?;
        let part = g.slice(turned, 3, 1, 7)?;
        let part = g.slice(part, 1, 1, 3)?;
        let flat = g.reshape(part, &[1, 20, 6])?;
        let wide = g.broadcast_to(flat, Shape::new(&[3, 20, 6])?)?;
        let turned = g.transpose(wide)?;
        g.mul(turned, turned)
    };
    let reference = |x: &[Vec<f64>]| {
        let joined = |b: usize, j: usize, c: usize, d: usize| match j {
            0..3 => x[0][((b * 3 + j) * 2 + c) * 5 + d],
            3..5 => x[1][((b * 2 + j - 3) * 2 + c) * 5 + d],
            _ => x[0][((b * 3 + j - 5) * 2 + c) * 5 + d],
        };
        let flat: Vec<f64> = (0..2)
            .flat_map(|c| (1..3).flat_map(move |b| (0..5).flat_map(move |d| (1..7).map(move |j| (b, j, c, d)))))
            .map(|(b, j, c, d)| joined(b, j, c, d))
            .collect();
        let one: Vec<f64> =
            (0..6).flat_map(|j| (0..20).map(move |i| i * 6 + j)).map(|at| flat[at] * flat[at]).collect();
        one.repeat(3)
    };
    check(&device, &Case::new("views", given, &[0, 1], &build, &reference));

    // A part written over another takes its gradient away; one that is added leaves it.
    for carry in [false, true] {
        let given = vec![Given::random(3, &[5, 7], 1.0), Given::random(4, &[2, 3], 1.0)];
        let build = |g: &mut Graph, x: &[Tensor]| {
            let shape = Shape::new(&[2, 3])?;
            let view = View { offset: 7 + 2, strides: Shape::new(&[5, 7])?.dense_strides() };
            let base = g.unary(Unary::Tanh, x[0])?;
            let y = g.place(x[1], base, Region { shape, view, carry })?;
            g.mul(y, y)
        };
        let reference = |x: &[Vec<f64>]| {
            let mut y: Vec<f64> = x[0].iter().map(|v| v.tanh()).collect();
            for (i, part) in x[1].iter().enumerate() {
                let at = (1 + i / 3) * 7 + 2 + i % 3;
                y[at] = part + if carry { y[at] } else { 0.0 };
            }
            y.iter().map(|v| v * v).collect()
        };
        let case = Case::new(format!("place, carry {carry}"), given, &[0, 1], &build, &reference);
        check(&device, &Case { tolerance: CHAIN, ..case });
    }

    let given = vec![Given::random(3, &[5, 7], 1.0)];
    let build = |g: &mut Graph, x: &[Tensor]| {
        let w = g.window(x[0], 8, Shape::new(&[3, 4])?)?;
        g.unary(Unary::Tanh, w)
    };
    let reference = |x: &[Vec<f64>]| x[0][8..20].iter().map(|v| v.tanh()).collect();
    let case = Case::new("window", given, &[0], &build, &reference);
    check(&device, &Case { tolerance: CHAIN, ..case });
}

#[test]
fn a_cast_rounds_to_nearest_even_and_passes_the_gradient() {
    let device = device();
    for (dtype, tolerance) in [(DType::F16, HALF), (DType::BF16, BRAIN)] {
        let x = random(1, 127, 3.0);
        let given = vec![Given::F32(vec![127], x.clone())];
        let mut g = Graph::new();
        let t = inputs(&mut g, &given);
        let narrow = g.cast(t[0], dtype).unwrap();
        let wide = g.cast(narrow, DType::F32).unwrap();
        let loss = g.sum(wide).unwrap();
        let forward = g.clone().outputs(&[("y", wide)]).unwrap();
        let step = g.value_and_grad(loss, &[t[0]]).unwrap();
        let out = run(&device, &no_weights(), device.caps(), &[forward, step], &given, &[]);
        let (_, kept) = stored("x", dtype, &[127], &x);
        near("rounded", &out[0].f32("y").unwrap(), &kept, EXACT);
        let exact: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
        near("near", &out[0].f32("y").unwrap(), &exact, tolerance);
        assert_eq!(out[1].f32("grad.0").unwrap(), vec![1.0; 127]);
    }
}

#[test]
fn a_custom_function_is_differentiated_as_its_author_says() {
    let device = device();
    let given = vec![Given::random(1, &[3, 5], 1.0), Given::random(2, &[5], 1.0)];
    let mut g = Graph::new();
    let x = inputs(&mut g, &given);
    // x · y with a gradient of twice dy for x, and for y only where it is asked for.
    let y = g
        .custom(
            &x,
            |g, x| g.mul(x[0], x[1]),
            |g: &mut Graph, call: CustomGrad<'_>| {
                assert_eq!(call.needed, [true, false]);
                Ok(vec![Some(g.scale(call.grad, 2.0)?), None])
            },
        )
        .unwrap();
    let loss = g.sum(y).unwrap();
    let program = g.value_and_grad(loss, &[x[0]]).unwrap();
    let out = run(&device, &no_weights(), device.caps(), &[program], &given, &[]).remove(0);
    assert_eq!(out.f32("grad.0").unwrap(), [2.0; 15]);
}

#[test]
fn rows_of_a_table_by_ids_and_the_gradient_back_into_it() {
    let device = device();
    for (ids, rows, d) in [(vec![1u64], 1u64, 1u64), (vec![3, 11], 31, 33), (vec![2, 1, 65], 7, 127), (vec![0], 3, 4)] {
        let n = ids.iter().product::<u64>();
        // Some rows several times, some never; one id outside.
        let values: Vec<i32> = (0..n).map(|i| if i == 5 { -1 } else { (i * i % rows.div_ceil(2)) as i32 }).collect();
        let given = vec![Given::random(1, &[rows, d], 1.0), Given::ints(&ids, &values)];
        let build = |g: &mut Graph, x: &[Tensor]| embedding(g, x[0], x[1]);
        let reference = |x: &[Vec<f64>]| {
            let row = |i: &f64| match *i >= 0.0 {
                true => x[0][*i as usize * d as usize..][..d as usize].to_vec(),
                false => vec![0.0; d as usize],
            };
            x[1].iter().flat_map(row).collect()
        };
        check(&device, &Case::new(format!("{ids:?} ids of {rows} rows of {d}"), given, &[0], &build, &reference));
    }
}

#[test]
fn stored_tables_give_the_same_rows_from_the_device_and_from_the_file() {
    let device = device();
    let (rows, d) = (31u64, 33u64);
    for dtype in WEIGHTS {
        let (table, kept) = stored("table", dtype, &[rows, d], &random(1, (rows * d) as usize, 1.0));
        let catalog = engine::catalog(&[("embedding", engine::file(&[table]))]);
        let segment = catalog.segment("embedding").unwrap();
        let values: Vec<i32> = (0..65).map(|i| i * 7 % 31).collect();
        let given = vec![Given::ints(&[5, 13], &values)];
        let reference = |x: &[Vec<f64>]| {
            x[0].iter().flat_map(|i| kept[*i as usize * d as usize..][..d as usize].to_vec()).collect()
        };
        let held = |g: &mut Graph, x: &[Tensor]| {
            let table = g.weight(&segment, "table")?;
            embedding(g, table, x[0])
        };
        let read = |g: &mut Graph, x: &[Tensor]| embedding_rows(g, &segment, "table", x[0]);
        for (name, build) in [("held", &held as &dyn Fn(&mut Graph, &[Tensor]) -> _), ("read", &read)] {
            let case = Case::new(format!("{dtype:?} table, {name}"), given.clone(), &[], build, &reference);
            check(&device, &Case { catalog: Some(&catalog), tolerance: EXACT, ..case });
        }
    }
}

#[test]
fn dropout_masks_by_its_counters_alone_and_the_gradient_alike() {
    let device = device();
    let (b, t, n) = (3u64, 5u64, 33u64);
    let spec = Dropout { probability: 0.3, seed: 7, site: 2, first_position: 0 };
    let masked = |ids: &[i32], step: i32, x: &[f32]| {
        let given = vec![
            Given::F32(vec![ids.len() as u64, t, n], x.to_vec()),
            Given::ints(&[ids.len() as u64], ids),
            Given::ints(&[1], &[step]),
        ];
        let mut g = Graph::new();
        let x = inputs(&mut g, &given);
        let y = dropout(&mut g, x[0], x[1], x[2], spec).unwrap();
        let forward = g.clone().outputs(&[("y", y)]).unwrap();
        let loss = g.sum(y).unwrap();
        let step = g.value_and_grad(loss, &[x[0]]).unwrap();
        run(&device, &no_weights(), device.caps(), &[forward, step], &given, &[])
    };
    let x: Vec<f32> = random(1, (b * t * n) as usize, 1.0).iter().map(|v| v + 1.5).collect();
    let out = masked(&[4, 90, 5], 12, &x);
    let p = ebbtide_shaders::dropout::Params {
        b: 3,
        t: 5,
        n: 33,
        seed: 7,
        site: 2,
        threshold: (f64::from(0.3f32) * 4_294_967_296.0) as u32,
        scale: (1.0 / (1.0 - f64::from(0.3f32))) as f32,
        ..Default::default()
    };
    let mut want = vec![0f32; x.len()];
    cpu::dropout(&p, &x, &[4, 90, 5], &[12], &mut want);
    let y = out[0].f32("y").unwrap();
    assert_eq!(y, want);
    let grad = out[1].f32("grad.0").unwrap();
    assert!(y.iter().zip(&grad).all(|(y, g)| *g == if *y == 0.0 { 0.0 } else { p.scale }));
    // A row in a batch of its own has the same mask; another step has another.
    let row = (t * n) as usize;
    let alone = masked(&[90], 12, &x[row..2 * row]);
    same_bits("a row alone", alone[0].bytes("y").unwrap(), &out[0].bytes("y").unwrap()[row * 4..2 * row * 4]);
    assert_ne!(masked(&[90], 13, &x[row..2 * row])[0].bytes("y").unwrap(), alone[0].bytes("y").unwrap());
    // No dropout changes nothing.
    let mut g = Graph::new();
    let x = g.input("x", [2, 3]).unwrap();
    let (ids, step) = (g.input_i32("ids", [2]).unwrap(), g.input_i32("step", [1]).unwrap());
    assert!(dropout(&mut g, x, ids, step, Dropout { probability: 1.0, ..spec }).is_err());
    assert!(dropout(&mut g, x, step, step, spec).is_err());
}
