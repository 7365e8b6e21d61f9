//! The operations a graph is made of.
//!
//! An op is a definition of bits, not of a kernel: what is accumulated in which order is fixed here, and a
//! kernel variant may only differ in speed (docs/numerics.md).

use std::sync::Arc;

use super::{HookWhen, Shape, Tensor, View};
use crate::event::Pass;
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
}
