//! Twins of `fill.wgsl` and `fill_from.wgsl`.

use super::Real;
use crate::{fill as fill_host, fill_from as fill_from_host};

/// Every word of `out` becomes the pattern.
pub fn fill(p: &fill_host::Params, out: &mut [u32]) {
    out[..p.words as usize].fill(p.value);
}

/// `out[i] = scale * s[s_off]`.
pub fn fill_from<T: Real>(p: &fill_from_host::Params, s: &[T], out: &mut [T]) {
    out[..p.n as usize].fill(T::of(f64::from(p.scale)) * s[p.s_off as usize]);
}
