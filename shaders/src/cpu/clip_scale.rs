//! Twin of `clip_scale.wgsl`.

use super::Real;
use super::row::tree_sum;
use crate::clip_scale::Params;

/// `(factor, norm)`: what words 1 and 2 of the control words hold.
pub fn clip_scale<T: Real>(p: &Params, partials: &[T]) -> (T, T) {
    let sum = tree_sum(p.count as usize, |i, acc: T| acc + partials[i]);
    let scale = T::of(f64::from(p.scale));
    let limit = T::of(f64::from(p.max_norm));
    let norm = sum.sqrt() * scale;
    let factor = if limit > T::zero() && norm > limit { limit / norm } else { T::one() };
    (factor * scale, norm)
}
