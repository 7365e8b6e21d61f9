//! What ends a training step: the finite test, the global norm, clipping and AdamW, without a readback in between.
//!
//! Three control words carry the decision on the device: word 0 is set by anything that is not finite, and then the update
//! changes nothing; word 1 is the factor of clipping, word 2 the norm. What changes from step to step is an input, since
//! parameters of kernels are written once.

use super::{NnOp, shape_error};
use crate::error::{Error, Result};
use crate::graph::{Graph, Op, Region, Shape, Tensor, View};

/// Name of the input that holds what changes from step to step.
pub const HYPER_INPUT: &str = "hyper";
/// Elements of that input.
pub const HYPER: u64 = 8;

/// Bits of control word 0.
const BIT_LOSS: u32 = 2;
const BIT_GRADIENT: u32 = 4;

/// AdamW with decoupled weight decay and clipping by the global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global norm of the gradients; 0: no clipping.
    pub max_norm: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, max_norm: 0.0 }
    }
}

impl AdamW {
    /// The input [`HYPER_INPUT`] of a step (counted from 1) at a learning rate, computed in f64.
    pub fn hyper(&self, rate: f64, step: u64) -> [f32; HYPER as usize] {
        let unbias = |beta: f64| (1.0 / (1.0 - beta.powf(step.max(1) as f64))) as f32;
        let decay = (1.0 - rate * self.weight_decay) as f32;
        [rate as f32, decay, unbias(self.beta1), unbias(self.beta2), 0.0, 0.0, 0.0, 0.0]
    }

    fn check(&self) -> Result<()> {
        let decays = [self.beta1, self.beta2].iter().all(|b| (0.0..1.0).contains(b));
        let rest = [self.eps, self.weight_decay, self.max_norm].iter().all(|x| x.is_finite() && *x >= 0.0);
        if decays && rest {
            return Ok(());
        }
        let reason = "decays of moments lie in [0, 1), all else is finite and not negative".into();
        Err(Error::Invalid { what: format!("{self:?}"), reason })
    }
}

/// Control words after looking at the loss and the gradient arrays.
pub(super) fn control(g: &mut Graph, loss: Tensor, grads: &[Tensor], max_norm: f64) -> Result<Tensor> {
    let words = Shape::new(&[3])?;
    let mut control = g.fill(words, 0.0);
    let write = |g: &mut Graph, op: NnOp, x: Tensor, into: Tensor| {
        let region = Region { shape: words, view: View::dense(&words), carry: true };
        g.push_into(Op::Nn(op), vec![x], into, region)
    };
    let loss = g.dense(loss)?;
    control = write(g, NnOp::Nonfinite { bits: BIT_LOSS }, loss, control)?;
    let blocks = grads.iter().map(|t| Ok(g.shape(*t)?.elements().div_ceil(1024))).collect::<Result<Vec<u64>>>()?;
    let total = Shape::new(&[blocks.iter().sum()])?;
    let mut partials = g.empty(total);
    let mut at = 0;
    for (x, n) in grads.iter().zip(&blocks) {
        control = write(g, NnOp::Nonfinite { bits: BIT_GRADIENT }, *x, control)?;
        let shape = Shape::new(&[*n])?;
        let region = Region { shape, view: View { offset: at, strides: shape.dense_strides() }, carry: false };
        partials = g.push_into(Op::Nn(NnOp::Sumsq), vec![*x], partials, region)?;
        at += n;
    }
    write(g, NnOp::ClipScale { max_norm: max_norm as f32 }, partials, control)
}

/// The state arrays of one cut.
pub(super) struct Arrays {
    /// The gradients, as last written.
    pub grads: Tensor,
    /// The parameters' values.
    pub values: Tensor,
    /// First moment.
    pub m: Tensor,
    /// Second moment.
    pub v: Tensor,
}

/// One AdamW step over each of the arrays, as updates.
pub(super) fn adamw(g: &mut Graph, spec: &AdamW, arrays: &[Arrays], hyper: Tensor, control: Tensor) -> Result<()> {
    spec.check()?;
    if g.shape(hyper)?.dims() != [HYPER] {
        return Err(shape_error("adamw", format!("`{HYPER_INPUT}` has shape {}, not [{HYPER}]", g.shape(hyper)?)));
    }
    for a in arrays {
        let op = NnOp::AdamW { beta1: spec.beta1, beta2: spec.beta2, eps: spec.eps };
        g.update(op, vec![a.grads, control, hyper, a.values, a.m, a.v]);
    }
    Ok(())
}
