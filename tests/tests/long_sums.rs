//! Sums longer than a software driver's loops: right, or refused in words.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ebbtide::compile::{Budget, Options};
use ebbtide::graph::Fold;
use ebbtide::{Cancel, Graph};
use ebbtide_tests::engine::{catalog, device, session, wait};

#[test]
fn a_sum_and_a_mean_over_millions_of_elements_miss_none() {
    let device = device();
    let shape = [3300u64, 2000];
    let mut g = Graph::new();
    let x = g.input("x", shape).unwrap();
    let (sum, mean) = (g.sum(x).unwrap(), g.mean(x).unwrap());
    let largest = g.reduce(Fold::Max, x, &[0, 1]).unwrap();
    let program = g.outputs(&[("sum", sum), ("mean", mean), ("largest", largest)]).unwrap();
    let mut session = session(&device, &catalog(&[]), &program, Budget::All, Options::default());
    let mut x = vec![1.0f32; 6_600_000];
    x[6_599_999] = 2.0;
    let input: [(&str, &[u8]); 1] = [("x", bytemuck::cast_slice(&x))];
    let out = wait(session.run(0, &input, &Cancel::new(), &mut ebbtide::event::NoEvents)).unwrap();
    assert_eq!(out.f32("sum").unwrap(), [6_600_001.0]);
    assert_eq!(out.f32("largest").unwrap(), [2.0]);
    assert!((out.f32("mean").unwrap()[0] - 1.0).abs() < 1e-6);
}
