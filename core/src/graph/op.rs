//! The operations a graph is made of.
//!
//! An op is a definition of bits, not of a kernel: what is accumulated in which order is fixed here, and a
//! kernel variant may only differ in speed (docs/numerics.md).

use std::sync::Arc;

use super::{HookWhen, Shape, Tensor, View};
use crate::compile::Category;
use crate::event::Pass;
use crate::nn::NnOp;
use crate::weights::{SegmentId, WeightId};

/// An elementwise function of up to three broadcast operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the functions
pub enum Unary {
    Copy,
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Recip,
    Tanh,
    Sigmoid,
    Relu,
    Silu,
    GeluErf,
    GeluTanh,
    Sin,
    Cos,
}

/// An elementwise function of two broadcast operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    Pow,
    Lt,
    Le,
    Eq,
    /// `(y, dy)` → `dy · (1 − y²)`.
    TanhGrad,
    /// `(y, dy)` → `dy · y · (1 − y)`.
    SigmoidGrad,
    /// `(x, dy)` → `dy` where `x > 0`, else 0.
    ReluGrad,
    SiluGrad,
    GeluErfGrad,
    GeluTanhGrad,
}

/// A fold over dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Fold {
    Sum,
    Mean,
    Max,
    Argmax,
}

/// What a node does.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Given by the caller at each run.
    Input {
        /// Its name.
        name: Arc<str>,
    },
    /// A frozen weight, loaded with its segment and evicted with it.
    Weight {
        /// The weights it consists of: one, or the row pieces of one in ascending order.
        parts: Arc<[WeightPart]>,
        /// The segment that brings it.
        segment: SegmentId,
    },
    /// Rows of a weight, by the ids of the first operand (an input, known to the host): read from the file each time,
    /// kept in the file's dtype. `[t]` ids give `[t, columns]`.
    LoadRows {
        /// The weight.
        weight: WeightId,
    },
    /// Storage of its own that other nodes write into; its content is undefined.
    Empty,
    /// Storage that outlives a run and is shared by all programs that name it.
    State(Arc<StateSpec>),
    /// A constant that was computed before the first step (index into the set's folds).
    Folded(u32),
    /// A further result of the node that is its operand.
    Extra,
    /// The value of the first operand, with a backward of the caller's own for the others.
    Custom(u32),
    /// One of the fused operations.
    Nn(NnOp),
    /// A dtype conversion, round to nearest even; the node's dtype is the target.
    Cast,
    /// `cond ≠ 0 ? a : b`, broadcast; operands cond, a, b.
    Select,
    /// Writes its first operand into a region of the last.
    Place,
    /// The same elements in another arrangement; owns no storage.
    View(View),
    /// As [`Op::View`] of the whole, and calls the user's hook at this place of the stream.
    Hook {
        /// Name given to the callback.
        name: Arc<str>,
        /// The moment.
        when: HookWhen,
        /// Whether the backward pass is to call the hook as well, with the gradient.
        mirrored: bool,
    },
    /// `[.., m, k] · [.., k, n] (+ bias[n])`: one f32 accumulator an output, over ascending k by `fma`; bias last.
    /// Operands may be any view, so every transposed form is this op.
    MatMul {
        /// Whether a third input is the bias.
        bias: bool,
        /// Factor of the product (the carried accumulator included), applied before the bias.
        alpha: f32,
    },
    /// One operand, elementwise.
    Unary(Unary),
    /// Two operands, elementwise.
    Binary(Binary),
    /// `x · scalar`.
    Scale(f32),
    /// Every element is the constant.
    Fill(f32),
    /// Every element is `scale · s`, with `s` the one element of the input.
    FillFrom {
        /// The factor.
        scale: f32,
    },
    /// Folds the trailing `dims` dimensions of the input (which a view brought there).
    Reduce {
        /// The function.
        fold: Fold,
        /// How many trailing dimensions are folded.
        dims: usize,
    },
}

/// A stored piece of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPart {
    /// The weight.
    pub weight: WeightId,
    /// Which of its pieces.
    pub piece: u32,
    /// First row of this part in the graph's tensor.
    pub first_row: u64,
    /// Rows of this part.
    pub rows: u64,
}

/// Persistent storage: adapters, optimizer moments, gradients, caches. f32.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpec {
    /// Its name, the same in all programs that share it.
    pub name: Arc<str>,
    /// What its bytes count as.
    pub category: Category,
    /// Scratch is undefined at home and may be written anywhere; all other state is written by updates only, which
    /// are the last actions of a plan.
    pub scratch: bool,
}

/// A part of a larger tensor that a node writes into. The larger tensor is the node's last operand, and the node's
/// value is that tensor with the part written.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// Shape of the part.
    pub shape: Shape,
    /// Where its elements lie in the larger tensor's storage.
    pub view: View,
    /// Whether accumulation starts from what is stored there, instead of from zero.
    pub carry: bool,
}

/// A node: an op on values, giving one value.
#[derive(Clone, Debug)]
pub struct Node {
    /// What it does.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<Tensor>,
    /// Shape of its value.
    pub shape: Shape,
    /// Pass it belongs to.
    pub pass: Pass,
    /// By-hand visit it belongs to, where there is one.
    pub visit: Option<u32>,
    /// Block marked for recomputation that it belongs to, where there is one.
    pub block: Option<u32>,
    /// Where it writes, if not into storage of its own.
    pub into: Option<Region>,
    /// Its further results ([`Op::Extra`] nodes).
    pub extras: Vec<Tensor>,
}

impl Node {
    /// The operands that are read for their values: without the tensor that is written into.
    pub fn operands(&self) -> &[Tensor] {
        &self.inputs[..self.inputs.len() - usize::from(self.into.is_some())]
    }

    /// Shape of what is computed: the region's where the node writes into a larger tensor.
    pub fn result(&self) -> Shape {
        self.into.as_ref().map_or(self.shape, |r| r.shape)
    }
}
