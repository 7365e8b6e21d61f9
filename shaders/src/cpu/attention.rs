//! Twin of `attention.wgsl`.

use super::Real;
use crate::attention::Params;

/// Keys of a tile: a constant of the op.
const TILE: u32 = 32;

/// `o = softmax(scale * q k^T, masked) v` and `lse`, online over tiles of 32 keys.
pub fn attention<T: Real>(p: &Params, q: &[T], k: &[T], v: &[T], rows: &[u32], o: &mut [T], lse: &mut [T]) {
    let d = p.d as usize;
    for row in 0..p.b {
        let (start, keys) = (rows[2 * row as usize], rows[2 * row as usize + 1].min(p.s));
        for head in 0..p.h {
            let kv_head = head / (p.h / p.hk);
            for query in 0..p.t {
                let q = &q[(p.q_off + row * p.q_b + query * p.q_t + head * p.q_h) as usize..][..d];
                let k_at = |j: u32| (p.k_off + row * p.k_b + j * p.k_t + kv_head * p.k_h) as usize;
                let v_at = |j: u32| (p.v_off + row * p.v_b + j * p.v_t + kv_head * p.v_h) as usize;
                let mut top = T::of(-1e30);
                let mut sum = T::zero();
                let mut out = vec![T::zero(); d];
                for tile in 0..keys.div_ceil(TILE) {
                    let range = tile * TILE..keys.min(tile * TILE + TILE);
                    let seen = |j: u32| visible(p.causal, p.window, start + query, j, keys);
                    let scores: Vec<T> = range
                        .clone()
                        .map(|j| {
                            if seen(j) { dot(q, &k[k_at(j)..][..d]) * T::of(f64::from(p.scale)) } else { T::of(-1e30) }
                        })
                        .collect();
                    let raised = scores.iter().fold(top, |m, s| m.max(*s));
                    let shrink = (top - raised).exp();
                    top = raised;
                    let weights: Vec<T> = range
                        .clone()
                        .zip(&scores)
                        .map(|(j, s)| if seen(j) { (*s - raised).exp() } else { T::zero() })
                        .collect();
                    sum = weights[1..].iter().fold(sum.fma(shrink, weights[0]), |sum, w| sum + *w);
                    for (feature, out) in out.iter_mut().enumerate() {
                        *out = range
                            .clone()
                            .zip(&weights)
                            .fold(*out * shrink, |acc, (j, w)| w.fma(v[v_at(j) + feature], acc));
                    }
                }
                let empty = sum == T::zero();
                let o = &mut o[(p.o_off + row * p.o_b + query * p.o_t + head * p.o_h) as usize..][..d];
                for (o, out) in o.iter_mut().zip(&out) {
                    *o = if empty { T::zero() } else { *out / sum };
                }
                lse[((row * p.h + head) * p.t + query) as usize] = if empty { T::zero() } else { top + sum.ln() };
            }
        }
    }
}

/// Whether the query at absolute position `position` may look at key `j`.
pub(crate) fn visible(causal: u32, window: u32, position: u32, j: u32, keys: u32) -> bool {
    j < keys && (causal == 0 || j <= position) && (window == 0 || j + window > position)
}

/// One accumulator over ascending features.
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::zero(), |acc, (a, b)| a.fma(*b, acc))
}
