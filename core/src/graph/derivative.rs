//! The derivative of each op: the nodes that take a gradient of its value to one of its operands.

use super::{Binary, Fold, Graph, Op, Region, Shape, Tensor, Unary, View};
use crate::error::{Error, Result};
use crate::nn::NnOp;

impl Graph {
    /// The gradient that `dy`, the gradient of value `y`, sends to operand `k`.
    pub(super) fn vjp(
        &mut self,
        y: Tensor,
        op: &Op,
        into: Option<&Region>,
        inputs: &[Tensor],
        k: usize,
        dy: Tensor,
    ) -> Result<Option<Tensor>> {
        if constant_in(op, k) {
            return Ok(None);
        }
        let Some(region) = into else {
            return self.vjp_of(y, op, inputs, k, dy).map(Some);
        };
        let part = View { offset: region.view.offset, strides: region.view.strides };
        let own = self.push(Op::View(part), vec![dy], region.shape);
        if k + 1 < inputs.len() {
            return self.vjp_of(y, op, inputs, k, own).map(Some);
        }
        // What was there before: all of it when the node went on from it, else all but the region.
        if region.carry {
            return Ok(Some(dy));
        }
        if matches!(self.nodes[inputs[k].index()].op, Op::Empty) {
            return Ok(None);
        }
        if self.written_apart(inputs[k], region) {
            return Ok(Some(dy));
        }
        let zero = self.fill(region.shape, 0.0);
        let copy = self.unary(Unary::Copy, dy)?;
        self.place_over(zero, copy, Region { carry: false, ..region.clone() }).map(Some)
    }

    /// Whether `t` was written from nothing, and nowhere within the region: as the parts of a concatenation are. What the
    /// region's elements hold then comes from nowhere else, so their gradient need not be taken out.
    fn written_apart(&self, t: Tensor, region: &Region) -> bool {
        let whole = self.nodes[t.index()].shape;
        let (dense, rank) = (whole.dense_strides(), whole.rank());
        let within = |r: &Region| -> Option<Vec<(u64, u64)>> {
            if r.shape.rank() != rank || (0..rank).any(|d| r.shape.dims()[d] > 1 && r.view.strides[d] != dense[d]) {
                return None;
            }
            let mut rest = r.view.offset;
            let starts = (0..rank).map(|d| {
                let start = rest / dense[d];
                rest %= dense[d];
                (start, start + r.shape.dims()[d])
            });
            Some(starts.collect())
        };
        let Some(own) = within(region) else { return false };
        let mut t = t;
        loop {
            let node = &self.nodes[t.index()];
            match (&node.op, &node.into) {
                (Op::Empty, _) => return true,
                (_, Some(other)) => {
                    let apart =
                        |other: Vec<(u64, u64)>| own.iter().zip(other).any(|((a, b), (c, d))| *b <= c || d <= *a);
                    if !within(other).is_some_and(apart) {
                        return false;
                    }
                    t = node.inputs[node.inputs.len() - 1];
                }
                _ => return false,
            }
        }
    }

