//! Twin of `reduce_small.wgsl`.

use super::reduce::{better, finish};
use super::{Real, strided};
use crate::reduce_op::{MEAN, SUM};
use crate::reduce_small::Params;

/// One output by one accumulator, ascending.
pub fn reduce_small<T: Real>(p: &Params, op: u32, a: &[T], out: &mut [T]) {
    for (output, slot) in out.iter_mut().enumerate().take(p.outputs as usize) {
        let base = p.a_off as usize + strided(output, p.kept_rank, &p.kept_shape, &p.kept_stride);
        let load = |i: usize| a[base + strided(i, p.red_rank, &p.red_shape, &p.red_stride)];
        let elements = (0..p.count as usize).map(|i| (load(i), i));
        let folded = if op == SUM || op == MEAN {
            elements.fold((T::zero(), 0), |sum, x| (sum.0 + x.0, 0))
        } else {
            elements.reduce(better).unwrap_or_default()
        };
        *slot = finish(op, p.scale, folded);
    }
}
