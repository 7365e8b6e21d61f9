//! Fused operations of transformers and of training, as nodes of a graph with gradients of their own.
//!
//! One family, one file: what it adds to a [`Graph`], and its gradient. The kernels stand in `kernels/nn.rs` and in
//! the shaders crate, where each has a CPU twin.

use crate::error::Result;
use crate::graph::{Graph, Tensor};

/// A fused operation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum NnOp {}

/// What a gradient is built from.
pub(crate) struct Vjp<'a> {
    /// The node's value.
    pub y: Tensor,
    /// Its further results.
    pub extras: &'a [Tensor],
    /// Its operands.
    pub inputs: &'a [Tensor],
    /// The gradient of the value. Further results have none.
    pub dy: Tensor,
    /// For each operand, whether its gradient is asked for.
    pub needed: &'a [bool],
}

impl NnOp {
    /// Builds the gradients of the operands, one entry each; `None` where none is needed or none exists.
    pub(crate) fn vjp(&self, _g: &mut Graph, _call: &Vjp<'_>) -> Result<Vec<Option<Tensor>>> {
        match *self {}
    }

    /// Whether the kernel can write into a region of a larger tensor, going on from what is stored there.
    pub(crate) fn takes_region(&self) -> bool {
        match *self {}
    }
}
