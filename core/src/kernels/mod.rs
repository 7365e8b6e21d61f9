//! From an op to kernels: pure functions of op, shapes and dtypes.
//!
//! A node becomes one or more dispatches over storage that is not yet placed ([`Content`]). Where a weight is cut
//! into row pieces, a product is cut with it: along n the pieces give their own columns, along k each piece carries
//! on from the accumulator that the last one stored, so a cut leaves no trace in any bit.

mod attention;
mod elementwise;
mod matmul;
mod nn;
mod train;

use ebbtide_shaders as sh;

use crate::caps::Caps;
use crate::compile::{Content, Kernel};
use crate::error::{Error, Result};
use crate::graph::{Fold, Graph, Op, Shape, Tensor, View, WeightPart};
use crate::weights::DType;
use elementwise::{binary_code, elementwise, fill, fill_from, place, reduce, unary_code};
use matmul::{Order, Product, matmul};

/// One kernel call, its storage not yet placed.
#[derive(Clone, Debug)]
pub struct Call {
    /// The pipeline.
    pub kernel: Kernel,
    /// Storage in the shader's order, and whether it is written.
    pub bindings: Vec<(Content, bool)>,
    /// The parameter block.
    pub params: Vec<u8>,
    /// Workgroups.
    pub groups: u64,
    /// Multiply-adds, an estimate.
    pub work: u64,
}

/// An operand: where its storage is and how its elements lie there.
struct Operand {
    content: Source,
    view: View,
    shape: Shape,
    dtype: DType,
}

enum Source {
    Value(Tensor),
    Weight { segment: u32, parts: std::sync::Arc<[WeightPart]>, row: u64 },
}

/// Gives the dense index of a segment, by its identity in the catalog.
pub(crate) type SegmentIndex<'a> = &'a dyn Fn(crate::weights::SegmentId) -> u32;

/// The kernel calls of a node; empty for nodes that compute nothing (inputs, weights, views) or have no elements.
pub(crate) fn lower(graph: &Graph, tensor: Tensor, segments: SegmentIndex<'_>, caps: &Caps) -> Result<Vec<Call>> {
    let node = graph.node(tensor);
    if node.result().elements() == 0 {
        return Ok(vec![]);
    }
    let operand = |t: Tensor| Operand::new(graph, t, segments);
    let out = Content::Value(graph.storage(tensor).0);
    // A sum over nothing is zero; no kernel reads an empty operand.
    if !matches!(node.op, Op::Fill(_) | Op::Nn(_))
        && node.operands().iter().any(|t| graph.node(*t).shape.elements() == 0)
    {
        return match (&node.op, node.inputs.get(2)) {
            (Op::View(_) | Op::Hook { .. }, _) => Ok(vec![]),
            (Op::MatMul { bias: true, .. }, Some(bias)) => {
                elementwise(graph, node, tensor, out, sh::elementwise_op::COPY, 0.0, &[operand(*bias)?])
            }
            (Op::Reduce { fold: Fold::Mean, .. }, _) => Ok(fill(node, out, f32::NAN)),
            (Op::Reduce { fold: Fold::Max | Fold::Argmax, .. }, _) => {
                Err(Error::Shape { op: "reduce", reason: "the largest of no elements is not defined".into() })
            }
            _ if node.into.is_some() => Ok(vec![]),
            _ => Ok(fill(node, out, 0.0)),
        };
    }
    let calls = match &node.op {
        Op::Input { .. }
        | Op::Weight { .. }
        | Op::View(_)
        | Op::Hook { .. }
        | Op::LoadRows { .. }
        | Op::Empty
        | Op::State(_)
        | Op::Folded(_)
        | Op::Extra
        | Op::Custom(_) => vec![],
        Op::MatMul { bias, alpha } => {
            let bias = if *bias { Some(operand(node.inputs[2])?) } else { None };
            let (a, b) = (operand(node.inputs[0])?, operand(node.inputs[1])?);
            matmul(node, out, Product { a, b, bias, alpha: *alpha, order: Order::Ascending })?
        }
        Op::Nn(op) => nn::lower(graph, node, op, out, &operand)?,
        Op::Cast => elementwise(graph, node, tensor, out, sh::elementwise_op::COPY, 0.0, &[operand(node.inputs[0])?])?,
        Op::Select => {
            let [c, a, b] = [operand(node.inputs[0])?, operand(node.inputs[1])?, operand(node.inputs[2])?];
            elementwise(graph, node, tensor, out, sh::elementwise_op::SELECT, 0.0, &[a, b, c])?
        }
        Op::Place => place(node, out, operand(node.inputs[0])?)?,
        Op::Unary(f) => elementwise(graph, node, tensor, out, unary_code(*f), 0.0, &[operand(node.inputs[0])?])?,
        Op::Scale(c) => {
            elementwise(graph, node, tensor, out, sh::elementwise_op::SCALE, *c, &[operand(node.inputs[0])?])?
        }
        Op::Binary(f) => elementwise(
            graph,
            node,
            tensor,
            out,
            binary_code(*f),
            0.0,
            &[operand(node.inputs[0])?, operand(node.inputs[1])?],
        )?,
        Op::Fill(value) => fill(node, out, *value),
        Op::FillFrom { scale } => fill_from(node, out, *scale, operand(node.inputs[0])?)?,
        Op::Reduce { fold, dims } => reduce(node, out, *fold, *dims, operand(node.inputs[0])?)?,
    };
    if let Some(call) = calls.iter().find(|c| c.bindings.len() > caps.max_storage_buffers as usize) {
        return Err(Error::Limit {
            what: format!("storage bindings of kernel `{}`", call.kernel.shader.name),
            need: call.bindings.len() as u64,
            have: u64::from(caps.max_storage_buffers),
        });
    }
    Ok(calls)
}