    /// As [`Graph::vjp`], for a node with storage of its own.
    fn vjp_of(&mut self, y: Tensor, op: &Op, inputs: &[Tensor], k: usize, dy: Tensor) -> Result<Tensor> {
        let x = inputs[k];
        let shape = self.shape(x)?;
        match op {
            Op::Input { .. }
            | Op::Weight { .. }
            | Op::Fill(_)
            | Op::Empty
            | Op::State(_)
            | Op::Folded(_)
            | Op::LoadRows { .. }
            | Op::Extra
            | Op::Custom(_)
            | Op::Nn(_) => Err(not_differentiable(&format!("{op:?}"))),
            Op::Place => Ok(dy),
            Op::Cast => {
                let dtype = self.dtype(x);
                self.cast(dy, dtype)
            }
            Op::Select => {
                let zero = self.fill(Shape::scalar(), 0.0);
                let g = match k {
                    1 => self.select(inputs[0], dy, zero)?,
                    _ => self.select(inputs[0], zero, dy)?,
                };
                self.sum_to(g, shape)
            }
            Op::Hook { name, when, mirrored: true } => self.hook(dy, &name.clone(), *when, false),
            Op::Hook { .. } => Ok(dy),
            Op::View(view) => self.view_vjp(view, shape, self.shape(y)?, dy),
            Op::MatMul { alpha, .. } => self.matmul_vjp(inputs, k, dy, *alpha),
            Op::Unary(f) => {
                let (f, operand) = match f {
                    Unary::Copy => return Ok(dy),
                    Unary::Neg => return self.unary(Unary::Neg, dy),
                    Unary::Exp => return self.mul(dy, y),
                    Unary::Log => return self.binary(Binary::Div, dy, x),
                    Unary::Tanh => (Binary::TanhGrad, y),
                    Unary::Sigmoid => (Binary::SigmoidGrad, y),
                    Unary::Relu => (Binary::ReluGrad, x),
                    Unary::Silu => (Binary::SiluGrad, x),
                    Unary::GeluErf => (Binary::GeluErfGrad, x),
                    Unary::GeluTanh => (Binary::GeluTanhGrad, x),
                    Unary::Sin => {
                        let c = self.unary(Unary::Cos, x)?;
                        return self.mul(dy, c);
                    }
                    Unary::Cos => {
                        let s = self.unary(Unary::Sin, x)?;
                        let s = self.unary(Unary::Neg, s)?;
                        return self.mul(dy, s);
                    }
                    Unary::Sqrt => {
                        let g = self.binary(Binary::Div, dy, y)?;
                        return self.scale(g, 0.5);
                    }
                    Unary::Rsqrt => {
                        let y2 = self.mul(y, y)?;
                        let y3 = self.mul(y2, y)?;
                        let g = self.mul(dy, y3)?;
                        return self.scale(g, -0.5);
                    }
                    Unary::Recip => {
                        let y2 = self.mul(y, y)?;
                        let g = self.mul(dy, y2)?;
                        return self.unary(Unary::Neg, g);
                    }
                    Unary::Abs => {
                        let zero = self.fill(Shape::scalar(), 0.0);
                        let below = self.binary(Binary::Lt, x, zero)?;
                        let sign = self.scale(below, -2.0)?;
                        let one = self.fill(Shape::scalar(), 1.0);
                        let sign = self.add(sign, one)?;
                        return self.mul(dy, sign);
                    }
                };
                self.binary(f, operand, dy)
            }
            Op::Binary(f) => {
                let other = inputs[1 - k];
                let g = match (f, k) {
                    (Binary::Add, _) | (Binary::Sub, 0) => dy,
                    (Binary::Sub, _) => self.unary(Unary::Neg, dy)?,
                    (Binary::Mul, _) => self.mul(dy, other)?,
                    (Binary::Div, 0) => self.binary(Binary::Div, dy, other)?,
                    (Binary::Div, _) => {
                        let t = self.mul(dy, y)?;
                        let t = self.binary(Binary::Div, t, x)?;
                        self.unary(Unary::Neg, t)?
                    }
                    (Binary::Min | Binary::Max, _) => {
                        // At a tie the first operand gets it all.
                        let chosen = self.binary(Binary::Eq, inputs[0], y)?;
                        let mask = if k == 0 {
                            chosen
                        } else {
                            let neg = self.scale(chosen, -1.0)?;
                            let one = self.fill(Shape::scalar(), 1.0);
                            self.add(neg, one)?
                        };
                        self.mul(dy, mask)?
                    }
                    (Binary::Pow, 0) => {
                        let one = self.fill(Shape::scalar(), 1.0);
                        let less = self.binary(Binary::Sub, other, one)?;
                        let slope = self.binary(Binary::Pow, x, less)?;
                        let slope = self.mul(slope, other)?;
                        self.mul(dy, slope)?
                    }
                    (Binary::Pow, _) => {
                        let log = self.unary(Unary::Log, other)?;
                        let slope = self.mul(y, log)?;
                        self.mul(dy, slope)?
                    }
                    _ => return Err(not_differentiable(&format!("{f:?}"))),
                };
                self.sum_to(g, shape)
            }
            Op::Scale(c) => self.scale(dy, *c),
            Op::FillFrom { scale } => {
                let s = self.sum(dy)?;
                let s = self.scale(s, *scale)?;
                self.reshape(s, shape.dims())
            }
            Op::Reduce { fold, dims } => {
                let folded = &shape.dims()[shape.rank() - dims..];
                let scale = match fold {
                    Fold::Mean => 1.0 / folded.iter().product::<u64>() as f32,
                    _ => 1.0,
                };
                if *fold != Fold::Max && self.shape(dy)?.elements() == 1 {
                    return Ok(self.push(Op::FillFrom { scale }, vec![dy], shape));
                }
                let mut wide = self.shape(dy)?.dims().to_vec();
                wide.resize(shape.rank(), 1);
                let dy = if scale == 1.0 { dy } else { self.scale(dy, scale)? };
                let dy = self.reshape(dy, &wide)?;
                if *fold != Fold::Max {
                    return self.broadcast_to(dy, shape);
                }
                // Elements that share the maximum share its gradient.
                let y = self.reshape(y, &wide)?;
                let chosen = self.binary(Binary::Eq, x, y)?;
                let count = self.reduce(Fold::Sum, chosen, &(shape.rank() - dims..shape.rank()).collect::<Vec<_>>())?;
                let count = self.reshape(count, &wide)?;
                let share = self.binary(Binary::Div, dy, count)?;
                self.mul(chosen, share)
            }
        }
    }

