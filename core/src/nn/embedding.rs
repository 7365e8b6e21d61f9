//! Rows of a table by integer ids: from a tensor on the device, or straight from the file.

use super::{NnOp, Vjp, adjacent, dense_f32, integers, shape_error};
use crate::error::Result;
use crate::graph::{Graph, Shape, Tensor};
use crate::weights::{DType, Segment};

/// `table[ids]`; table `[rows, d]` in any float dtype, ids `[..]`, result `[.., d]` in f32. An id outside gives zeros.
pub fn embedding(g: &mut Graph, table: Tensor, ids: Tensor) -> Result<Tensor> {
    const OP: &str = "embedding";
    integers(g, OP, "ids", ids)?;
    let (rows, of) = (g.shape(table)?, g.shape(ids)?);
    if rows.rank() != 2 {
        return Err(shape_error(OP, format!("the table has shape {rows}, not two dimensions")));
    }
    let mut dims = of.dims().to_vec();
    dims.push(rows.dims()[1]);
    let (table, ids) = (adjacent(g, table)?, adjacent(g, ids)?);
    Ok(g.nn(NnOp::Gather, vec![table, ids], Shape::new(&dims)?, &[]).0)
}

/// As [`embedding`], of a stored table that is never on the device: only the rows of the ids (an input) are read, from
/// the file, in every run.
pub fn embedding_rows(g: &mut Graph, segment: &Segment, name: &str, ids: Tensor) -> Result<Tensor> {
    let rows = g.load_rows(segment, name, ids)?;
    let rows = g.cast(rows, DType::F32)?;
    let mut dims = g.shape(ids)?.dims().to_vec();
    dims.push(g.shape(rows)?.dims()[1]);
    g.reshape(rows, &dims)
}

pub(super) fn vjp(g: &mut Graph, call: &Vjp<'_>) -> Result<Vec<Option<Tensor>>> {
    let (table, ids) = (g.shape(call.inputs[0])?, call.inputs[1]);
    let dy = dense_f32(g, call.dy)?;
    Ok(vec![call.needed[0].then(|| g.nn(NnOp::GatherGrad, vec![ids, dy], table, &[]).0), None])
}
