//! Kernels of the fused operations of a model; those of training stand in `train.rs`.

use ebbtide_shaders as sh;

use super::attention::{append, attention, attention_delta, attention_dkv, attention_dq, rope};
use super::matmul::{Order, Product, matmul, matvec};
use super::{Call, Operand, Source, dtype_code, kernel, small, train};
use crate::compile::Content;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, Tensor};
use crate::nn::NnOp;

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
                Ok([(out, node.shape.elements())]
                    .into_iter()
                    .chain(extras)
                    .filter(|(_, n)| *n > 0)
                    .map(zeros)
                    .collect())
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
    let p =
        sh::rms_norm::Params { groups: rows, rows, n, w_off, inv_n: 1.0 / n as f32, eps, plus, ..Default::default() };
    let bindings = vec![(x.whole(OP)?, false), (w.whole(OP)?, false), (f.out, true)];
    Ok(vec![call(
        &sh::rms_norm::SHADER,
        &[dtype_code(OP, w.dtype)?],
        bindings,
        &p,
        rows.into(),
        4 * x.shape.elements(),
    )])
}

fn rms_norm_grad(f: &Fused<'_>, eps: f32, plus: f32) -> Result<Vec<Call>> {
    const OP: &str = "rms_norm";
    let (x, w, dy) = (f.operand(0)?, f.operand(1)?, f.operand(2)?);
    let (rows, n) = f.rows(OP, &x)?;
    let w_off = small(OP, w.view.offset)?;
    let p = sh::rms_norm_grad::Params {
        groups: rows,
        rows,
        n,
        w_off,
        inv_n: 1.0 / n as f32,
        eps,
        plus,
        ..Default::default()
    };
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
    let p =
        sh::layer_norm_grad::Params { groups: rows, rows, n, w_off, inv_n: 1.0 / n as f32, eps, ..Default::default() };
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
    Ok(vec![call(
        &sh::norm_weight_grad::SHADER,
        &[u32::from(bias)],
        bindings,
        &p,
        groups.into(),
        4 * dy.shape.elements(),
    )])
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
