//! Twin of `layer_norm.wgsl`.

use super::Real;
use super::rms_norm::inverse_root;
use super::row::tree_sum;
use crate::layer_norm::Params;

/// `y = (x - mean) * r * w + bias` of each row.
pub fn layer_norm<T: Real>(p: &Params, x: &[T], w: &[T], bias: &[T], y: &mut [T]) {
    let n = p.n as usize;
    for row in 0..p.rows as usize {
        let x = &x[row * n..][..n];
        let mean = mean(x, p.inv_n);
        let r = inverse_root(x, mean, p.inv_n, p.eps);
        for i in 0..n {
            let scaled = (x[i] - mean) * r;
            let weight = w[p.w_off as usize + i];
            y[row * n + i] =
                if p.has_bias == 1 { scaled.fma(weight, bias[p.bias_off as usize + i]) } else { scaled * weight };
        }
    }
}

/// Mean of a row.
pub(crate) fn mean<T: Real>(x: &[T], inv_n: f32) -> T {
    tree_sum(x.len(), |i, acc: T| acc + x[i]) * T::of(f64::from(inv_n))
}
