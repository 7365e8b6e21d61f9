//! Twin of `sumsq.wgsl`.

use super::Real;
use super::row::tree_sum;
use crate::sumsq::Params;

/// Elements of a block: a constant of the op.
const BLOCK: usize = 1024;

/// Sum of squares of each block of 1,024 elements.
pub fn sumsq<T: Real>(p: &Params, x: &[T], partials: &mut [T]) {
    for (i, block) in x[p.x_off as usize..][..p.n as usize].chunks(BLOCK).enumerate() {
        partials[p.out_off as usize + i] = tree_sum(block.len(), |i, acc: T| block[i].fma(block[i], acc));
    }
}
