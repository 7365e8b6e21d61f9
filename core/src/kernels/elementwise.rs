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
        return Err(Error::Shape {
            op: OP,
            reason: "there is nothing to write into".into(),
        });
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
    let p = sh::reduce::Params {
        groups: small(OP, groups)?,
        outputs: small(OP, outputs)?,
        count: small(OP, count)?,
        kept_rank: kept as u32,
        red_rank: dims as u32,
        a_off: small(OP, x.view.offset)?,
        scale: 1.0 / count as f32,
        kept_shape: pack(OP, &x.shape.dims()[..kept])?,
        kept_stride: pack(OP, &x.view.strides[..kept])?,
        red_shape: pack(OP, &x.shape.dims()[kept..])?,
        red_stride: pack(OP, &x.view.strides[kept..x.shape.rank()])?,
        ..Default::default()
    };
    let shader = if few {
        &sh::reduce_small::SHADER
    } else {
        &sh::reduce::SHADER
    };
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
