//! Linear layers, with and without an adapter.
//!
//! Weights stand as Hugging Face stores them, `[out, in]`, and are read transposed through strides: no layout is folded.
//! With an adapter the product starts from the adapter's part and the bias comes last; adding the two parts afterwards
//! would round once more, and would make the bits depend on where a weight is cut.

use super::{NnOp, Vjp, dense_f32, shape_error};
use crate::error::Result;
use crate::graph::{CustomGrad, Graph, Op, Shape, Tensor};
use crate::weights::DType;

/// Up to so many rows in all, a linear layer without an adapter is a matvec, another op than matmul.
pub const MATVEC_ROWS: u64 = 4;

/// A low-rank adapter in PEFT's layout.
#[derive(Clone, Copy, Debug)]
pub struct Lora {
    /// A, `[r, in]`.
    pub a: Tensor,
    /// B, `[out, r]`.
    pub b: Tensor,
    /// Factor of the adapter's part: alpha / r.
    pub scale: f32,
    /// What the adapter reads instead of the layer's operand: that operand after dropout.
    pub input: Option<Tensor>,
}

/// `x · Wᵀ + bias`; x `[.., in]`, W `[out, in]` in any float dtype, bias `[out]`, result `[.., out]`.
pub fn linear(g: &mut Graph, x: Tensor, w: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
    const OP: &str = "linear";
    let (rows, dims) = fits(g, OP, x, w, bias)?;
    let out = dims[dims.len() - 1];
    let wt = g.transpose(w)?;
    let whole = pieces(g, w) == 1;
    if rows > MATVEC_ROWS || !whole || g.dtype(x) != DType::F32 {
        if dims.len() > 1 {
            return g.matmul(x, wt, bias);
        }
        let x = flat(g, x, rows)?;
        let y = g.matmul(x, wt, bias)?;
        return g.reshape(y, &dims);
    }
    let mut inputs = vec![flat(g, x, rows)?, wt];
    inputs.extend(bias);
    let y = g.nn(NnOp::Matvec { bias: bias.is_some() }, inputs, Shape::new(&[rows, out])?, &[]).0;
    g.reshape(y, &dims)
}

/// `s · ((x · Aᵀ) · Bᵀ) + x · Wᵀ + bias`, as one op with a gradient of its own. x `[.., in]`, W `[out, in]`.
pub fn linear_lora(g: &mut Graph, x: Tensor, w: Tensor, bias: Option<Tensor>, lora: Lora) -> Result<Tensor> {
    const OP: &str = "linear_lora";
    let (rows, dims) = fits(g, OP, x, w, bias)?;
    let (sa, sb, sw) = (g.shape(lora.a)?, g.shape(lora.b)?, g.shape(w)?);
    let rank = sa.dims().first().copied().unwrap_or(0);
    if sa.dims() != [rank, sw.dims()[1]] || sb.dims() != [sw.dims()[0], rank] {
        return Err(shape_error(OP, format!("adapter matrices {sa} and {sb} do not fit a weight of {sw}")));
    }
    if let Some(own) = lora.input
        && g.shape(own)? != g.shape(x)?
    {
        return Err(shape_error(OP, format!("the adapter reads {}, the layer {}", g.shape(own)?, g.shape(x)?)));
    }
    let scale = lora.scale;
    let mut inputs = vec![flat(g, x, rows)?, w, lora.a, lora.b];
    if let Some(own) = lora.input {
        inputs.push(flat(g, own, rows)?);
    }
    let own = lora.input.map(|_| 4);
    inputs.extend(bias);
    let bias = bias.map(|_| inputs.len() - 1);
    let y = g.custom(
        &inputs,
        |g, i| {
            let t = low(g, i[own.unwrap_or(0)], i[2])?;
            let bt = g.transpose(i[3])?;
            let start = g.scaled_matmul(t, bt, None, scale)?;
            let wt = g.transpose(i[1])?;
            g.matmul_from(start, i[0], wt, bias.map(|k| i[k]))
        },
        move |g, call| lora_vjp(g, call, scale, own, bias),
    )?;
    g.reshape(y, &dims)
}

/// `x · Aᵀ`.
fn low(g: &mut Graph, x: Tensor, a: Tensor) -> Result<Tensor> {
    let at = g.transpose(a)?;
    g.matmul(x, at, None)
}

