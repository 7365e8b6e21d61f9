//! Kernels of the fused operations of a model; those of training stand in `train.rs`.

use ebbtide_shaders as sh;

use super::matmul::{Order, Product, matmul, matvec};
use super::{Call, Operand, Source, dtype_code, kernel, small, train};
use crate::compile::Content;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, Shape, Tensor, View};
use crate::nn::{Attention, NnOp};

/// A fused node on its way to kernels.
pub(super) struct Fused<'a> {
    pub node: &'a Node,
    pub out: Content,
    /// Resolves an operand's storage and layout.
    pub resolve: &'a dyn Fn(Tensor) -> Result<Operand>,
}

impl Fused<'_> {
    pub fn operand(&self, i: usize) -> Result<Operand> {
        (self.resolve)(self.node.inputs[i])
    }

    pub fn extra(&self, i: usize) -> Content {
        Content::Value(self.node.extras[i])
    }

    /// Rows and their length, of an operand seen as rows of its last dimension.
    pub fn rows(&self, op: &'static str, x: &Operand) -> Result<(u32, u32)> {
        let n = x.shape.dims().last().copied().unwrap_or(1);
        Ok((small(op, x.shape.elements() / n.max(1))?, small(op, n)?))
    }

    /// First element of the output, and whether it goes on from what is stored.
    pub fn into(&self) -> (u64, bool) {
        self.node.into.as_ref().map_or((0, false), |r| (r.view.offset, r.carry))
    }
}

/// One kernel call.
pub(super) fn call(
    shader: &'static sh::Shader,
    overrides: &[u32],
    bindings: Vec<(Content, bool)>,
    params: &impl bytemuck::Pod,
    groups: u64,
    work: u64,
) -> Call {
    let params = bytemuck::bytes_of(params).to_vec();
    Call { kernel: kernel(shader, overrides), bindings, params, groups, work }
}

/// The kernel calls of a fused operation. Further results are the storage of `node.extras`.
pub(super) fn lower(
    graph: &Graph,
    node: &Node,
    op: &NnOp,
    out: Content,
    resolve: &dyn Fn(Tensor) -> Result<Operand>,
) -> Result<Vec<Call>> {
    let fused = Fused { node, out, resolve };
    // Nothing of size zero is bound: a sum over nothing is zero, or what was there.
    if node.operands().iter().any(|t| graph.node(*t).shape.elements() == 0) {
        return match &node.into {
            Some(region) if region.carry => Ok(vec![]),
            Some(_) => Err(Error::Shape { op: "sum", reason: "a gradient over no rows cannot start an array".into() }),
            None => {
                let extras = node.extras.iter().map(|t| (Content::Value(*t), graph.node(*t).shape.elements()));
                Ok([(out, node.shape.elements())].into_iter().chain(extras).filter(|(_, n)| *n > 0).map(zeros).collect())
            }
        };
    }
    match op {
        NnOp::MatmulDescending => {
            let (a, b) = (fused.operand(0)?, fused.operand(1)?);
            matmul(node, out, Product { a, b, bias: None, alpha: 1.0, order: Order::Descending })
        }
        NnOp::Matvec { bias } => {
            let bias = if *bias { Some(fused.operand(2)?) } else { None };
            Ok(vec![matvec(node, out, fused.operand(0)?, fused.operand(1)?, bias)?])
        }
        NnOp::Softmax => softmax(&fused),
        NnOp::SoftmaxGrad => softmax_grad(&fused),
        NnOp::RmsNorm { eps, plus } => rms_norm(&fused, *eps, *plus),
        NnOp::RmsNormGrad { eps, plus } => rms_norm_grad(&fused, *eps, *plus),
        NnOp::LayerNorm { eps, bias } => layer_norm(&fused, *eps, *bias),
        NnOp::LayerNormGrad { eps } => layer_norm_grad(&fused, *eps),
        NnOp::NormStats { eps, layer } => norm_stats(&fused, *eps, *layer),
        NnOp::NormWeightGrad => norm_weight_grad(&fused, false),
        NnOp::NormBiasGrad => norm_weight_grad(&fused, true),
        NnOp::Gather => gather(&fused),
        NnOp::GatherGrad => gather_grad(&fused),
        NnOp::Rope { interleaved, inverse } => rope(&fused, *interleaved, *inverse),
        NnOp::Attention(spec) => attention(&fused, spec),
        NnOp::Append => append(&fused),
        NnOp::AttentionDelta => attention_delta(&fused),
        NnOp::AttentionDq(spec) => attention_dq(&fused, spec),
        NnOp::AttentionDkv(spec) => attention_dkv(&fused, spec),
        _ => train::lower(&fused, op),
    }
}

fn zeros((out, n): (Content, u64)) -> Call {
    let p = sh::fill::Params { groups: n.div_ceil(1024) as u32, words: n as u32, ..Default::default() };
    call(&sh::fill::SHADER, &[], vec![(out, true)], &p, n.div_ceil(1024), n)
}

