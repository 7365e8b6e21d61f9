//! Twin of `attention_dkv.wgsl`.

use super::Real;
use super::attention::{dot, visible};
use crate::attention_dkv::Params;

/// `dk` and `dv` of each key: over the heads of its group in order, over the queries in order.
#[allow(clippy::too_many_arguments, reason = "one argument a binding")]
pub fn attention_dkv<T: Real>(
    p: &Params,
    q: &[T],
    k: &[T],
    v: &[T],
    d_o: &[T],
    stats: &[T],
    rows: &[u32],
    dk: &mut [T],
    dv: &mut [T],
) {
    let d = p.d as usize;
    let scale = T::of(f64::from(p.scale));
    let members = p.h / p.hk;
    for row in 0..p.b {
        let (start, keys) = (rows[2 * row as usize], rows[2 * row as usize + 1].min(p.s));
        for kv_head in 0..p.hk {
            for j in 0..p.s {
                let k = &k[(p.k_off + row * p.k_b + j * p.k_t + kv_head * p.k_h) as usize..];
                let v = &v[(p.v_off + row * p.v_b + j * p.v_t + kv_head * p.v_h) as usize..];
                let dk = &mut dk[(p.dk_off + row * p.dk_b + j * p.dk_t + kv_head * p.dk_h) as usize..][..d];
                let dv = &mut dv[(p.dv_off + row * p.dv_b + j * p.dv_t + kv_head * p.dv_h) as usize..][..d];
                dk.fill(T::zero());
                dv.fill(T::zero());
                for head in kv_head * members..(kv_head + 1) * members {
                    for query in (0..p.t).filter(|i| visible(p.causal, p.window, start + i, j, keys)) {
                        let q = &q[(p.q_off + row * p.q_b + query * p.q_t + head * p.q_h) as usize..][..d];
                        let d_o = &d_o[(p.do_off + row * p.do_b + query * p.do_t + head * p.do_h) as usize..][..d];
                        let stat = 2 * ((row * p.h + head) * p.t + query) as usize;
                        let w = dot(q, k).fma(scale, -stats[stat]).exp();
                        let ds = w * (dot(d_o, v) - stats[stat + 1]) * scale;
                        for i in 0..d {
                            dv[i] = w.fma(d_o[i], dv[i]);
                            dk[i] = ds.fma(q[i], dk[i]);
                        }
                    }
                }
            }
        }
    }
}
