//! Random chains of views, writes and sums: elements are where the textbook has them, and gradients find their way back.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::graph::{Fold, Region, Shape, View};
use ebbtide::{Graph, Tensor};
use ebbtide_tests::engine::{device, mix};
use ops::{CHAIN, Case, Given, check};

/// A tensor with all its elements, row-major.
#[derive(Clone)]
struct Dense {
    dims: Vec<u64>,
    x: Vec<f64>,
}

impl Dense {
    fn new(dims: Vec<u64>, at: impl Fn(&[u64]) -> f64) -> Dense {
        let n: u64 = dims.iter().product();
        let mut x = Vec::with_capacity(n as usize);
        for i in 0..n {
            let (mut rest, mut index) = (i, vec![0; dims.len()]);
            for d in (0..dims.len()).rev() {
                (index[d], rest) = (rest % dims[d], rest / dims[d]);
            }
            x.push(at(&index));
        }
        Dense { dims, x }
    }

    fn at(&self, index: &[u64]) -> f64 {
        self.x[index.iter().zip(&self.dims).fold(0, |at, (i, n)| at * n + i) as usize]
    }
}

/// One step of a chain.
#[derive(Clone, Debug)]
enum Step {
    Permute(Vec<usize>),
    Slice(usize, u64, u64),
    Reshape(Vec<u64>),
    Broadcast(Vec<u64>),
    ConcatSelf(usize),
    Sum(usize),
    /// The tensor's own first elements along each dimension, added once more at an offset.
    AddInto(Vec<u64>),
    Square,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 20) % n
    }
}

/// A step that is possible for a tensor of these extents.
fn pick(r: &mut Random, dims: &[u64]) -> Step {
    let rank = dims.len();
    loop {
        match r.below(8) {
            0 if rank > 1 => {
                let mut order: Vec<usize> = (0..rank).collect();
                for i in (1..rank).rev() {
                    order.swap(i, r.below(i as u64 + 1) as usize);
                }
                return Step::Permute(order);
            }
            1 if rank > 0 => {
                let d = r.below(rank as u64) as usize;
                let from = r.below(dims[d]);
                return Step::Slice(d, from, from + 1 + r.below(dims[d] - from));
            }
            2 => {
                // Merge two neighbours, split an even one, or put an extent of 1 somewhere.
                let mut to = dims.to_vec();
                match r.below(3) {
                    0 if rank > 1 => {
                        let d = r.below(rank as u64 - 1) as usize;
                        to[d] *= to.remove(d + 1);
                    }
                    1 if rank > 0 && rank < 6 => {
                        let d = r.below(rank as u64) as usize;
                        if to[d].is_multiple_of(2) {
                            to[d] /= 2;
                            to.insert(d, 2);
                        }
                    }
                    _ if rank < 6 => to.insert(r.below(rank as u64 + 1) as usize, 1),
                    _ => {}
                }
                return Step::Reshape(to);
            }
            3 if dims.iter().product::<u64>() < 300 => {
                let mut to: Vec<u64> = dims.iter().map(|n| if *n == 1 { 1 + r.below(3) } else { *n }).collect();
                if rank < 6 && r.below(2) == 0 {
                    to.insert(0, 2);
                }
                return Step::Broadcast(to);
            }
            4 if rank > 0 && dims.iter().product::<u64>() < 300 => {
                return Step::ConcatSelf(r.below(rank as u64) as usize);
            }
            5 if rank > 1 => return Step::Sum(r.below(rank as u64) as usize),
            6 if rank > 0 => return Step::AddInto(dims.iter().map(|n| r.below(*n)).collect()),
            7 => return Step::Square,
            _ => {}
        }
    }
}

fn extents(dims: &[u64], step: &Step) -> Vec<u64> {
    let mut to = dims.to_vec();
    match step {
        Step::Permute(order) => return order.iter().map(|d| dims[*d]).collect(),
        Step::Slice(d, from, end) => to[*d] = end - from,
        Step::Reshape(dims) | Step::Broadcast(dims) => return dims.clone(),
        Step::ConcatSelf(d) => to[*d] *= 2,
        Step::Sum(d) => drop(to.remove(*d)),
        Step::AddInto(_) | Step::Square => {}
    }
    to
}

