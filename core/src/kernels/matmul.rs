//! Products: from views and stored pieces to strides and carried accumulators.

use ebbtide_shaders as sh;

use super::{Call, Operand, Source, dtype_code, kernel, small};
use crate::compile::{Content, Kernel};
use crate::error::{Error, Result};
use crate::graph::{MAX_RANK, Node, Shape, View};

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

/// In which direction k runs: the definition of the op, not a choice of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// From 0 up.
    Ascending,
    /// From the last down: a backward pass that meets the pieces of a weight in reverse goes on from what it has stored.
    Descending,
}

/// What `matmul` is given.
pub(super) struct Product {
    pub a: Operand,
    pub b: Operand,
    pub bias: Option<Operand>,
    pub alpha: f32,
    pub order: Order,
}

/// The kernels of a product. All give the same bits; which one runs is a pure function of layout and dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// Any strides.
    Plain,
    /// Vectors of four along k in both operands: a linear layer as files store it.
    RowsAlongK,
    /// Vectors of four along k in A and along n in B: the gradient of its operand.
    RowsAlongN,
}

impl Variant {
    /// The fastest variant that these strides allow. `codes`: dtypes of a, b and bias.
    pub fn of(p: &sh::matmul::Params, codes: &[u32; 3]) -> Variant {
        let unit = if codes[1] == sh::F32 { 4 } else { 8 };
        let even = |values: &[u32]| values.iter().all(|v| v % unit == 0);
        let a =
            codes[0] == sh::F32 && p.a_k == 1 && even(&[p.k, p.a_off, p.a_m, p.a_b0, p.a_b1, p.b_off, p.bb0, p.bb1]);
        // Below this a tile of 8 rows is mostly empty.
        if !a || codes[1] > sh::BF16 || p.m < 4 || p.n < 8 || p.k == 0 {
            Variant::Plain
        } else if p.b_k == 1 && even(&[p.b_n]) {
            Variant::RowsAlongK
        } else if p.b_n == 1 && even(&[p.b_k, p.n]) {
            Variant::RowsAlongN
        } else {
            Variant::Plain
        }
    }

    fn tiles(self, m: u32, n: u32) -> u64 {
        let columns = if self == Variant::Plain { 32 } else { 64 };
        u64::from(m).div_ceil(32) * u64::from(n).div_ceil(columns)
    }

    fn kernel(self, codes: &[u32; 3]) -> Kernel {
        let [a, b, bias] = *codes;
        match self {
            Variant::Plain => kernel(&sh::matmul::SHADER, codes),
            Variant::RowsAlongK => kernel(&sh::matmul_rows::SHADER, &[a, b, bias, 0]),
            Variant::RowsAlongN => kernel(&sh::matmul_rows::SHADER, &[a, b, bias, 1]),
        }
    }
}

/// Longest k of one dispatch. Mesa's software driver ends all loops of an invocation after 65,535 turns, silently; even if
/// it unrolled nothing, no kernel here takes more than three turns an element of k.
const MAX_K: u32 = 16_384;

