//! Counter-based dropout: a mask that depends on nothing but its counters.
//!
//! The random word of an element is a function of (seed, site; optimizer step, row id, position, feature). A mask from a
//! generator's state would depend on bucket, micro-batch, recomputation and resume.

use super::{NnOp, Vjp, dense_f32, integers, last_extent, shape_error};
use crate::error::{Error, Result};
use crate::graph::{Graph, Tensor};

/// What a dropout's mask depends on, next to step, row ids and positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share of elements that become zero, in [0, 1).
    pub probability: f32,
    /// Seed of the run.
    pub seed: u32,
    /// Which dropout: layer and place in it.
    pub site: u32,
    /// Position of a row's first entry.
    pub first_position: u32,
}

/// `x / (1 − p)` where the element's random word says so, else 0. x `[b, .., n]`, ids `[b]` (identity of each row) and
/// step `[1]` (the optimizer step) are 32-bit integers.
pub fn dropout(g: &mut Graph, x: Tensor, ids: Tensor, step: Tensor, spec: Dropout) -> Result<Tensor> {
    const OP: &str = "dropout";
    if !(0.0..1.0).contains(&spec.probability) {
        return Err(Error::Invalid {
            what: OP.into(),
            reason: format!("probability {} is not in [0, 1)", spec.probability),
        });
    }
    integers(g, OP, "row ids", ids)?;
    integers(g, OP, "the step", step)?;
    let (shape, rows) = (g.shape(x)?, g.shape(ids)?.elements());
    last_extent(OP, &shape)?;
    if shape.rank() < 2 || shape.dims()[0] != rows || g.shape(step)?.elements() != 1 {
        return Err(shape_error(OP, format!("{shape} with {rows} row ids: needs one id a row and one step")));
    }
    let (x, ids, step) = (dense_f32(g, x)?, g.dense(ids)?, g.dense(step)?);
    Ok(g.nn(NnOp::Dropout(spec), vec![x, ids, step], shape, &[]).0)
}

pub(super) fn vjp(g: &mut Graph, call: &Vjp<'_>, spec: Dropout) -> Result<Vec<Option<Tensor>>> {
    let (ids, step) = (call.inputs[1], call.inputs[2]);
    let dy = dense_f32(g, call.dy)?;
    let shape = g.shape(dy)?;
    Ok(vec![Some(g.nn(NnOp::Dropout(spec), vec![dy, ids, step], shape, &[]).0), None, None])
}
