//! Twin of `fill.wgsl`.

use crate::fill::Params;

/// Every word of `out` becomes the pattern.
pub fn fill(p: &Params, out: &mut [u32]) {
    out[..p.words as usize].fill(p.value);
}