    fn matmul_vjp(&mut self, inputs: &[Tensor], k: usize, dy: Tensor, alpha: f32) -> Result<Tensor> {
        let (a, b) = (inputs[0], inputs[1]);
        let target = self.shape(inputs[k])?;
        match k {
            0 => {
                let bt = self.transpose(b)?;
                let da = self.scaled_matmul(dy, bt, None, alpha)?;
                self.sum_to(da, target)
            }
            1 => {
                // The factor goes on the smaller operand, not on the sum: a gradient may go on from a stored one.
                let (a, dy) = match alpha {
                    1.0 => (a, dy),
                    _ if self.shape(a)?.elements() <= self.shape(dy)?.elements() => (self.scale(a, alpha)?, dy),
                    _ => (a, self.scale(dy, alpha)?),
                };
                // Where `b` is one matrix for all batches, the batches are further rows of one product.
                if target.rank() == 2 || target.dims()[..target.rank() - 2].iter().all(|d| *d == 1) {
                    let flat = |g: &mut Graph, t: Tensor| -> Result<Tensor> {
                        let s = g.shape(t)?;
                        let last = s.dims()[s.rank() - 1];
                        let rows = s.dims()[..s.rank() - 1].iter().product();
                        g.reshape(t, &[rows, last])
                    };
                    let batch_of_dy = self.shape(dy)?.dims()[..self.shape(dy)?.rank() - 1].iter().product::<u64>();
                    let a2 = flat(self, a)?;
                    if self.shape(a2)?.dims()[0] == batch_of_dy {
                        let dy2 = flat(self, dy)?;
                        let at = self.transpose(a2)?;
                        let db = self.matmul(at, dy2, None)?;
                        return self.reshape(db, target.dims());
                    }
                }
                let at = self.transpose(a)?;
                let db = self.matmul(at, dy, None)?;
                self.sum_to(db, target)
            }
            _ => {
                // In order over rows, so that it goes on from a stored gradient as a product does.
                let dy = self.dense(dy)?;
                let n = self.shape(dy)?.dims().last().copied().unwrap_or(1);
                let (db, _) = self.nn(NnOp::NormBiasGrad, vec![dy, dy, dy], Shape::new(&[n])?, &[]);
                self.reshape(db, target.dims())
            }
        }
    }

    /// The gradient of a view: elements of `dy` go back to where they were read; repeated ones are summed.
    fn view_vjp(&mut self, view: &View, from: Shape, to: Shape, dy: Tensor) -> Result<Tensor> {
        if view.is_dense(&to) && from.elements() == to.elements() {
            return self.reshape(dy, from.dims());
        }
        let dense = from.dense_strides();
        // A permutation: undo it.
        if from.rank() == to.rank() && from.elements() == to.elements() {
            let mut order = vec![usize::MAX; from.rank()];
            let mut used = vec![false; to.rank()];
            for d in 0..from.rank() {
                let found = (0..to.rank()).find(|i| {
                    !used[*i]
                        && to.dims()[*i] == from.dims()[d]
                        && (view.strides[*i] == dense[d] || from.dims()[d] == 1)
                });
                if let Some(i) = found {
                    used[i] = true;
                    order[d] = i;
                }
            }
            if order.iter().all(|i| *i != usize::MAX) {
                return self.permute(dy, &order);
            }
        }
        // A window or slice: the gradient lies in its place, zeros around it.
        if from.elements() > to.elements() && (0..to.rank()).all(|d| to.dims()[d] <= 1 || view.strides[d] > 0) {
            let zero = self.fill(from, 0.0);
            return self.place_over(dy, zero, Region { shape: to, view: *view, carry: false });
        }
        // A broadcast: sum what was repeated.
        if from.broadcast(&to).is_ok_and(|s| s == to) {
            return self.sum_to(dy, from);
        }
        Err(not_differentiable("this view"))
    }

    /// `x` summed over the dimensions in which `to` was broadcast.
    fn sum_to(&mut self, x: Tensor, to: Shape) -> Result<Tensor> {
        let from = self.shape(x)?;
        if from == to {
            return Ok(x);
        }
        let shift = from.rank() - to.rank();
        let dims: Vec<usize> =
            (0..from.rank()).filter(|d| *d < shift || to.dims()[d - shift] == 1 && from.dims()[*d] != 1).collect();
        let x = if dims.is_empty() { x } else { self.reduce(Fold::Sum, x, &dims)? };
        self.reshape(x, to.dims())
    }
}

/// Whether a small change of operand `k` changes nothing: there is no gradient, and none is missing.
fn constant_in(op: &Op, k: usize) -> bool {
    match op {
        Op::Select => k == 0,
        Op::Binary(f) => matches!(f, Binary::Lt | Binary::Le | Binary::Eq),
        Op::Reduce { fold, .. } => *fold == Fold::Argmax,
        _ => false,
    }
}

fn not_differentiable(what: &str) -> Error {
    Error::Invalid { what: "gradient".into(), reason: format!("{what} has no gradient here") }
}
