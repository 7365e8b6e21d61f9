//! Twin of `rms_norm_grad.wgsl`.

use super::Real;
use super::rms_norm::inverse_root;
use super::row::tree_sum;
use crate::rms_norm_grad::Params;

/// `dx = r * (g - xhat * mean(g * xhat))`, `g = dy * (w + plus)`, of each row.
pub fn rms_norm_grad<T: Real>(p: &Params, x: &[T], w: &[T], dy: &[T], dx: &mut [T]) {
    let n = p.n as usize;
    for row in 0..p.rows as usize {
        let (x, dy) = (&x[row * n..][..n], &dy[row * n..][..n]);
        let r = inverse_root(x, T::zero(), p.inv_n, p.eps);
        let g = |i: usize| dy[i] * (w[p.w_off as usize + i] + T::of(f64::from(p.plus)));
        let mean = tree_sum(n, |i, acc: T| g(i).fma(x[i] * r, acc)) * T::of(f64::from(p.inv_n));
        for i in 0..n {
            dx[row * n + i] = r * (-(x[i] * r)).fma(mean, g(i));
        }
    }
}
