//! Kernels of attention, its cache and its rotary embedding.

use ebbtide_shaders as sh;

use super::nn::{Fused, call};
use super::{Call, small};
use crate::error::Result;
use crate::graph::{Shape, View};
use crate::nn::Attention;

/// Offset, and strides over rows, positions and heads, of a tensor of four dimensions with adjacent features.
fn lying(op: &'static str, view: &View) -> Result<[u32; 4]> {
    Ok([small(op, view.offset)?, small(op, view.strides[0])?, small(op, view.strides[1])?, small(op, view.strides[2])?])
}

fn extents(op: &'static str, shape: &Shape) -> Result<[u32; 4]> {
    let d = shape.dims();
    Ok([small(op, d[0])?, small(op, d[1])?, small(op, d[2])?, small(op, d[3])?])
}

pub(super) fn rope(f: &Fused<'_>, interleaved: bool, inverse: bool) -> Result<Vec<Call>> {
    const OP: &str = "rope";
    let (x, cosines, sines) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let [b, t, h, d] = extents(OP, &x.shape)?;
    let [x_off, x_b, x_t, x_h] = lying(OP, &x.view)?;
    let [y_off, y_b, y_t, y_h] = lying(OP, &View::dense(&f.node.shape))?;
    let half = small(OP, cosines.shape.dims().last().copied().unwrap_or(0))?;
    let groups = x.shape.elements().div_ceil(1024);
    let p = sh::rope::Params {
        groups: small(OP, groups)?,
        b,
        t,
        h,
        d,
        half,
        inverse: u32::from(inverse),
        x_off,
        x_b,
        x_t,
        x_h,
        y_off,
        y_b,
        y_t,
        y_h,
        tab_off: 0,
        tab_b: if cosines.shape.rank() == 3 { t * half } else { 0 },
        tab_t: half,
        ..Default::default()
    };
    let bindings = vec![(x.whole(OP)?, false), (cosines.whole(OP)?, false), (sines.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::rope::SHADER, &[u32::from(interleaved)], bindings, &p, groups, 4 * x.shape.elements())])
}

pub(super) fn attention(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
    const OP: &str = "attention";
    let [q, k, v, rows] = [f.operand(0)?, f.operand(1)?, f.operand(2)?, f.operand(3)?];
    let ([b, t, h, d], [_, s, hk, _]) = (extents(OP, &q.shape)?, extents(OP, &k.shape)?);
    let ([q_off, q_b, q_t, q_h], [k_off, k_b, k_t, k_h]) = (lying(OP, &q.view)?, lying(OP, &k.view)?);
    let ([v_off, v_b, v_t, v_h], [o_off, o_b, o_t, o_h]) =
        (lying(OP, &v.view)?, lying(OP, &View::dense(&f.node.shape))?);
    let groups = u64::from(b) * u64::from(h) * u64::from(t.div_ceil(8));
    #[rustfmt::skip]
    let p = sh::attention::Params {
        groups: small(OP, groups)?,
        b, t, h, hk, s, d,
        causal: u32::from(spec.causal), window: spec.window, scale: spec.scale,
        q_off, q_b, q_t, q_h, k_off, k_b, k_t, k_h, v_off, v_b, v_t, v_h, o_off, o_b, o_t, o_h,
        ..Default::default()
    };
    let reads = [&q, &k, &v, &rows].map(|x| x.whole(OP).map(|c| (c, false)));
    let mut bindings = reads.into_iter().collect::<Result<Vec<_>>>()?;
    bindings.extend([(f.out, true), (f.extra(0), true)]);
    Ok(vec![call(&sh::attention::SHADER, &[], bindings, &p, groups, 2 * q.shape.elements() * u64::from(s))])
}

pub(super) fn append(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "append";
    let (x, rows) = (f.operand(0)?, f.operand(1)?);
    let [b, t, h, d] = extents(OP, &x.shape)?;
    let [x_off, x_b, x_t, x_h] = lying(OP, &x.view)?;
    let groups = x.shape.elements().div_ceil(1024);
    let s = small(OP, f.node.shape.dims()[1])?;
    let p =
        sh::append::Params { groups: small(OP, groups)?, b, t, h, d, s, x_off, x_b, x_t, x_h, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (rows.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::append::SHADER, &[], bindings, &p, groups, 2 * x.shape.elements())])
}