fn lora_vjp(
    g: &mut Graph,
    call: CustomGrad<'_>,
    scale: f32,
    own: Option<usize>,
    bias: Option<usize>,
) -> Result<Vec<Option<Tensor>>> {
    let [x, w, a, b] = [call.inputs[0], call.inputs[1], call.inputs[2], call.inputs[3]];
    let read = call.inputs[own.unwrap_or(0)];
    let (dy, needed) = (call.grad, call.needed);
    let mut parts = vec![None; call.inputs.len()];
    let dt = g.scaled_matmul(dy, b, None, scale)?;
    // x · Aᵀ once more instead of kept: r columns are cheap, and a block that is computed again keeps nothing.
    let scaled = if needed[3] {
        let t = low(g, read, a)?;
        Some(g.scale(t, scale)?)
    } else {
        None
    };
    let dyt = g.transpose(dy)?;
    if needed[0] {
        parts[0] = Some(match own {
            None => {
                let start = g.matmul(dt, a, None)?;
                g.matmul_from(start, dy, w, None)?
            }
            Some(_) => g.matmul(dy, w, None)?,
        });
    }
    if needed[1] {
        parts[1] = Some(g.matmul(dyt, x, None)?);
    }
    if needed[2] {
        let dtt = g.transpose(dt)?;
        parts[2] = Some(g.matmul(dtt, read, None)?);
    }
    if let Some(scaled) = scaled {
        parts[3] = Some(g.matmul(dyt, scaled, None)?);
    }
    if let Some(k) = own.filter(|k| needed[*k]) {
        parts[k] = Some(g.matmul(dt, a, None)?);
    }
    if let Some(k) = bias.filter(|k| needed[*k]) {
        let shape = g.shape(call.inputs[k])?;
        let dy = dense_f32(g, dy)?;
        parts[k] = Some(g.nn(NnOp::NormBiasGrad, vec![dy, dy, dy], shape, &[]).0);
    }
    Ok(parts)
}

pub(super) fn matvec_vjp(g: &mut Graph, call: &Vjp<'_>) -> Result<Vec<Option<Tensor>>> {
    let (x, wt, dy) = (call.inputs[0], call.inputs[1], call.dy);
    let mut parts = vec![None; call.inputs.len()];
    if call.needed[0] {
        let w = g.transpose(wt)?;
        parts[0] = Some(g.matmul(dy, w, None)?);
    }
    if call.needed[1] {
        let xt = g.transpose(x)?;
        parts[1] = Some(g.matmul(xt, dy, None)?);
    }
    if let Some(bias) = call.inputs.get(2).filter(|_| call.needed[2]) {
        let shape = g.shape(*bias)?;
        let dy = dense_f32(g, dy)?;
        parts[2] = Some(g.nn(NnOp::NormBiasGrad, vec![dy, dy, dy], shape, &[]).0);
    }
    Ok(parts)
}

/// Rows of x in all, and the shape of the result.
fn fits(g: &Graph, op: &'static str, x: Tensor, w: Tensor, bias: Option<Tensor>) -> Result<(u64, Vec<u64>)> {
    let (sx, sw) = (g.shape(x)?, g.shape(w)?);
    let [out, inner] = *sw.dims() else {
        return Err(shape_error(op, format!("a weight of {sw} has not two dimensions (out, in)")));
    };
    let Some((last, lead)) = sx.dims().split_last().filter(|(last, _)| **last == inner) else {
        return Err(shape_error(op, format!("rows of {sx} do not fit a weight of {sw}")));
    };
    debug_assert_eq!(*last, inner);
    if let Some(bias) = bias
        && g.shape(bias)?.dims() != [out]
    {
        return Err(shape_error(op, format!("a bias of {} does not fit a weight of {sw}", g.shape(bias)?)));
    }
    let mut dims = lead.to_vec();
    dims.push(out);
    Ok((lead.iter().product(), dims))
}

fn flat(g: &mut Graph, x: Tensor, rows: u64) -> Result<Tensor> {
    let last = g.shape(x)?.dims().last().copied().unwrap_or(1);
    let x = if g.dtype(x) == DType::F32 { x } else { dense_f32(g, x)? };
    g.reshape(x, &[rows, last])
}

/// Pieces that a weight is stored in.
fn pieces(g: &Graph, w: Tensor) -> usize {
    match &g.node(g.storage(w).0).op {
        Op::Weight { parts, .. } => parts.len(),
        _ => 1,
    }
}
