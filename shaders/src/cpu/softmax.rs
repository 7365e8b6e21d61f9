//! Twin of `softmax.wgsl`.

use super::Real;
use super::row::{largest, tree_sum};
use crate::softmax::Params;

/// `y = softmax(x)` of each row.
pub fn softmax<T: Real>(p: &Params, x: &[T], y: &mut [T]) {
    let n = p.n as usize;
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).take(p.rows as usize) {
        let top = largest(x);
        let sum = tree_sum(n, |i, acc: T| acc + (x[i] - top).exp());
        for (y, x) in y.iter_mut().zip(x) {
            *y = (*x - top).exp() / sum;
        }
    }
}