pub(super) fn attention_delta(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "attention";
    let (o, d_o, lse) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let [b, t, h, d] = extents(OP, &o.shape)?;
    let ([o_off, o_b, o_t, o_h], [do_off, do_b, do_t, do_h]) = (lying(OP, &o.view)?, lying(OP, &d_o.view)?);
    let groups = (u64::from(b) * u64::from(h) * u64::from(t)).div_ceil(256);
    #[rustfmt::skip]
    let p = sh::attention_delta::Params {
        groups: small(OP, groups)?,
        b, t, h, d, o_off, o_b, o_t, o_h, do_off, do_b, do_t, do_h,
        ..Default::default()
    };
    let bindings = vec![(o.whole(OP)?, false), (d_o.whole(OP)?, false), (lse.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::attention_delta::SHADER, &[], bindings, &p, groups, 2 * o.shape.elements())])
}

pub(super) fn attention_dq(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
    const OP: &str = "attention";
    let (q, k, v, d_o) = (f.operand(0)?, f.operand(1)?, f.operand(2)?, f.operand(3)?);
    let (stats, rows) = (f.operand(4)?, f.operand(5)?);
    let ([b, t, h, d], [_, s, hk, _]) = (extents(OP, &q.shape)?, extents(OP, &k.shape)?);
    let ([q_off, q_b, q_t, q_h], [k_off, k_b, k_t, k_h]) = (lying(OP, &q.view)?, lying(OP, &k.view)?);
    let ([v_off, v_b, v_t, v_h], [do_off, do_b, do_t, do_h]) = (lying(OP, &v.view)?, lying(OP, &d_o.view)?);
    let [dq_off, dq_b, dq_t, dq_h] = lying(OP, &View::dense(&f.node.shape))?;
    let groups = u64::from(b) * u64::from(h) * u64::from(t.div_ceil(8));
    #[rustfmt::skip]
    let p = sh::attention_dq::Params {
        groups: small(OP, groups)?,
        b, t, h, hk, s, d,
        causal: u32::from(spec.causal), window: spec.window, scale: spec.scale,
        q_off, q_b, q_t, q_h, k_off, k_b, k_t, k_h, v_off, v_b, v_t, v_h,
        do_off, do_b, do_t, do_h, dq_off, dq_b, dq_t, dq_h,
        ..Default::default()
    };
    let reads = [&q, &k, &v, &d_o, &stats, &rows].map(|x| x.whole(OP).map(|c| (c, false)));
    let mut bindings = reads.into_iter().collect::<Result<Vec<_>>>()?;
    bindings.push((f.out, true));
    Ok(vec![call(&sh::attention_dq::SHADER, &[], bindings, &p, groups, 3 * q.shape.elements() * u64::from(s))])
}

pub(super) fn attention_dkv(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
    const OP: &str = "attention";
    let (q, k, v, d_o) = (f.operand(0)?, f.operand(1)?, f.operand(2)?, f.operand(3)?);
    let (stats, rows) = (f.operand(4)?, f.operand(5)?);
    let ([b, t, h, d], [_, s, hk, _]) = (extents(OP, &q.shape)?, extents(OP, &k.shape)?);
    let ([q_off, q_b, q_t, q_h], [k_off, k_b, k_t, k_h]) = (lying(OP, &q.view)?, lying(OP, &k.view)?);
    let ([v_off, v_b, v_t, v_h], [do_off, do_b, do_t, do_h]) = (lying(OP, &v.view)?, lying(OP, &d_o.view)?);
    let [dk_off, dk_b, dk_t, dk_h] = lying(OP, &View::dense(&f.node.shape))?;
    let groups = u64::from(b) * u64::from(hk) * u64::from(s.div_ceil(8));
    #[rustfmt::skip]
    let p = sh::attention_dkv::Params {
        groups: small(OP, groups)?,
        b, t, h, hk, s, d,
        causal: u32::from(spec.causal), window: spec.window, scale: spec.scale,
        q_off, q_b, q_t, q_h, k_off, k_b, k_t, k_h, v_off, v_b, v_t, v_h,
        do_off, do_b, do_t, do_h, dk_off, dk_b, dk_t, dk_h,
        dv_off: dk_off, dv_b: dk_b, dv_t: dk_t, dv_h: dk_h,
        ..Default::default()
    };
    let reads = [&q, &k, &v, &d_o, &stats, &rows].map(|x| x.whole(OP).map(|c| (c, false)));
    let mut bindings = reads.into_iter().collect::<Result<Vec<_>>>()?;
    bindings.extend([(f.out, true), (f.extra(0), true)]);
    Ok(vec![call(&sh::attention_dkv::SHADER, &[], bindings, &p, groups, 4 * q.shape.elements() * u64::from(s))])
}
