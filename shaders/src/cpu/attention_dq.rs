//! Twin of `attention_dq.wgsl`.

use super::Real;
use super::attention::{dot, visible};
use crate::attention_dq::Params;

/// `dq = scale * sum of ds * k` over the keys in order.
#[allow(clippy::too_many_arguments, reason = "one argument a binding")]
pub fn attention_dq<T: Real>(
    p: &Params,
    q: &[T],
    k: &[T],
    v: &[T],
    d_o: &[T],
    stats: &[T],
    rows: &[u32],
    dq: &mut [T],
) {
    let d = p.d as usize;
    let scale = T::of(f64::from(p.scale));
    for row in 0..p.b {
        let (start, keys) = (rows[2 * row as usize], rows[2 * row as usize + 1].min(p.s));
        for head in 0..p.h {
            let kv_head = head / (p.h / p.hk);
            for query in 0..p.t {
                let q = &q[(p.q_off + row * p.q_b + query * p.q_t + head * p.q_h) as usize..][..d];
                let d_o = &d_o[(p.do_off + row * p.do_b + query * p.do_t + head * p.do_h) as usize..][..d];
                let stat = 2 * ((row * p.h + head) * p.t + query) as usize;
                let dq = &mut dq[(p.dq_off + row * p.dq_b + query * p.dq_t + head * p.dq_h) as usize..][..d];
                dq.fill(T::zero());
                for j in (0..keys).filter(|j| visible(p.causal, p.window, start + query, *j, keys)) {
                    let k = &k[(p.k_off + row * p.k_b + j * p.k_t + kv_head * p.k_h) as usize..][..d];
                    let v = &v[(p.v_off + row * p.v_b + j * p.v_t + kv_head * p.v_h) as usize..][..d];
                    let w = dot(q, k).fma(scale, -stats[stat]).exp();
                    let ds = w * (dot(d_o, v) - stats[stat + 1]) * scale;
                    for (dq, k) in dq.iter_mut().zip(k) {
                        *dq = ds.fma(*k, *dq);
                    }
                }
            }
        }
    }
}
