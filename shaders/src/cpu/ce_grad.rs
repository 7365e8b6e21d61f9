//! Twin of `ce_grad.wgsl`.

use super::Real;
use crate::ce_grad::Params;

/// `dlogits = (softmax - onehot) * scale * dloss` of a block of the vocabulary; 0 where the label is negative.
pub fn ce_grad<T: Real>(p: &Params, logits: &[T], stats: &[T], labels: &[i32], dloss: &[T], dlogits: &mut [T]) {
    for row in 0..p.rows as usize {
        let token = row + p.first_row as usize;
        let factor = T::of(f64::from(p.scale)) * dloss[token];
        for col in 0..p.width as usize {
            let at = row * p.stride as usize + col;
            let share = (logits[at] - stats[3 * token]).exp() / stats[3 * token + 1];
            let hit = i64::from(labels[token]) == i64::from(p.first) + col as i64;
            let target = if hit { T::one() } else { T::zero() };
            dlogits[at] = if labels[token] < 0 { T::zero() } else { (share - target) * factor };
        }
    }
}
