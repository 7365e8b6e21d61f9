//! Twin of `softmax_grad.wgsl`.

use super::Real;
use super::row::tree_sum;
use crate::softmax_grad::Params;

/// `dx = y * (dy - sum(dy * y))` of each row.
pub fn softmax_grad<T: Real>(p: &Params, y: &[T], dy: &[T], dx: &mut [T]) {
    let n = p.n as usize;
    for row in 0..p.rows as usize {
        let (y, dy) = (&y[row * n..][..n], &dy[row * n..][..n]);
        let sum = tree_sum(n, |i, acc: T| dy[i].fma(y[i], acc));
        for i in 0..n {
            dx[row * n + i] = y[i] * (dy[i] - sum);
        }
    }
}
