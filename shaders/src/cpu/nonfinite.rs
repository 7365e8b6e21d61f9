//! Twin of `nonfinite.wgsl`.

use crate::nonfinite::Params;

/// Sets the bits of the word where an element is infinite or NaN.
pub fn nonfinite(p: &Params, x: &[f32], control: &mut [u32]) {
    if x[p.x_off as usize..][..p.n as usize].iter().any(|x| !x.is_finite()) {
        control[p.word as usize] |= p.bits;
    }
}
