//! From an op to kernels: pure functions of op, shapes and dtypes.
//!
//! A node becomes one or more dispatches over storage that is not yet placed ([`Content`]). Where a weight is cut
//! into row pieces, a product is cut with it: along n the pieces give their own columns, along k each piece carries
//! on from the accumulator that the last one stored, so a cut leaves no trace in any bit.

mod nn;

use ebbtide_shaders as sh;

use crate::caps::Caps;
use crate::compile::{Content, Kernel};
use crate::error::{Error, Result};
use crate::graph::{Binary, Fold, Graph, MAX_RANK, Node, Op, Shape, Tensor, Unary, View, WeightPart};
use crate::weights::DType;

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
    if !matches!(node.op, Op::Fill(_) | Op::Nn(_)) && node.operands().iter().any(|t| graph.node(*t).shape.elements() == 0) {
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
            matmul(node, out, operand(node.inputs[0])?, operand(node.inputs[1])?, bias, *alpha)?
        }
        Op::Nn(op) => nn::lower(graph, node, op, out, &operand)?,
        Op::Cast => elementwise(graph, node, tensor, out, sh::elementwise_op::COPY, 0.0, &[operand(node.inputs[0])?])?,
        Op::Select => {
            let [c, a, b] = [operand(node.inputs[0])?, operand(node.inputs[1])?, operand(node.inputs[2])?];
            elementwise(graph, node, tensor, out, sh::elementwise_op::SELECT, 0.0, &[a, b, c])?
        }
        Op::Place => place(node, out, operand(node.inputs[0])?)?,
        Op::Unary(f) => elementwise(graph, node, tensor, out, unary_code(*f), 0.0, &[operand(node.inputs[0])?])?,
        Op::Scale(c) => elementwise(graph, node, tensor, out, sh::elementwise_op::SCALE, *c, &[operand(node.inputs[0])?])?,
        Op::Binary(f) => {
            elementwise(graph, node, tensor, out, binary_code(*f), 0.0, &[operand(node.inputs[0])?, operand(node.inputs[1])?])?
        }
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
            Op::Weight { parts, segment } => {
                Source::Weight { segment: segments(*segment), parts: parts.clone(), row: row_elements(&graph.node(root).shape) }
            }
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

/// The batch of a product: leading dimensions of the output, merged wherever one stride describes two of them in
/// every operand. Extents with the strides of a, b and c, outermost first.
fn batch(out: &Shape, operands: [(&Shape, &View); 3]) -> Result<Vec<(u64, [u64; 3])>> {
    let rank = out.rank() - 2;
    let mut strides = [[0; MAX_RANK]; 3];
    for (s, (shape, view)) in strides.iter_mut().zip(operands) {
        let mut to = out.dims()[..rank].to_vec();
        to.extend(&shape.dims()[shape.rank() - 2..]);
        *s = view.broadcast(shape, &Shape::new(&to)?).strides;
    }
    let mut merged: Vec<(u64, [u64; 3])> = Vec::new();
    for d in (0..rank).rev() {
        let n = out.dims()[d];
        let here = [strides[0][d], strides[1][d], strides[2][d]];
        if n == 1 {
            continue;
        }
        match merged.last_mut() {
            Some((inner, s)) if (0..3).all(|i| here[i] == s[i] * *inner) => *inner *= n,
            _ => merged.push((n, here)),
        }
    }
    merged.reverse();
    Ok(merged)
}