pub(super) fn matmul(node: &Node, out: Content, product: Product) -> Result<Vec<Call>> {
    let Product { a, b, bias, alpha, order } = product;
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
        return Err(Error::Shape {
            op: OP,
            reason: format!("the batch of {shape} has more than two uneven dimensions"),
        });
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
    let one = |mut p: sh::matmul::Params, b: Content, last: bool| {
        p.has_bias = u32::from(last && bias_content.is_some());
        if order == Order::Descending {
            let last = p.k.saturating_sub(1);
            p.a_off = p.a_off.wrapping_add(last.wrapping_mul(p.a_k));
            p.b_off = p.b_off.wrapping_add(last.wrapping_mul(p.b_k));
            (p.a_k, p.b_k) = (p.a_k.wrapping_neg(), p.b_k.wrapping_neg());
        }
        let variant = Variant::of(&p, &codes);
        let groups = b0 * b1 * variant.tiles(p.m, p.n);
        p.groups = groups as u32;
        Call {
            kernel: variant.kernel(&codes),
            bindings: vec![
                (a_content, false),
                (b, false),
                (bias_content.filter(|_| last).unwrap_or(b), false),
                (out, true),
            ],
            params: bytemuck::bytes_of(&p).to_vec(),
            groups,
            work: b0 * b1 * u64::from(p.m) * u64::from(p.n) * u64::from(p.k),
        }
    };
    // One call, or several that carry on from one another where k is longer than a loop may run.
    let call = |p: sh::matmul::Params, b: Content, last: bool| -> Vec<Call> {
        let count = p.k.div_ceil(MAX_K).max(1);
        let cut = |i: u32| {
            // Descending begins at the far end.
            let part = if order == Order::Descending { count - 1 - i } else { i };
            let (from, end) = (part * MAX_K, i + 1 == count);
            let mut q = p;
            q.k = (p.k - from).min(MAX_K);
            q.a_off = p.a_off.wrapping_add(from.wrapping_mul(p.a_k));
            q.b_off = p.b_off.wrapping_add(from.wrapping_mul(p.b_k));
            q.carry = if i > 0 { 1 } else { p.carry };
            q.alpha = if end { p.alpha } else { 1.0 };
            one(q, b, last && end)
        };
        (0..count).map(cut).collect()
    };
    match &b.content {
        Source::Value(t) => Ok(call(base, Content::Value(*t), true)),
        Source::Weight { segment, parts, .. } if parts.len() == 1 => {
            let p = &parts[0];
            Ok(call(base, Content::Weight { segment: *segment, weight: p.weight, piece: p.piece }, true))
        }
        Source::Weight { segment, parts, row } => {
            if b0 * b1 != 1 {
                return Err(Error::Shape { op: OP, reason: "a weight in pieces cannot be read with a batch".into() });
            }
            let along_k = b_k == *row;
            if !along_k && b_n != *row {
                return Err(Error::Shape {
                    op: OP,
                    reason: "a weight in pieces must be read by rows or columns".into(),
                });
            }
            // The rows that are read: of each piece, those in common.
            let (first, column) = (b.view.offset / row, b.view.offset % row);
            let end = first + if along_k { k } else { n };
            let mut pieces: Vec<_> = parts
                .iter()
                .map(|part| (part, part.first_row.max(first), (part.first_row + part.rows).min(end)))
                .filter(|(_, from, to)| from < to)
                .collect();
            if along_k && order == Order::Descending {
                pieces.reverse();
            }
            let count = pieces.len();
            let mut calls = Vec::with_capacity(count);
            for (i, (part, from, to)) in pieces.into_iter().enumerate() {
                let content = Content::Weight { segment: *segment, weight: part.weight, piece: part.piece };
                let mut p = base;
                p.b_off = small(OP, (from - part.first_row) * row + column)?;
                if along_k {
                    // Rows are k: go on from the stored accumulator; factor and bias come with the last piece.
                    let last = i + 1 == count;
                    p.k = small(OP, to - from)?;
                    p.a_off = small(OP, a.view.offset + (from - first) * a_k)?;
                    p.carry = u32::from(carry || i > 0);
                    p.alpha = if last { alpha } else { 1.0 };
                    calls.extend(call(p, content, last));
                } else {
                    // Rows are n: each piece gives its own columns.
                    p.n = small(OP, to - from)?;
                    p.c_off = small(OP, c.offset + (from - first) * c_n)?;
                    p.bias_off = small(OP, bias_off + from - first)?;
                    calls.extend(call(p, content, true));
                }
            }
            Ok(calls)
        }
    }
}

