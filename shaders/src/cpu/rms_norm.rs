//! Twin of `rms_norm.wgsl`.

use super::Real;
use super::row::tree_sum;
use crate::rms_norm::Params;

/// `y = x * r * (w + plus)` of each row.
pub fn rms_norm<T: Real>(p: &Params, x: &[T], w: &[T], y: &mut [T]) {
    let n = p.n as usize;
    for row in 0..p.rows as usize {
        let x = &x[row * n..][..n];
        let r = inverse_root(x, T::zero(), p.inv_n, p.eps);
        for i in 0..n {
            y[row * n + i] = x[i] * r * (w[p.w_off as usize + i] + T::of(f64::from(p.plus)));
        }
    }
}

/// `1 / sqrt(mean((x - mean)^2) + eps)`.
pub(crate) fn inverse_root<T: Real>(x: &[T], mean: T, inv_n: f32, eps: f32) -> T {
    let squares = tree_sum(x.len(), |i, acc: T| (x[i] - mean).fma(x[i] - mean, acc));
    T::one() / squares.fma(T::of(f64::from(inv_n)), T::of(f64::from(eps))).sqrt()
}
