//! Kernels of the fused operations.

use super::{Call, Operand};
use crate::compile::Content;
use crate::error::Result;
use crate::graph::{Graph, Node, Tensor};
use crate::nn::NnOp;

/// The kernel calls of a fused operation. `operand` resolves an operand's storage and layout; `out` is where the
/// value goes; further results are the storage of `node.extras`.
pub(super) fn lower(
    _graph: &Graph,
    _node: &Node,
    op: &NnOp,
    _out: Content,
    _operand: &dyn Fn(Tensor) -> Result<Operand>,
) -> Result<Vec<Call>> {
    match *op {}
}
