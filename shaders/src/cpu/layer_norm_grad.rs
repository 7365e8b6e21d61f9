//! Twin of `layer_norm_grad.wgsl`.

use super::Real;
use super::layer_norm::mean;
use super::rms_norm::inverse_root;
use super::row::tree_sum;
use crate::layer_norm_grad::Params;

/// `dx = r * (g - mean(g) - xhat * mean(g * xhat))`, `g = dy * w`, of each row.
pub fn layer_norm_grad<T: Real>(p: &Params, x: &[T], w: &[T], dy: &[T], dx: &mut [T]) {
    let n = p.n as usize;
    let inv_n = T::of(f64::from(p.inv_n));
    for row in 0..p.rows as usize {
        let (x, dy) = (&x[row * n..][..n], &dy[row * n..][..n]);
        let mean = mean(x, p.inv_n);
        let r = inverse_root(x, mean, p.inv_n, p.eps);
        let g = |i: usize| dy[i] * w[p.w_off as usize + i];
        let xhat = |i: usize| (x[i] - mean) * r;
        let plain = tree_sum(n, |i, acc: T| acc + g(i)) * inv_n;
        let along = tree_sum(n, |i, acc: T| g(i).fma(xhat(i), acc)) * inv_n;
        for i in 0..n {
            dx[row * n + i] = r * (-xhat(i)).fma(along, g(i) - plain);
        }
    }
}