fn textbook(x: &Dense, step: &Step) -> Dense {
    let dims = extents(&x.dims, step);
    match step {
        Step::Permute(order) => Dense::new(dims, |i| {
            let mut from = vec![0; i.len()];
            order.iter().zip(i).for_each(|(d, i)| from[*d] = *i);
            x.at(&from)
        }),
        Step::Slice(d, from, _) => Dense::new(dims, |i| {
            let mut i = i.to_vec();
            i[*d] += from;
            x.at(&i)
        }),
        Step::Reshape(_) => Dense { dims, x: x.x.clone() },
        Step::Broadcast(_) => Dense::new(dims, |i| {
            let tail = &i[i.len() - x.dims.len()..];
            let index: Vec<u64> = tail.iter().zip(&x.dims).map(|(i, n)| if *n == 1 { 0 } else { *i }).collect();
            x.at(&index)
        }),
        Step::ConcatSelf(d) => Dense::new(dims, |i| {
            let mut i = i.to_vec();
            i[*d] %= x.dims[*d];
            x.at(&i)
        }),
        Step::Sum(d) => Dense::new(dims, |i| {
            let mut full = i.to_vec();
            full.insert(*d, 0);
            (0..x.dims[*d])
                .map(|k| {
                    full[*d] = k;
                    x.at(&full)
                })
                .sum()
        }),
        Step::AddInto(start) => Dense::new(dims, |i| {
            let inside = i.iter().zip(start).all(|(i, s)| i >= s);
            let first: Vec<u64> = i.iter().zip(start).map(|(i, s)| i.saturating_sub(*s)).collect();
            x.at(i) + if inside { x.at(&first) } else { 0.0 }
        }),
        Step::Square => Dense { dims, x: x.x.iter().map(|v| v * v).collect() },
    }
}

fn build(g: &mut Graph, x: Tensor, step: &Step) -> ebbtide::Result<Tensor> {
    let dims = g.shape(x)?.dims().to_vec();
    match step {
        Step::Permute(order) => g.permute(x, order),
        Step::Slice(d, from, end) => g.slice(x, *d, *from, *end),
        Step::Reshape(to) => g.reshape(x, to),
        Step::Broadcast(to) => g.broadcast_to(x, Shape::new(to)?),
        Step::ConcatSelf(d) => g.concat(&[x, x], *d),
        Step::Sum(d) => g.reduce(Fold::Sum, x, &[*d]),
        Step::AddInto(start) => {
            let mut part = x;
            for (d, (n, s)) in dims.iter().zip(start).enumerate() {
                part = g.slice(part, d, 0, n - s)?;
            }
            let shape = g.shape(part)?;
            let strides = Shape::new(&dims)?.dense_strides();
            let offset = start.iter().zip(strides).map(|(s, n)| s * n).sum();
            g.place(part, x, Region { shape, view: View { offset, strides }, carry: true })
        }
        Step::Square => g.mul(x, x),
    }
}

#[test]
fn random_chains_of_views_and_writes_equal_the_textbook_with_their_gradients() {
    let device = device();
    for seed in 0..120u64 {
        let mut r = Random(seed * 1000 + 17);
        let start: Vec<u64> = (0..1 + r.below(4)).map(|_| 1 + r.below(5)).collect();
        let mut steps = Vec::new();
        let (mut dims, mut squares) = (start.clone(), 0);
        for _ in 0..2 + r.below(6) {
            let step = pick(&mut r, &dims);
            if matches!(step, Step::Square) {
                squares += 1;
                if squares > 2 {
                    continue;
                }
            }
            dims = extents(&dims, &step);
            steps.push(step);
        }
        let build = |g: &mut Graph, x: &[Tensor]| steps.iter().try_fold(x[0], |x, step| build(g, x, step));
        let reference = |x: &[Vec<f64>]| {
            let x = Dense { dims: start.clone(), x: x[0].clone() };
            steps.iter().fold(x, |x, step| textbook(&x, step)).x
        };
        let given = vec![Given::random(seed, &start, 1.0)];
        let case = Case::new(format!("chain {seed} from {start:?}: {steps:?}"), given, &[0], &build, &reference);
        check(&device, &Case { tolerance: CHAIN, ..case });
    }
}