/// A product of few rows by the geometry of `matvec`; operands x, W [k, n] in any view, perhaps a bias.
pub(super) fn matvec(node: &Node, out: Content, x: Operand, w: Operand, bias: Option<Operand>) -> Result<Call> {
    const OP: &str = "matvec";
    let (m, n, k) = (x.shape.dims()[0], w.shape.dims()[1], w.shape.dims()[0]);
    let y = node.into.as_ref().map_or(View::dense(&node.shape), |r| r.view);
    let p = sh::matvec::Params {
        groups: small(OP, m * n.div_ceil(8))?,
        m: small(OP, m)?,
        n: small(OP, n)?,
        k: small(OP, k)?,
        x_off: small(OP, x.view.offset)?,
        x_m: small(OP, x.view.strides[0])?,
        x_k: small(OP, x.view.strides[1])?,
        w_off: small(OP, w.view.offset)?,
        w_k: small(OP, w.view.strides[0])?,
        w_n: small(OP, w.view.strides[1])?,
        y_off: small(OP, y.offset)?,
        y_m: small(OP, y.strides[0])?,
        y_n: small(OP, y.strides[1])?,
        carry: u32::from(node.into.as_ref().is_some_and(|r| r.carry)),
        has_bias: u32::from(bias.is_some()),
        bias_off: small(OP, bias.as_ref().map_or(0, |b| b.view.offset))?,
        alpha: 1.0,
        ..Default::default()
    };
    let weight = w.whole(OP)?;
    let (bias_content, bias_code) = match &bias {
        Some(b) => (b.whole(OP)?, dtype_code(OP, b.dtype)?),
        None => (weight, 0),
    };
    Ok(Call {
        kernel: kernel(&sh::matvec::SHADER, &[dtype_code(OP, w.dtype)?, bias_code]),
        bindings: vec![(x.whole(OP)?, false), (weight, false), (bias_content, false), (out, true)],
        params: bytemuck::bytes_of(&p).to_vec(),
        groups: m * n.div_ceil(8),
        work: m * n * k,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::caps::Caps;
    use crate::graph::{Graph, Op, Region, Tensor};
    use crate::nn::NnOp;
    use crate::weights::{DType, Segment, SegmentEntry, SegmentId, WeightId};

    const ROWS: u64 = 23;
    const COLUMNS: u64 = 5;

    /// A weight of 23 rows stored in pieces of so many each.
    fn segment(pieces: &[u64]) -> Segment {
        assert_eq!(pieces.iter().sum::<u64>(), ROWS);
        let entry = |(i, rows): (usize, &u64)| SegmentEntry {
            name: "w".into(),
            weight: WeightId(0),
            piece: i as u32,
            dtype: DType::F32,
            shape: vec![*rows, COLUMNS],
        };
        let entries: Vec<SegmentEntry> = pieces.iter().enumerate().map(entry).collect();
        Segment { id: SegmentId(0), name: "s".into(), entries: entries.into(), left_out: Arc::new([]) }
    }

    fn numbers(seed: u32, n: u64) -> Vec<f32> {
        (0..n as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 8) as f32 / 8_388_608.0 - 1.0)
            .collect()
    }

    /// The last node of a graph, computed by the twin from its calls.
    fn compute(g: &Graph, y: Tensor, pieces: &[u64], x: &[f32], start: &[f32]) -> Vec<f32> {
        let w = numbers(2, ROWS * COLUMNS);
        let bias = numbers(3, 64);
        let mut out = start.to_vec();
        for call in crate::kernels::lower(g, y, &|_| 0, &Caps::webgpu_defaults()).unwrap() {
            assert_eq!(call.kernel.shader.name, "matmul");
            let p: sh::matmul::Params = bytemuck::pod_read_unaligned(&call.params);
            let Content::Weight { piece, .. } = call.bindings[1].0 else { panic!("{call:?}") };
            let from = pieces[..piece as usize].iter().sum::<u64>() * COLUMNS;
            let part = &w[from as usize..][..(pieces[piece as usize] * COLUMNS) as usize];
            sh::cpu::matmul(&p, x, part, &bias, &mut out);
        }
        out
    }

    /// Every way to read the weight: along k or n, all of it or some rows, either direction, from zero or on.
    fn every_way(pieces: &[u64]) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let segment = segment(pieces);
        for (from, to) in [(0, ROWS), (3, 4), (7, 21)] {
            let n = to - from;
            for carry in [false, true] {
                // x · w, rows of the weight along k, both directions.
                for descending in [false, true] {
                    let mut g = Graph::new();
                    let x = g.input("x", [4, n]).unwrap();
                    let w = g.weight(&segment, "w").unwrap();
                    let w = g.slice(w, 0, from, to).unwrap();
                    let shape = Shape::new(&[4, COLUMNS]).unwrap();
                    let into = g.empty(shape);
                    let op = match descending {
                        true => Op::Nn(NnOp::MatmulDescending),
                        false => Op::MatMul { bias: false, alpha: 0.75 },
                    };
                    let region = Region { shape, view: View::dense(&shape), carry };
                    let y = g.push_into(op, vec![x, w], into, region).unwrap();
                    all.push(compute(&g, y, pieces, &numbers(1, 4 * n), &numbers(4, 4 * COLUMNS)));
                }
                // x · wᵀ + bias, rows of the weight along n.
                let mut g = Graph::new();
                let x = g.input("x", [4, COLUMNS]).unwrap();
                let bias = g.input("bias", [n]).unwrap();
                let w = g.weight(&segment, "w").unwrap();
                let w = g.slice(w, 0, from, to).unwrap();
                let w = g.transpose(w).unwrap();
                let shape = Shape::new(&[4, n]).unwrap();
                let into = g.empty(shape);
                let region = Region { shape, view: View::dense(&shape), carry };
                let y = g.push_into(Op::MatMul { bias: true, alpha: 0.75 }, vec![x, w, bias], into, region).unwrap();
                all.push(compute(&g, y, pieces, &numbers(1, 4 * COLUMNS), &numbers(4, 4 * n)));
            }
        }
        all
    }

    #[test]
    fn pieces_of_a_weight_leave_no_trace_in_any_bit() {
        let whole = every_way(&[ROWS]);
        for pieces in [&[1, 22][..], &[8, 8, 7], &[4, 3, 14, 2], &[1; 23]] {
            assert_eq!(every_way(pieces), whole, "{pieces:?}");
        }
        // Another direction is another sum.
        assert_ne!(whole[0], whole[1]);
    }
}
