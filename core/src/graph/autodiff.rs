//! Reverse-mode differentiation: adds the backward nodes to the same graph.
//!
//! Nothing is built below the lowest tensor that a gradient is asked for. A node of a by-hand visit gets its
//! gradients in a mirrored visit, so what is released after the forward is loaded again before the backward.

use super::{Binary, Fold, Graph, Op, Shape, Tensor, Unary, View, Visit};
use crate::error::{Error, Result};

impl Graph {
    /// The gradients of `loss` (one element) with respect to each of `wrt`.
    pub(crate) fn gradients(&mut self, loss: Tensor, wrt: &[Tensor]) -> Result<Vec<Tensor>> {
        let shape = self.shape(loss)?;
        if shape.elements() != 1 {
            return Err(Error::Shape { op: "gradient", reason: format!("the loss has shape {shape}, not one element") });
        }
        let count = loss.index() + 1;
        let mut needed = vec![false; count];
        for t in wrt {
            self.shape(*t)?;
            if t.index() < count {
                needed[t.index()] = true;
            }
        }
        for i in 0..count {
            needed[i] = needed[i] || self.nodes[i].inputs.iter().any(|t| needed[t.index()]);
        }
        if let Some(t) = wrt.iter().find(|t| t.index() >= count) {
            return Err(Error::Invalid { what: format!("gradient of tensor {}", t.0), reason: "the loss does not depend on it".into() });
        }

        self.in_backward = true;
        let mut grads: Vec<Option<Tensor>> = vec![None; count];
        let mut mirrors: Vec<Option<u32>> = vec![None; self.visits.len()];
        grads[loss.index()] = Some(self.fill(shape, 1.0));
        let result = self.backward(count, &needed, &mut grads, &mut mirrors);
        self.in_backward = false;
        self.open_visit = None;
        result?;
        wrt.iter()
            .map(|t| match grads[t.index()] {
                Some(g) => Ok(g),
                None => Ok(self.fill(self.shape(*t)?, 0.0)),
            })
            .collect()
    }

    fn backward(
        &mut self,
        count: usize,
        needed: &[bool],
        grads: &mut [Option<Tensor>],
        mirrors: &mut [Option<u32>],
    ) -> Result<()> {
        for i in (0..count).rev() {
            let Some(dy) = grads[i] else { continue };
            if !needed[i] {
                continue;
            }
            let node = self.nodes[i].clone();
            for (k, input) in node.inputs.iter().enumerate() {
                if !needed[input.index()] {
                    continue;
                }
                self.open_visit = node.visit.map(|v| self.mirror(v, mirrors));
                let part = self.vjp(Tensor(i as u32), &node.op, &node.inputs, k, dy)?;
                self.open_visit = None;
                grads[input.index()] = match grads[input.index()] {
                    Some(sum) => Some(self.add(sum, part)?),
                    None => Some(part),
                };
            }
        }
        Ok(())
    }

    /// The backward visit of a forward one, made at its first use.
    fn mirror(&mut self, visit: u32, mirrors: &mut [Option<u32>]) -> u32 {
        *mirrors[visit as usize].get_or_insert_with(|| {
            let segment = self.visits[visit as usize].segment.clone();
            self.visits.push(Visit { segment, mirrors: Some(visit) });
            self.visits.len() as u32 - 1
        })
    }

    /// The gradient that `dy`, the gradient of value `y`, sends to operand `k`.
    fn vjp(&mut self, y: Tensor, op: &Op, inputs: &[Tensor], k: usize, dy: Tensor) -> Result<Tensor> {
        let x = inputs[k];
        let shape = self.shape(x)?;
        match op {
            Op::Input { .. } | Op::Weight { .. } | Op::Fill(_) => Err(Error::Invalid {
                what: "gradient".into(),
                reason: "a value without operands has no operand gradient".into(),
            }),
            Op::Hook { name, when, mirrored: true } => self.hook(dy, &name.clone(), *when, false),
            Op::Hook { .. } => Ok(dy),
            Op::View(view) => self.view_vjp(view, shape, self.shape(y)?, dy),
            Op::MatMul { .. } => self.matmul_vjp(inputs, k, dy),
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
                    Fold::Sum => 1.0,
                    Fold::Mean => 1.0 / folded.iter().product::<u64>() as f32,
                    _ => return Err(not_differentiable(&format!("{fold:?}"))),
                };
                if self.shape(dy)?.elements() == 1 {
                    return Ok(self.push(Op::FillFrom { scale }, vec![dy], shape));
                }
                let kept = self.shape(dy)?;
                let mut dims = kept.dims().to_vec();
                dims.resize(shape.rank(), 1);
                let dy = if scale == 1.0 { dy } else { self.scale(dy, scale)? };
                let dy = self.reshape(dy, &dims)?;
                self.broadcast_to(dy, shape)
            }
        }
    }

    fn matmul_vjp(&mut self, inputs: &[Tensor], k: usize, dy: Tensor) -> Result<Tensor> {
        let (a, b) = (inputs[0], inputs[1]);
        let target = self.shape(inputs[k])?;
        match k {
            0 => {
                let bt = self.transpose(b)?;
                let da = self.matmul(dy, bt, None)?;
                self.sum_to(da, target)
            }
            1 => {
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
                let s = self.shape(dy)?;
                let db = self.reduce(Fold::Sum, dy, &(0..s.rank() - 1).collect::<Vec<_>>())?;
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
                    !used[*i] && to.dims()[*i] == from.dims()[d] && (view.strides[*i] == dense[d] || from.dims()[d] == 1)
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

fn not_differentiable(what: &str) -> Error {
    Error::Invalid { what: "gradient".into(), reason: format!("{what} has no gradient here") }
}
