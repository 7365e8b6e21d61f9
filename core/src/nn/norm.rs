//! Root-mean-square and layer normalization over the last dimension.

use super::{NnOp, Vjp, adjacent, dense_f32, last_extent, shape_error};
use crate::error::Result;
use crate::graph::{Graph, Shape, Tensor};

/// `x / sqrt(mean(x²) + eps) · (w + plus)`; x `[.., n]`, w `[n]` in any float dtype. `plus` is 1 for models whose files
/// store gain − 1.
pub fn rms_norm(g: &mut Graph, x: Tensor, w: Tensor, eps: f32, plus: f32) -> Result<Tensor> {
    let shape = g.shape(x)?;
    fits(g, "rms_norm", &shape, w)?;
    let (x, w) = (dense_f32(g, x)?, adjacent(g, w)?);
    Ok(g.nn(NnOp::RmsNorm { eps, plus }, vec![x, w], shape, &[]).0)
}

/// `(x − mean) / sqrt(variance + eps) · w + bias`; x `[.., n]`, w and bias `[n]` in any float dtype.
pub fn layer_norm(g: &mut Graph, x: Tensor, w: Tensor, bias: Option<Tensor>, eps: f32) -> Result<Tensor> {
    let shape = g.shape(x)?;
    fits(g, "layer_norm", &shape, w)?;
    let mut inputs = vec![dense_f32(g, x)?, adjacent(g, w)?];
    if let Some(bias) = bias {
        fits(g, "layer_norm", &shape, bias)?;
        inputs.push(adjacent(g, bias)?);
    }
    Ok(g.nn(NnOp::LayerNorm { eps, bias: bias.is_some() }, inputs, shape, &[]).0)
}

fn fits(g: &Graph, op: &'static str, x: &Shape, w: Tensor) -> Result<()> {
    let (n, of) = (last_extent(op, x)?, g.shape(w)?);
    if of.dims() != [n] {
        return Err(shape_error(op, format!("a weight of {of} does not fit rows of {n}")));
    }
    Ok(())
}

pub(super) fn rms_vjp(g: &mut Graph, call: &Vjp<'_>, eps: f32, plus: f32) -> Result<Vec<Option<Tensor>>> {
    let (x, w) = (call.inputs[0], call.inputs[1]);
    let dy = dense_f32(g, call.dy)?;
    let shape = g.shape(x)?;
    let dx = call.needed[0].then(|| g.nn(NnOp::RmsNormGrad { eps, plus }, vec![x, w, dy], shape, &[]).0);
    let dw = if call.needed[1] { Some(weight_grad(g, x, w, dy, eps, false)?) } else { None };
    Ok(vec![dx, dw])
}

pub(super) fn layer_vjp(g: &mut Graph, call: &Vjp<'_>, eps: f32) -> Result<Vec<Option<Tensor>>> {
    let (x, w) = (call.inputs[0], call.inputs[1]);
    let dy = dense_f32(g, call.dy)?;
    let shape = g.shape(x)?;
    let dx = call.needed[0].then(|| g.nn(NnOp::LayerNormGrad { eps }, vec![x, w, dy], shape, &[]).0);
    let dw = if call.needed[1] { Some(weight_grad(g, x, w, dy, eps, true)?) } else { None };
    let mut parts = vec![dx, dw];
    if let Some(bias) = call.inputs.get(2) {
        let shape = g.shape(*bias)?;
        // The kernel binds stats for both sums; this one reads dy alone.
        parts.push(call.needed[2].then(|| g.nn(NnOp::NormBiasGrad, vec![dy, dy, dy], shape, &[]).0));
    }
    Ok(parts)
}

fn weight_grad(g: &mut Graph, x: Tensor, w: Tensor, dy: Tensor, eps: f32, layer: bool) -> Result<Tensor> {
    let (shape, n) = (g.shape(x)?, g.shape(w)?);
    let rows = shape.dims()[..shape.rank() - 1].iter().product();
    let stats = g.nn(NnOp::NormStats { eps, layer }, vec![x], Shape::new(&[rows, 2])?, &[]).0;
    Ok(g.nn(NnOp::NormWeightGrad, vec![x, stats, dy], n, &[]).0)
}
