//! The geometry of the row kernels: 256 partials, lane `t` over elements `t`, `t + 256`, ..., then a binary tree.

use super::Real;

const LANES: usize = 256;

/// Sum over `0..n` of what `step` adds to a partial.
pub(crate) fn tree_sum<T: Real>(n: usize, mut step: impl FnMut(usize, T) -> T) -> T {
    let mut lanes = [T::zero(); LANES];
    for (lane, partial) in lanes.iter_mut().enumerate() {
        *partial = (lane..n).step_by(LANES).fold(T::zero(), |acc, i| step(i, acc));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest element: no order changes it.
pub(crate) fn largest<T: Real>(x: &[T]) -> T {
    x.iter().copied().reduce(T::max).unwrap_or_default()
}
