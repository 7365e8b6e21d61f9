//! Twin of `fill_from.wgsl`.

use super::Real;
use crate::fill_from::Params;

/// `out[i] = scale * s[s_off]`.
pub fn fill_from<T: Real>(p: &Params, s: &[T], out: &mut [T]) {
    out[..p.n as usize].fill(T::of(f64::from(p.scale)) * s[p.s_off as usize]);
}