fn softmax(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "softmax";
    let x = f.operand(0)?;
    let (rows, n) = f.rows(OP, &x)?;
    let p = sh::softmax::Params { groups: rows, rows, n, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::softmax::SHADER, &[], bindings, &p, rows.into(), 4 * x.shape.elements())])
}

fn softmax_grad(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "softmax";
    let (y, dy) = (f.operand(0)?, f.operand(1)?);
    let (rows, n) = f.rows(OP, &y)?;
    let p = sh::softmax_grad::Params { groups: rows, rows, n, ..Default::default() };
    let bindings = vec![(y.whole(OP)?, false), (dy.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::softmax_grad::SHADER, &[], bindings, &p, rows.into(), 4 * y.shape.elements())])
}

fn rms_norm(f: &Fused<'_>, eps: f32, plus: f32) -> Result<Vec<Call>> {
    const OP: &str = "rms_norm";
    let (x, w) = (f.operand(0)?, f.operand(1)?);
    let (rows, n) = f.rows(OP, &x)?;
    let w_off = small(OP, w.view.offset)?;
    let p = sh::rms_norm::Params { groups: rows, rows, n, w_off, inv_n: 1.0 / n as f32, eps, plus, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (w.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::rms_norm::SHADER, &[dtype_code(OP, w.dtype)?], bindings, &p, rows.into(), 4 * x.shape.elements())])
}

fn rms_norm_grad(f: &Fused<'_>, eps: f32, plus: f32) -> Result<Vec<Call>> {
    const OP: &str = "rms_norm";
    let (x, w, dy) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let (rows, n) = f.rows(OP, &x)?;
    let w_off = small(OP, w.view.offset)?;
    let p = sh::rms_norm_grad::Params { groups: rows, rows, n, w_off, inv_n: 1.0 / n as f32, eps, plus, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (w.whole(OP)?, false), (dy.whole(OP)?, false), (f.out, true)];
    let codes = [dtype_code(OP, w.dtype)?];
    Ok(vec![call(&sh::rms_norm_grad::SHADER, &codes, bindings, &p, rows.into(), 8 * x.shape.elements())])
}

fn layer_norm(f: &Fused<'_>, eps: f32, has_bias: bool) -> Result<Vec<Call>> {
    const OP: &str = "layer_norm";
    let (x, w) = (f.operand(0)?, f.operand(1)?);
    let (rows, n) = f.rows(OP, &x)?;
    let weight = w.whole(OP)?;
    let (bias, bias_code, bias_off) = if has_bias {
        let b = f.operand(2)?;
        (b.whole(OP)?, dtype_code(OP, b.dtype)?, b.view.offset)
    } else {
        (weight, 0, 0)
    };
    let p = sh::layer_norm::Params {
        groups: rows,
        rows,
        n,
        w_off: small(OP, w.view.offset)?,
        bias_off: small(OP, bias_off)?,
        has_bias: u32::from(has_bias),
        inv_n: 1.0 / n as f32,
        eps,
        ..Default::default()
    };
    let bindings = vec![(x.whole(OP)?, false), (weight, false), (bias, false), (f.out, true)];
    let codes = [dtype_code(OP, w.dtype)?, bias_code];
    Ok(vec![call(&sh::layer_norm::SHADER, &codes, bindings, &p, rows.into(), 6 * x.shape.elements())])
}

fn layer_norm_grad(f: &Fused<'_>, eps: f32) -> Result<Vec<Call>> {
    const OP: &str = "layer_norm";
    let (x, w, dy) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let (rows, n) = f.rows(OP, &x)?;
    let w_off = small(OP, w.view.offset)?;
    let p = sh::layer_norm_grad::Params { groups: rows, rows, n, w_off, inv_n: 1.0 / n as f32, eps, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (w.whole(OP)?, false), (dy.whole(OP)?, false), (f.out, true)];
    let codes = [dtype_code(OP, w.dtype)?];
    Ok(vec![call(&sh::layer_norm_grad::SHADER, &codes, bindings, &p, rows.into(), 10 * x.shape.elements())])
}

fn norm_stats(f: &Fused<'_>, eps: f32, layer: bool) -> Result<Vec<Call>> {
    const OP: &str = "norm_stats";
    let x = f.operand(0)?;
    let (rows, n) = f.rows(OP, &x)?;
    let p = sh::norm_stats::Params { groups: rows, rows, n, inv_n: 1.0 / n as f32, eps, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::norm_stats::SHADER, &[u32::from(layer)], bindings, &p, rows.into(), 4 * x.shape.elements())])
}

fn norm_weight_grad(f: &Fused<'_>, bias: bool) -> Result<Vec<Call>> {
    const OP: &str = "norm_weight_grad";
    let (x, stats, dy) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let (rows, n) = f.rows(OP, &dy)?;
    let (out_off, carry) = f.into();
    let groups = n.div_ceil(256);
    let p = sh::norm_weight_grad::Params {
        groups,
        rows,
        n,
        out_off: small(OP, out_off)?,
        carry: u32::from(carry),
        ..Default::default()
    };
    let bindings = vec![(x.whole(OP)?, false), (stats.whole(OP)?, false), (dy.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::norm_weight_grad::SHADER, &[u32::from(bias)], bindings, &p, groups.into(), 4 * dy.shape.elements())])
}

