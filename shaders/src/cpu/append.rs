//! Twin of `append.wgsl`.

use super::Real;
use crate::append::Params;

/// Writes `x` into `cache` behind what each row holds.
pub fn append<T: Real>(p: &Params, x: &[T], rows: &[u32], cache: &mut [T]) {
    for row in 0..p.b {
        let (start, end) = (rows[2 * row as usize], rows[2 * row as usize + 1].min(p.s));
        for entry in (0..p.t).filter(|i| start + i < end) {
            for head in 0..p.h {
                let to = ((row * p.s + start + entry) * p.h + head) * p.d;
                let from = p.x_off + row * p.x_b + entry * p.x_t + head * p.x_h;
                let (to, from, d) = (to as usize, from as usize, p.d as usize);
                cache[to..to + d].copy_from_slice(&x[from..from + d]);
            }
        }
    }
}
