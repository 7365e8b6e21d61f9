//! Twin of `gather.wgsl`.

use super::Real;
use crate::gather::Params;

/// `out[t, :] = table[ids[t] - first_row, :]`; zeros, or with `keep` nothing, for ids outside.
pub fn gather<T: Real>(p: &Params, ids: &[i32], table: &[T], out: &mut [T]) {
    let d = p.d as usize;
    for t in 0..p.t as usize {
        let row = i64::from(ids[p.ids_off as usize + t]) - i64::from(p.first_row);
        let out = &mut out[t * d..][..d];
        if (0..i64::from(p.rows)).contains(&row) {
            out.copy_from_slice(&table[p.table_off as usize + row as usize * d..][..d]);
        } else if p.keep == 0 {
            out.fill(T::zero());
        }
    }
}