fn gather(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "embedding";
    let (table, ids) = (f.operand(0)?, f.operand(1)?);
    let (t, d, rows) = (ids.shape.elements(), table.shape.dims()[1], table.shape.dims()[0]);
    let groups = (t * d).div_ceil(1024);
    let base = sh::gather::Params {
        groups: small(OP, groups)?,
        t: small(OP, t)?,
        d: small(OP, d)?,
        rows: small(OP, rows)?,
        ids_off: small(OP, ids.view.offset)?,
        table_off: small(OP, table.view.offset)?,
        ..Default::default()
    };
    let (ids, codes) = (ids.whole(OP)?, [dtype_code(OP, table.dtype)?]);
    let one = |p: sh::gather::Params, content: Content| {
        call(&sh::gather::SHADER, &codes, vec![(ids, false), (content, false), (f.out, true)], &p, groups, t * d)
    };
    match &table.content {
        Source::Weight { segment, parts, .. } if parts.len() > 1 => {
            if table.view.offset != 0 {
                return Err(Error::Shape { op: OP, reason: "a table in pieces must be read whole".into() });
            }
            let mut calls = Vec::with_capacity(parts.len());
            for (i, part) in parts.iter().enumerate() {
                let content = Content::Weight { segment: *segment, weight: part.weight, piece: part.piece };
                let (rows, first_row) = (small(OP, part.rows)?, small(OP, part.first_row)?);
                calls.push(one(sh::gather::Params { rows, first_row, keep: u32::from(i > 0), ..base }, content));
            }
            Ok(calls)
        }
        _ => Ok(vec![one(base, table.whole(OP)?)]),
    }
}

fn gather_grad(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "embedding";
    let (ids, dy) = (f.operand(0)?, f.operand(1)?);
    let result = f.node.result();
    let (rows, d, t) = (result.dims()[0], result.dims()[1], ids.shape.elements());
    let (out_off, carry) = f.into();
    let groups = rows * d.div_ceil(256);
    let p = sh::gather_grad::Params {
        groups: small(OP, groups)?,
        t: small(OP, t)?,
        d: small(OP, d)?,
        rows: small(OP, rows)?,
        first_row: 0,
        ids_off: small(OP, ids.view.offset)?,
        out_off: small(OP, out_off)?,
        carry: u32::from(carry),
        ..Default::default()
    };
    let bindings = vec![(ids.whole(OP)?, false), (dy.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::gather_grad::SHADER, &[], bindings, &p, groups, rows * d * t / 8 + t * d)])
}

/// Offset, and strides over rows, positions and heads, of a tensor of four dimensions with adjacent features.
fn lying(op: &'static str, view: &View) -> Result<[u32; 4]> {
    Ok([small(op, view.offset)?, small(op, view.strides[0])?, small(op, view.strides[1])?, small(op, view.strides[2])?])
}

fn extents(op: &'static str, shape: &Shape) -> Result<[u32; 4]> {
    let d = shape.dims();
    Ok([small(op, d[0])?, small(op, d[1])?, small(op, d[2])?, small(op, d[3])?])
}

fn rope(f: &Fused<'_>, interleaved: bool, inverse: bool) -> Result<Vec<Call>> {
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

fn attention(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
    const OP: &str = "attention";
    let [q, k, v, rows] = [f.operand(0)?, f.operand(1)?, f.operand(2)?, f.operand(3)?];
    let ([b, t, h, d], [_, s, hk, _]) = (extents(OP, &q.shape)?, extents(OP, &k.shape)?);
    let ([q_off, q_b, q_t, q_h], [k_off, k_b, k_t, k_h]) = (lying(OP, &q.view)?, lying(OP, &k.view)?);
    let ([v_off, v_b, v_t, v_h], [o_off, o_b, o_t, o_h]) = (lying(OP, &v.view)?, lying(OP, &View::dense(&f.node.shape))?);
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

fn append(f: &Fused<'_>) -> Result<Vec<Call>> {
    const OP: &str = "append";
    let (x, rows) = (f.operand(0)?, f.operand(1)?);
    let [b, t, h, d] = extents(OP, &x.shape)?;
    let [x_off, x_b, x_t, x_h] = lying(OP, &x.view)?;
    let groups = x.shape.elements().div_ceil(1024);
    let s = small(OP, f.node.shape.dims()[1])?;
    let p = sh::append::Params { groups: small(OP, groups)?, b, t, h, d, s, x_off, x_b, x_t, x_h, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (rows.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(&sh::append::SHADER, &[], bindings, &p, groups, 2 * x.shape.elements())])
}

fn attention_delta(f: &Fused<'_>) -> Result<Vec<Call>> {
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

fn attention_dq(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
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

fn attention_dkv(f: &Fused<'_>, spec: &Attention) -> Result<Vec<Call>> {
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