impl Operand {
    fn new(graph: &Graph, tensor: Tensor, segments: SegmentIndex<'_>) -> Result<Operand> {
        let (root, view) = graph.storage(tensor);
        let shape = graph.node(tensor).shape;
        let content = match &graph.node(root).op {
            Op::Weight { parts, segment } => Source::Weight {
                segment: segments(*segment),
                parts: parts.clone(),
                row: row_elements(&graph.node(root).shape),
            },
            _ => Source::Value(root),
        };
        Ok(Operand { content, view, shape, dtype: graph.dtype(tensor) })
    }

    /// The storage of an operand that must be whole.
    fn whole(&self, op: &'static str) -> Result<Content> {
        match &self.content {
            Source::Value(t) => Ok(Content::Value(*t)),
            Source::Weight { segment, parts, .. } if parts.len() == 1 => {
                Ok(Content::Weight { segment: *segment, weight: parts[0].weight, piece: parts[0].piece })
            }
            Source::Weight { parts, .. } => Err(Error::Shape {
                op,
                reason: format!("the weight is stored in {} pieces, which this op cannot read", parts.len()),
            }),
        }
    }
}

/// Elements of one row (the extents after the first).
fn row_elements(shape: &Shape) -> u64 {
    shape.dims().iter().skip(1).product()
}

fn kernel(shader: &'static sh::Shader, overrides: &[u32]) -> Kernel {
    let mut all = [0; 6];
    all[..overrides.len()].copy_from_slice(overrides);
    Kernel { shader, overrides: all }
}

fn dtype_code(op: &'static str, dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(sh::F32),
        DType::F16 => Ok(sh::F16),
        DType::BF16 => Ok(sh::BF16),
        DType::I32 => Ok(sh::I32),
        DType::U8 => Ok(sh::U8),
        DType::I64 => Ok(sh::I64),
        #[allow(unreachable_patterns)]
        other => Err(Error::Shape { op, reason: format!("{other:?} cannot be computed with") }),
    }
}

fn small(what: &'static str, n: u64) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::Shape { op: what, reason: format!("{n} does not fit a 32-bit index") })
}

fn pack(op: &'static str, values: &[u64]) -> Result<[[u32; 4]; 2]> {
    let mut packed = [[0; 4]; 2];
    for (d, v) in values.iter().enumerate() {
        packed[d / 4][d % 4] = small(op, *v)?;
    }
    Ok(packed)
}
