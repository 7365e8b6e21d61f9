//! Twin of `attention_delta.wgsl`.

use super::Real;
use super::attention::dot;
use crate::attention_delta::Params;

/// `stats[b,h,t] = (lse, sum of do * o)`.
pub fn attention_delta<T: Real>(p: &Params, o: &[T], d_o: &[T], lse: &[T], stats: &mut [T]) {
    let d = p.d as usize;
    for row in 0..p.b {
        for head in 0..p.h {
            for query in 0..p.t {
                let at = ((row * p.h + head) * p.t + query) as usize;
                let o = &o[(p.o_off + row * p.o_b + query * p.o_t + head * p.o_h) as usize..][..d];
                let d_o = &d_o[(p.do_off + row * p.do_b + query * p.do_t + head * p.do_h) as usize..][..d];
                stats[2 * at] = lse[at];
                stats[2 * at + 1] = dot(d_o, o);
            }
        }
    }
}
