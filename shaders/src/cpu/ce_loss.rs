//! Twin of `ce_loss.wgsl`.

use super::Real;
use crate::ce_loss::Params;

/// The loss of each token; 0 where its label is negative.
pub fn ce_loss<T: Real>(p: &Params, stats: &[T], labels: &[i32], loss: &mut [T]) {
    for row in 0..p.rows as usize {
        let [top, sum, picked] = [0, 1, 2].map(|i| stats[3 * row + i]);
        loss[row] = if labels[row] >= 0 { (top - picked) + sum.ln() } else { T::zero() };
    }
}