fn matmul(node: &Node, out: Content, a: Operand, b: Operand, bias: Option<Operand>, alpha: f32) -> Result<Vec<Call>> {
    const OP: &str = "matmul";
    let shape = node.result();
    let c = node.into.as_ref().map_or(View::dense(&shape), |r| r.view);
    let carry = node.into.as_ref().is_some_and(|r| r.carry);
    let rank = shape.rank();
    let (mut m, n) = (shape.dims()[rank - 2], shape.dims()[rank - 1]);
    let (mut c_m, c_n) = (c.strides[rank - 2], c.strides[rank - 1]);
    let k = a.shape.dims()[a.shape.rank() - 1];
    let last_two = |x: &Operand| (x.view.strides[x.shape.rank() - 2], x.view.strides[x.shape.rank() - 1]);
    let ((mut a_m, a_k), (b_k, b_n)) = (last_two(&a), last_two(&b));
    let mut batch = batch(&shape, [(&a.shape, &a.view), (&b.shape, &b.view), (&shape, &c)])?;
    // One matrix for a batch whose rows of `a` follow on evenly: the batch is further rows.
    if let Some((extent, [sa, 0, sc])) = batch.last().copied()
        && (m == 1 || sa == a_m * m && sc == c_m * m)
    {
        (a_m, c_m) = if m == 1 { (sa, sc) } else { (a_m, c_m) };
        m *= extent;
        batch.pop();
    }
    if batch.len() > 2 {
        return Err(Error::Shape { op: OP, reason: format!("the batch of {shape} has more than two uneven dimensions") });
    }
    batch.splice(..0, std::iter::repeat_n((1, [0; 3]), 2 - batch.len()));
    let [(b0, s0), (b1, s1)] = [batch[0], batch[1]];
    let (bias_content, bias_code, bias_off) = match &bias {
        Some(x) => (Some(x.whole(OP)?), dtype_code(OP, x.dtype)?, x.view.offset),
        None => (None, 0, 0),
    };
    if let Some(x) = &bias
        && x.shape.elements() > 1
        && x.view.strides[x.shape.rank() - 1] != 1
    {
        return Err(Error::Shape { op: OP, reason: "the bias must lie densely".into() });
    }

    let base = sh::matmul::Params {
        m: small(OP, m)?,
        n: small(OP, n)?,
        k: small(OP, k)?,
        b0: small(OP, b0)?,
        b1: small(OP, b1)?,
        a_off: small(OP, a.view.offset)?,
        a_b0: small(OP, s0[0])?,
        a_b1: small(OP, s1[0])?,
        a_m: small(OP, a_m)?,
        a_k: small(OP, a_k)?,
        b_off: small(OP, b.view.offset)?,
        bb0: small(OP, s0[1])?,
        bb1: small(OP, s1[1])?,
        b_k: small(OP, b_k)?,
        b_n: small(OP, b_n)?,
        c_b0: small(OP, s0[2])?,
        c_b1: small(OP, s1[2])?,
        c_off: small(OP, c.offset)?,
        c_m: small(OP, c_m)?,
        c_n: small(OP, c_n)?,
        carry: u32::from(carry),
        bias_off: small(OP, bias_off)?,
        alpha,
        ..Default::default()
    };
    let a_content = a.whole(OP)?;
    let codes = [dtype_code(OP, a.dtype)?, dtype_code(OP, b.dtype)?, bias_code];
    let call = |mut p: sh::matmul::Params, b: Content, last: bool| {
        p.has_bias = u32::from(last && bias_content.is_some());
        let tiles = u64::from(p.m).div_ceil(32) * u64::from(p.n).div_ceil(32);
        let groups = b0 * b1 * tiles;
        p.groups = groups as u32;
        Call {
            kernel: kernel(&sh::matmul::SHADER, &codes),
            bindings: vec![(a_content, false), (b, false), (bias_content.filter(|_| last).unwrap_or(b), false), (out, true)],
            params: bytemuck::bytes_of(&p).to_vec(),
            groups,
            work: b0 * b1 * u64::from(p.m) * u64::from(p.n) * u64::from(p.k),
        }
    };
    match &b.content {
        Source::Value(t) => Ok(vec![call(base, Content::Value(*t), true)]),
        Source::Weight { segment, parts, .. } if parts.len() == 1 => {
            let p = &parts[0];
            Ok(vec![call(base, Content::Weight { segment: *segment, weight: p.weight, piece: p.piece }, true)])
        }
        Source::Weight { segment, parts, row } => {
            if b.view.offset != 0 || b0 * b1 != 1 || alpha != 1.0 {
                return Err(Error::Shape { op: OP, reason: "a weight in pieces must be read whole, without batch or factor".into() });
            }
            let mut calls = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                let content = Content::Weight { segment: *segment, weight: part.weight, piece: part.piece };
                let mut p = base;
                let last = i + 1 == parts.len();
                if b_k == *row {
                    // Rows are k: go on from the stored accumulator; the bias comes with the last piece.
                    p.k = small(OP, part.rows)?;
                    p.a_off = small(OP, a.view.offset + part.first_row * a_k)?;
                    p.carry = u32::from(carry || i > 0);
                    calls.push(call(p, content, last));
                } else if b_n == *row {
                    // Rows are n: each piece gives its own columns.
                    p.n = small(OP, part.rows)?;
                    p.c_off = small(OP, c.offset + part.first_row * c_n)?;
                    p.bias_off = small(OP, bias_off + part.first_row)?;
                    calls.push(call(p, content, true));
                } else {
                    return Err(Error::Shape { op: OP, reason: "a weight in pieces must be read by rows or columns".into() });
                }
            }
            Ok(calls)
        }
    }
}

fn elementwise(graph: &Graph, node: &Node, tensor: Tensor, out: Content, op: u32, scalar: f32, inputs: &[Operand]) -> Result<Vec<Call>> {
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
fn place(node: &Node, out: Content, x: Operand) -> Result<Vec<Call>> {
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

fn fill(node: &Node, out: Content, value: f32) -> Vec<Call> {
    let n = node.shape.elements();
    let p = sh::fill::Params { groups: n.div_ceil(1024) as u32, words: n as u32, value: value.to_bits(), ..Default::default() };
    vec![Call {
        kernel: kernel(&sh::fill::SHADER, &[]),
        bindings: vec![(out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: n.div_ceil(1024),
        work: n,
    }]
}

fn fill_from(node: &Node, out: Content, scale: f32, s: Operand) -> Result<Vec<Call>> {
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

fn reduce(node: &Node, out: Content, fold: Fold, dims: usize, x: Operand) -> Result<Vec<Call>> {
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
    let shader = if few { &sh::reduce_small::SHADER } else { &sh::reduce::SHADER };
    Ok(vec![Call {
        kernel: kernel(shader, &[code, dtype_code(OP, x.dtype)?]),
        bindings: vec![(x.whole(OP)?, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups,
        work: outputs * count,
    }])
}

fn pack(op: &'static str, values: &[u64]) -> Result<[[u32; 4]; 2]> {
    let mut packed = [[0; 4]; 2];
    for (d, v) in values.iter().enumerate() {
        packed[d / 4][d % 4] = small(op, *v)?;
    }
    Ok(packed)
}

fn unary_code(f: Unary) -> u32 {
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

fn binary_code(f: Binary) -> u32 {
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
