//! Twin of `norm_stats.wgsl`.

use super::Real;
use super::layer_norm::mean;
use super::rms_norm::inverse_root;
use crate::norm_stats::Params;
use crate::norm_stats_op::LAYER;

/// `(mean, r)` of each row; the mean is 0 for an rms norm.
pub fn norm_stats<T: Real>(p: &Params, op: u32, x: &[T], stats: &mut [T]) {
    let n = p.n as usize;
    for row in 0..p.rows as usize {
        let x = &x[row * n..][..n];
        let mean = if op == LAYER { mean(x, p.inv_n) } else { T::zero() };
        stats[2 * row] = mean;
        stats[2 * row + 1] = inverse_root(x, mean, p.inv_n, p.eps);
    }
}
