//! Twin of `ce_lse.wgsl`.

use super::Real;
use super::row::{largest, tree_sum};
use crate::ce_lse::Params;

/// Vocabulary entries that are reduced at once: a constant of the op.
const CHUNK: usize = 1024;

/// Merges a block of logits into the running (maximum, sum, label's logit) of each row.
pub fn ce_lse<T: Real>(p: &Params, logits: &[T], labels: &[i32], stats: &mut [T]) {
    for row in 0..p.rows as usize {
        let token = row + p.first_row as usize;
        let stats = &mut stats[3 * token..][..3];
        if p.start == 1 {
            stats.copy_from_slice(&[T::of(-1e30), T::zero(), T::zero()]);
        }
        let block = &logits[row * p.stride as usize..][..p.width as usize];
        for chunk in block.chunks(CHUNK) {
            let here = largest(chunk);
            let part = tree_sum(chunk.len(), |i, acc: T| acc + (chunk[i] - here).exp());
            let raised = stats[0].max(here);
            stats[1] = stats[1].fma((stats[0] - raised).exp(), part * (here - raised).exp());
            stats[0] = raised;
        }
        let label = i64::from(labels[token]) - i64::from(p.first);
        if labels[token] >= 0 && (0..i64::from(p.width)).contains(&label) {
            stats[2] = block[label as usize];
        }
    }
}
