//! Twin of `gather_grad.wgsl`.

use super::Real;
use crate::gather_grad::Params;

/// `dtable[row, :] = sum of dy[t, :]` over the `t` with `ids[t] = row`, in order.
pub fn gather_grad<T: Real>(p: &Params, ids: &[i32], dy: &[T], dtable: &mut [T]) {
    let d = p.d as usize;
    for row in 0..p.rows as usize {
        for col in 0..d {
            let slot = &mut dtable[p.out_off as usize + row * d + col];
            let mut acc = if p.carry == 1 { *slot } else { T::zero() };
            for t in 0..p.t as usize {
                if i64::from(ids[p.ids_off as usize + t]) == row as i64 + i64::from(p.first_row) {
                    acc += dy[t * d + col];
                }
            }
            *slot = acc;
        }
    }
}
