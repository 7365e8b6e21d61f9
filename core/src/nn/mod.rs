//! Fused operations of transformers and of training, as nodes of a graph with gradients of their own.
//!
//! One family, one file: what it adds to a [`Graph`], and its gradient. The kernels stand in `kernels/nn.rs`,
//! `kernels/train.rs` and in the shaders crate, where each has a CPU twin. What is added in which order is fixed by the
//! op and follows from shapes alone (docs/numerics.md).

mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
mod linear;
mod norm;
mod optimizer;
mod rope;
mod softmax;
mod train;

pub use attention::{Attention, append, attention};
pub use cross_entropy::{
    Blocks, TOKEN_BLOCK, VOCABULARY_BLOCK, VOCABULARY_CHUNK, cross_entropy, token_losses, token_losses_in,
};
pub use dropout::{Dropout, dropout};
pub use embedding::{embedding, embedding_rows};
pub use linear::{Lora, MATVEC_ROWS, linear, linear_lora};
pub use norm::{layer_norm, rms_norm};
pub use optimizer::{AdamW, HYPER, HYPER_INPUT};
pub use rope::{Rope, RopeScaling, rope, rope_tables};
pub use softmax::softmax;
pub use train::{CONTROL, Param, Params, Part, Trainable, train_part, train_part_with, train_step};

use crate::error::{Error, Result};
use crate::graph::{Graph, Shape, Tensor};
use crate::weights::DType;

/// A fused operation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)] // each is described where its family builds it
pub enum NnOp {
    /// A matrix product over descending k. Operands a `[m, k]`, b `[k, n]`.
    MatmulDescending,
    /// A product of few rows. Operands x `[m, k]`, W `[k, n]`, perhaps a bias `[n]`.
    Matvec {
        bias: bool,
    },
    Softmax,
    /// Operands y, dy.
    SoftmaxGrad,
    /// Operands x, w.
    RmsNorm {
        eps: f32,
        plus: f32,
    },
    /// Operands x, w, dy.
    RmsNormGrad {
        eps: f32,
        plus: f32,
    },
    /// Operands x, w, perhaps a bias.
    LayerNorm {
        eps: f32,
        bias: bool,
    },
    /// Operands x, w, dy.
    LayerNormGrad {
        eps: f32,
    },
    /// Mean (0 for an rms norm) and reciprocal deviation of every row of x.
    NormStats {
        eps: f32,
        layer: bool,
    },
    /// Operands x, stats, dy.
    NormWeightGrad,
    /// Operands dy, stats, dy.
    NormBiasGrad,
    /// Operands table, ids.
    Gather,
    /// Operands ids, dy.
    GatherGrad,
    /// Operands x, cosines, sines.
    Rope {
        interleaved: bool,
        inverse: bool,
    },
    /// Operands q, k, v, rows; a further result: lse.
    Attention(Attention),
    /// Operands x, rows; writes into a cache.
    Append,
    /// Operands o, do, lse.
    AttentionDelta,
    /// Operands q, k, v, do, stats, rows.
    AttentionDq(Attention),
    /// As `AttentionDq`; gives dk, and dv as a further result.
    AttentionDkv(Attention),
    /// Operands logits, labels; writes into the running stats.
    CeLse {
        first: u32,
        first_row: u32,
        start: bool,
    },
    /// Operands stats, labels.
    CeLoss,
    /// Operands logits, stats, labels, dloss.
    CeGrad {
        first: u32,
        first_row: u32,
    },
    /// Operands x, row ids, step.
    Dropout(Dropout),
    /// Sums of squares by blocks; writes into the partials.
    Sumsq,
    /// Operand partials; writes into the control words.
    ClipScale {
        max_norm: f32,
    },
    /// Writes bits into control word 0 where an element is not finite.
    Nonfinite {
        bits: u32,
    },
    /// Operands gradients, control, hyper, values, m, v; writes the last three.
    AdamW {
        beta1: f64,
        beta2: f64,
        eps: f64,
    },
}

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
    pub(crate) fn vjp(&self, g: &mut Graph, call: &Vjp<'_>) -> Result<Vec<Option<Tensor>>> {
        match self {
            NnOp::Matvec { .. } => linear::matvec_vjp(g, call),
            NnOp::Softmax => softmax::vjp(g, call),
            NnOp::RmsNorm { eps, plus } => norm::rms_vjp(g, call, *eps, *plus),
            NnOp::LayerNorm { eps, .. } => norm::layer_vjp(g, call, *eps),
            NnOp::Gather => embedding::vjp(g, call),
            NnOp::Rope { interleaved, inverse } => rope::vjp(g, call, *interleaved, *inverse),
            NnOp::Attention(spec) => attention::vjp(g, call, *spec),
            NnOp::Dropout(spec) => dropout::vjp(g, call, *spec),
            _ => Err(Error::Invalid { what: "gradient".into(), reason: format!("{self:?} has no gradient here") }),
        }
    }

    /// Whether the kernel can write into a (dense) region of a larger tensor, going on from what is stored there.
    pub(crate) fn takes_region(&self) -> bool {
        matches!(self, NnOp::NormWeightGrad | NnOp::NormBiasGrad | NnOp::GatherGrad)
    }
}

fn shape_error(op: &'static str, reason: String) -> Error {
    Error::Shape { op, reason }
}

/// `x` in f32, its elements one after another from the storage's first.
fn dense_f32(g: &mut Graph, x: Tensor) -> Result<Tensor> {
    if g.dtype(x) == DType::F32 { g.dense(x) } else { g.unary(crate::graph::Unary::Copy, x) }
}

/// `x` in any dtype, its elements one after another from anywhere.
fn adjacent(g: &mut Graph, x: Tensor) -> Result<Tensor> {
    let shape = g.shape(x)?;
    if g.storage(x).1.is_dense(&shape) { Ok(x) } else { g.dense(x) }
}

/// `x` in f32 with its last dimension's elements one after another.
fn adjacent_features(g: &mut Graph, x: Tensor) -> Result<Tensor> {
    let shape = g.shape(x)?;
    let last = shape.rank().saturating_sub(1);
    let fits = shape.rank() == 0 || shape.dims()[last] <= 1 || g.storage(x).1.strides[last] == 1;
    if fits && g.dtype(x) == DType::F32 { Ok(x) } else { g.unary(crate::graph::Unary::Copy, x) }
}

/// Refuses a tensor that is not of 32-bit integers.
fn integers(g: &Graph, op: &'static str, what: &str, x: Tensor) -> Result<()> {
    g.shape(x)?;
    if g.dtype(x) != DType::I32 {
        return Err(shape_error(op, format!("{what} must be 32-bit integers, not {:?}", g.dtype(x))));
    }
    Ok(())
}

/// The extent of the last dimension; a scalar has none.
fn last_extent(op: &'static str, shape: &Shape) -> Result<u64> {
    shape.dims().last().copied().ok_or_else(|| shape_error(op, "needs at least one dimension".into()))
}
