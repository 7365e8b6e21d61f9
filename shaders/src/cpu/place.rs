//! Twin of `place.wgsl`.

use super::{Real, strided};
use crate::place::Params;

/// `out[view] = a`, or `+= a`.
pub fn place<T: Real>(p: &Params, a: &[T], out: &mut [T]) {
    for i in 0..p.n as usize {
        let slot = &mut out[p.out_off as usize + strided(i, p.rank, &p.shape, &p.out_stride)];
        let value = a[p.a_off as usize + i];
        *slot = if p.add == 1 { *slot + value } else { value };
    }
}
