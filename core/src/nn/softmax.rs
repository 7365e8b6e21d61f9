//! Softmax over the last dimension.

use super::{NnOp, Vjp, dense_f32, last_extent};
use crate::error::Result;
use crate::graph::{Graph, Tensor};

/// `exp(x − max) / Σ exp(x − max)` over the last dimension of `x` `[.., n]`.
pub fn softmax(g: &mut Graph, x: Tensor) -> Result<Tensor> {
    let shape = g.shape(x)?;
    last_extent("softmax", &shape)?;
    let x = dense_f32(g, x)?;
    Ok(g.nn(NnOp::Softmax, vec![x], shape, &[]).0)
}

pub(super) fn vjp(g: &mut Graph, call: &Vjp<'_>) -> Result<Vec<Option<Tensor>>> {
    let shape = g.shape(call.y)?;
    let dy = dense_f32(g, call.dy)?;
    Ok(vec![Some(g.nn(NnOp::SoftmaxGrad, vec![call.y, dy], shape, &[]).0)])
}
