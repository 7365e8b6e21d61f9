//! Elementwise kernels, folds, fills and placing.

use ebbtide_shaders as sh;

use super::{Call, Operand, dtype_code, kernel, pack, small};
use crate::compile::Content;
use crate::error::{Error, Result};
use crate::graph::{Binary, Fold, Graph, Node, Tensor, Unary};

pub(super) fn elementwise(
    graph: &Graph,
    node: &Node,
    tensor: Tensor,
    out: Content,
    op: u32,
    scalar: f32,
    inputs: &[Operand],
) -> Result<Vec<Call>> {
    const OP: &str = "elementwise";
    let n = node.shape.elements();
    let strides = |x: &Operand| -> Result<[[u32; 4]; 2]> {
        let v = x.view.broadcast(&x.shape, &node.shape);
        pack(OP, &v.strides[..node.shape.rank()])
    };
    let first = &inputs[0];
    let second = inputs.get(1).unwrap_or(first);
    let third = inputs.get(2).unwrap_or(first);
    let p = sh::elementwise::Params {
        groups: small(OP, n.div_ceil(1024))?,
        n: small(OP, n)?,
        rank: node.shape.rank() as u32,
        a_off: small(OP, first.view.offset)?,
        b_off: small(OP, second.view.offset)?,
        c_off: small(OP, third.view.offset)?,
        scalar,
        shape: pack(OP, node.shape.dims())?,
        a_stride: strides(first)?,
        b_stride: strides(second)?,
        c_stride: strides(third)?,
        ..Default::default()
    };
    let codes = [
        op,
        dtype_code(OP, first.dtype)?,
        dtype_code(OP, second.dtype)?,
        dtype_code(OP, third.dtype)?,
        dtype_code(OP, graph.dtype(tensor))?,
    ];
    let (a, b, c) = (first.whole(OP)?, second.whole(OP)?, third.whole(OP)?);
    Ok(vec![Call {
        kernel: kernel(&sh::elementwise::SHADER, &codes),
        bindings: vec![(a, false), (b, false), (c, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: n.div_ceil(1024),
        work: n * 4,
    }])
}

/// A dense tensor into a region of a larger one.
pub(super) fn place(node: &Node, out: Content, x: Operand) -> Result<Vec<Call>> {
    const OP: &str = "place";
    let Some(region) = &node.into else {
        return Err(Error::Shape { op: OP, reason: "there is nothing to write into".into() });
    };
    let n = region.shape.elements();
    let p = sh::place::Params {
        groups: small(OP, n.div_ceil(1024))?,
        n: small(OP, n)?,
        rank: region.shape.rank() as u32,
        a_off: small(OP, x.view.offset)?,
        out_off: small(OP, region.view.offset)?,
        add: u32::from(region.carry),
        shape: pack(OP, region.shape.dims())?,
        out_stride: pack(OP, &region.view.strides[..region.shape.rank()])?,
        ..Default::default()
    };
    Ok(vec![Call {
        kernel: kernel(&sh::place::SHADER, &[]),
        bindings: vec![(x.whole(OP)?, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: n.div_ceil(1024),
        work: n * 2,
    }])
}

pub(super) fn fill(node: &Node, out: Content, value: f32) -> Vec<Call> {
    let n = node.shape.elements();
    let p = sh::fill::Params {
        groups: n.div_ceil(1024) as u32,
        words: n as u32,
        value: value.to_bits(),
        ..Default::default()
    };
    vec![Call {
        kernel: kernel(&sh::fill::SHADER, &[]),
        bindings: vec![(out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: n.div_ceil(1024),
        work: n,
    }]
}

pub(super) fn fill_from(node: &Node, out: Content, scale: f32, s: Operand) -> Result<Vec<Call>> {
    const OP: &str = "fill_from";
    let n = node.shape.elements();
    let p = sh::fill_from::Params {
        groups: small(OP, n.div_ceil(1024))?,
        n: small(OP, n)?,
        s_off: small(OP, s.view.offset)?,
        scale,
        ..Default::default()
    };
    Ok(vec![Call {
        kernel: kernel(&sh::fill_from::SHADER, &[]),
        bindings: vec![(s.whole(OP)?, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: n.div_ceil(1024),
        work: n,
    }])
}

/// Turns of all loops of an invocation that every driver makes.
const MAX_TURNS: u64 = 65_000;

/// Dimensions and strides with neighbours joined where one stride describes both; the order of elements stays.
fn merged(dims: &[u64], strides: &[u64]) -> (Vec<u64>, Vec<u64>) {
    let (mut out, mut steps): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    for (d, s) in dims.iter().zip(strides).filter(|(d, _)| **d != 1) {
        match (out.last_mut(), steps.last_mut()) {
            (Some(outer), Some(step)) if *step == s * d => (*outer, *step) = (*outer * d, *s),
            _ => {
                out.push(*d);
                steps.push(*s);
            }
        }
    }
    (out, steps)
}

pub(super) fn reduce(node: &Node, out: Content, fold: Fold, dims: usize, x: Operand) -> Result<Vec<Call>> {
    const OP: &str = "reduce";
    let kept = x.shape.rank() - dims;
    let (outputs, count) = (node.shape.elements(), x.shape.dims()[kept..].iter().product::<u64>());
    // The geometry is a function of the count alone.
    let few = count <= 32;
    let groups = if few { outputs.div_ceil(256) } else { outputs };
    let code = match fold {
        Fold::Sum => 0,
        Fold::Mean => 1,
        Fold::Max => 2,
        Fold::Argmax => 3,
    };
    let (kept_dims, kept_strides) = merged(&x.shape.dims()[..kept], &x.view.strides[..kept]);
    let (red_dims, red_strides) = merged(&x.shape.dims()[kept..], &x.view.strides[kept..x.shape.rank()]);
    // Mesa's software driver ends all loops of an invocation after 65,535 turns, silently: better refused than wrong.
    let inner = if red_dims.len() > 1 { red_dims.len() as u64 } else { 0 };
    let unrolled = if matches!(fold, Fold::Sum | Fold::Mean) { 4 } else { 1 };
    let turns = count.div_ceil(256 * unrolled) * (1 + unrolled * inner);
    if !few && turns > MAX_TURNS {
        let what = format!("{fold:?} over {count} elements in {} uneven dimensions", red_dims.len());
        return Err(Error::Limit { what, need: turns, have: MAX_TURNS });
    }
    let p = sh::reduce::Params {
        groups: small(OP, groups)?,
        outputs: small(OP, outputs)?,
        count: small(OP, count)?,
        kept_rank: kept_dims.len() as u32,
        red_rank: red_dims.len() as u32,
        a_off: small(OP, x.view.offset)?,
        scale: 1.0 / count as f32,
        kept_shape: pack(OP, &kept_dims)?,
        kept_stride: pack(OP, &kept_strides)?,
        red_shape: pack(OP, &red_dims)?,
        red_stride: pack(OP, &red_strides)?,
        ..Default::default()
    };
    let shader = if few { &sh::reduce_small::SHADER } else { &sh::reduce::SHADER };
    Ok(vec![Call {
        kernel: kernel(shader, &[code, dtype_code(OP, x.dtype)?]),
        bindings: vec![(x.whole(OP)?, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups,
        work: outputs * count,
    }])
}

pub(super) fn unary_code(f: Unary) -> u32 {
    use sh::elementwise_op as op;
    match f {
        Unary::Copy => op::COPY,
        Unary::Neg => op::NEG,
        Unary::Abs => op::ABS,
        Unary::Exp => op::EXP,
        Unary::Log => op::LOG,
        Unary::Sqrt => op::SQRT,
        Unary::Rsqrt => op::RSQRT,
        Unary::Recip => op::RECIP,
        Unary::Tanh => op::TANH,
        Unary::Sigmoid => op::SIGMOID,
        Unary::Relu => op::RELU,
        Unary::Silu => op::SILU,
        Unary::GeluErf => op::GELU_ERF,
        Unary::GeluTanh => op::GELU_TANH,
        Unary::Sin => op::SIN,
        Unary::Cos => op::COS,
    }
}

pub(super) fn binary_code(f: Binary) -> u32 {
    use sh::elementwise_op as op;
    match f {
        Binary::Add => op::ADD,
        Binary::Sub => op::SUB,
        Binary::Mul => op::MUL,
        Binary::Div => op::DIV,
        Binary::Min => op::MIN,
        Binary::Max => op::MAX,
        Binary::Pow => op::POW,
        Binary::Lt => op::LT,
        Binary::Le => op::LE,
        Binary::Eq => op::EQ,
        Binary::TanhGrad => op::TANH_GRAD,
        Binary::SigmoidGrad => op::SIGMOID_GRAD,
        Binary::ReluGrad => op::RELU_GRAD,
        Binary::SiluGrad => op::SILU_GRAD,
        Binary::GeluErfGrad => op::GELU_ERF_GRAD,
        Binary::GeluTanhGrad => op::GELU_TANH_GRAD,
    }
}
