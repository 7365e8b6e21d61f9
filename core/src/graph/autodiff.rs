//! Reverse-mode differentiation: adds the backward nodes to the same graph.
//!
//! Nothing is built below the lowest tensor that a gradient is asked for. A node of a by-hand visit gets its
//! gradients in a mirrored visit, so what is released after the forward is loaded again before the backward.

use std::collections::HashMap;

use super::{Binary, CustomGrad, Fold, Graph, Op, Region, Shape, Tensor, Unary, View, Visit};
use crate::error::{Error, Result};
use crate::event::Pass;
use crate::nn::NnOp;

/// Gradients of parameters that go into one array instead of tensors of their own, so that micro-batches carry on
/// from the stored sums.
pub(crate) struct Sinks<'a> {
    /// Each parameter (a window of a state array) with its gradient's array and offset there, in elements.
    pub params: &'a [(Tensor, usize, u64)],
    /// The arrays, as last written.
    pub arrays: Vec<Tensor>,
    /// Whether the arrays already hold sums of earlier micro-batches.
    pub carry: bool,
}

/// What is known while walking back.
struct Walk<'a, 'b> {
    needed: Vec<bool>,
    grads: Vec<Option<Tensor>>,
    mirrors: Vec<Option<u32>>,
    recompute: bool,
    /// The block whose values were last computed again, and where they are now.
    again: Option<(u32, HashMap<Tensor, Tensor>)>,
    sinks: Option<&'a mut Sinks<'b>>,
    started: Vec<bool>,
}

impl Graph {
    /// The gradients of `loss` (one element) with respect to each of `wrt`; with `recompute`, from block values that
    /// are computed again. Gradients of `sinks` go to their array.
    pub(crate) fn gradients(
        &mut self,
        loss: Tensor,
        wrt: &[Tensor],
        recompute: bool,
        sinks: Option<&mut Sinks<'_>>,
    ) -> Result<Vec<Tensor>> {
        let shape = self.shape(loss)?;
        if shape.elements() != 1 {
            return Err(Error::Shape { op: "gradient", reason: format!("the loss has shape {shape}, not one element") });
        }
        let count = loss.index() + 1;
        let mut needed = vec![false; count];
        let sunk: Vec<Tensor> = sinks.as_ref().map(|s| s.params.iter().map(|(t, ..)| *t).collect()).unwrap_or_default();
        for t in wrt.iter().chain(&sunk) {
            self.shape(*t)?;
            match needed.get_mut(t.index()) {
                Some(n) => *n = true,
                None => {
                    let what = format!("gradient of tensor {}", t.0);
                    return Err(Error::Invalid { what, reason: "the loss does not depend on it".into() });
                }
            }
        }
        for i in 0..count {
            let first = usize::from(matches!(self.nodes[i].op, Op::Custom(_)));
            needed[i] = needed[i] || self.nodes[i].inputs[first..].iter().any(|t| needed[t.index()]);
        }

        self.in_backward = true;
        let mut walk = Walk {
            needed,
            grads: vec![None; count],
            mirrors: vec![None; self.visits.len()],
            recompute,
            again: None,
            started: vec![sinks.as_ref().is_some_and(|s| s.carry); sunk.len()],
            sinks,
        };
        walk.grads[loss.index()] = Some(self.fill(shape, 1.0));
        let result = (0..count).rev().try_for_each(|i| self.backward(i, &mut walk));
        let result = result.and_then(|()| self.fill_unreached(&mut walk));
        let rest = result.and_then(|()| {
            wrt.iter()
                .map(|t| match walk.grads[t.index()] {
                    Some(g) => Ok(g),
                    None => Ok(self.fill(self.shape(*t)?, 0.0)),
                })
                .collect()
        });
        self.in_backward = false;
        self.open_visit = None;
        rest
    }

    /// Sends the gradient of node `i` to its operands.
    fn backward(&mut self, i: usize, walk: &mut Walk<'_, '_>) -> Result<()> {
        let Some(dy) = walk.grads[i] else { return Ok(()) };
        if !walk.needed[i] {
            return Ok(());
        }
        if let Some(block) = self.nodes[i].block.filter(|_| walk.recompute)
            && walk.again.as_ref().is_none_or(|(b, _)| *b != block)
        {
            let values = self.compute_again(block, walk)?;
            walk.again = Some((block, values));
        }
        let node = self.nodes[i].clone();
        let here = |t: &Tensor| match (&walk.again, node.block) {
            (Some((b, values)), Some(block)) if *b == block => values.get(t).copied().unwrap_or(*t),
            _ => *t,
        };
        let y = here(&Tensor(i as u32));
        let inputs: Vec<Tensor> = node.inputs.iter().map(here).collect();
        let extras: Vec<Tensor> = node.extras.iter().map(here).collect();
        let needed: Vec<bool> = node.inputs.iter().map(|t| walk.needed[t.index()]).collect();

        if let Op::Custom(id) = node.op {
            let vjp = self.customs[id as usize].0.clone();
            self.open_visit = node.visit.map(|v| self.mirror(v, &mut walk.mirrors));
            let call = CustomGrad { inputs: &inputs[1..], output: y, grad: dy, needed: &needed[1..] };
            let parts = vjp(self, call)?;
            self.open_visit = None;
            if parts.len() + 1 != inputs.len() {
                let reason = format!("{} gradients for {} operands", parts.len(), inputs.len() - 1);
                return Err(Error::Invalid { what: "custom function".into(), reason });
            }
            for (input, part) in node.inputs[1..].iter().zip(parts) {
                if let Some(part) = part.filter(|_| walk.needed[input.index()]) {
                    if self.shape(part)? != self.shape(*input)? {
                        let reason = format!("a gradient of shape {} for an operand of {}", self.shape(part)?, self.shape(*input)?);
                        return Err(Error::Shape { op: "custom function", reason });
                    }
                    self.collect(*input, part, walk)?;
                }
            }
            return Ok(());
        }
        if let Op::Nn(op) = &node.op {
            self.open_visit = node.visit.map(|v| self.mirror(v, &mut walk.mirrors));
            let call = crate::nn::Vjp { y, extras: &extras, inputs: &inputs, dy, needed: &needed };
            let parts = op.vjp(self, &call)?;
            self.open_visit = None;
            for (input, part) in node.inputs.iter().zip(parts) {
                if let Some(part) = part {
                    self.collect(*input, part, walk)?;
                }
            }
            return Ok(());
        }
        for (k, input) in node.inputs.iter().enumerate().filter(|(k, _)| needed[*k]) {
            self.open_visit = node.visit.map(|v| self.mirror(v, &mut walk.mirrors));
            let part = self.vjp(y, &node.op, node.into.as_ref(), &inputs, k, dy)?;
            self.open_visit = None;
            if let Some(part) = part {
                self.collect(*input, part, walk)?;
            }
        }
        Ok(())
    }

    /// Adds a part to the gradient of a tensor, or writes it into the array that it belongs to.
    fn collect(&mut self, input: Tensor, part: Tensor, walk: &mut Walk<'_, '_>) -> Result<()> {
        if let Some(sinks) = &mut walk.sinks
            && let Some((k, view)) = self.sunk(input, sinks.params)
        {
            let shape = self.shape(input)?;
            let (_, array, offset) = sinks.params[k];
            let carry = std::mem::replace(&mut walk.started[k], true);
            let array = &mut sinks.arrays[array];
            let region = Region { shape, view: View { offset: offset + view.offset, ..view }, carry };
            *array = match self.written_in_place(part, *array, &region) {
                Some(node) => node,
                None => self.place(part, *array, region)?,
            };
            return Ok(());
        }
        walk.grads[input.index()] = match walk.grads[input.index()] {
            Some(sum) => Some(self.add(sum, part)?),
            None => Some(part),
        };
        Ok(())
    }

    /// The parameter that `t` is, or is all elements of in another order (a transposed weight), and how they lie in it.
    fn sunk(&self, t: Tensor, params: &[(Tensor, usize, u64)]) -> Option<(usize, View)> {
        let find = |t: Tensor| params.iter().position(|(p, ..)| *p == t);
        let node = &self.nodes[t.index()];
        if let Some(k) = find(t) {
            return Some((k, View::dense(&node.shape)));
        }
        let Op::View(view) = node.op else { return None };
        let all = self.nodes[node.inputs[0].index()].shape.elements() == node.shape.elements();
        let repeats = (0..node.shape.rank()).any(|d| node.shape.dims()[d] > 1 && view.strides[d] == 0);
        find(node.inputs[0]).filter(|_| all && !repeats).map(|k| (k, view))
    }

    /// Lets the node that makes `part` write into a region of `array` instead, going on from what is stored there: carry,
    /// don't add. `None` where its kernel cannot, or where somebody else reads the part.
    fn written_in_place(&mut self, part: Tensor, array: Tensor, region: &Region) -> Option<Tensor> {
        let node = &self.nodes[part.index()];
        let writes = match &node.op {
            Op::MatMul { bias: false, alpha } => *alpha == 1.0 || !region.carry,
            Op::Nn(op) => op.takes_region() && region.view.is_dense(&region.shape),
            _ => false,
        };
        let read = self.nodes[part.index() + 1..].iter().any(|n| n.inputs.contains(&part));
        // The array must have been written before the product: nodes run in order.
        if !writes || read || node.into.is_some() || array > part {
            return None;
        }
        let whole = self.nodes[array.index()].shape;
        let node = &mut self.nodes[part.index()];
        node.inputs.push(array);
        (node.shape, node.into) = (whole, Some(region.clone()));
        Some(part)
    }

    /// Gradients of parameters that the loss does not reach are zero.
    fn fill_unreached(&mut self, walk: &mut Walk<'_, '_>) -> Result<()> {
        let Some(sinks) = &mut walk.sinks else { return Ok(()) };
        for (_, (t, array, offset)) in sinks.params.iter().enumerate().filter(|(k, _)| !walk.started[*k]) {
            let shape = self.shape(*t)?;
            let zero = self.fill(shape, 0.0);
            let region = Region { shape, view: View { offset: *offset, strides: shape.dense_strides() }, carry: false };
            sinks.arrays[*array] = self.place_over(zero, sinks.arrays[*array], region)?;
        }
        Ok(())
    }

    /// Adds the nodes of a block once more, for the backward pass; says where their values are now.
    fn compute_again(&mut self, block: u32, walk: &mut Walk<'_, '_>) -> Result<HashMap<Tensor, Tensor>> {
        let mut values = HashMap::new();
        for i in 0..walk.grads.len() {
            if self.nodes[i].block != Some(block) {
                continue;
            }
            let old = Tensor(i as u32);
            let mut node = self.nodes[i].clone();
            match node.op {
                // Storage that is there anyway.
                Op::Input { .. } | Op::Weight { .. } | Op::State(_) => continue,
                // A hook marks a place in the forward; it is not called twice.
                Op::Hook { .. } => {
                    let x = node.inputs[0];
                    values.insert(old, values.get(&x).copied().unwrap_or(x));
                    continue;
                }
                _ => {}
            }
            for t in node.inputs.iter_mut() {
                *t = values.get(t).copied().unwrap_or(*t);
            }
            node.pass = Pass::Backward;
            node.visit = node.visit.map(|v| self.mirror(v, &mut walk.mirrors));
            node.extras.clear();
            let new = Tensor(self.nodes.len() as u32);
            if let Some(dtype) = self.dtypes.get(&old.0).copied() {
                self.dtypes.insert(new.0, dtype);
            }
            let of = matches!(node.op, Op::Extra).then(|| node.inputs[0]);
            self.nodes.push(node);
            if let Some(of) = of {
                self.nodes[of.index()].extras.push(new);
            }
            values.insert(old, new);
        }
        Ok(values)
    }

    /// The backward visit of a forward one, made at its first use.
    fn mirror(&mut self, visit: u32, mirrors: &mut [Option<u32>]) -> u32 {
        *mirrors[visit as usize].get_or_insert_with(|| {
            let segment = self.visits[visit as usize].segment.clone();
            self.visits.push(Visit { segment });
            self.visits.len() as u32 - 1
        })
    }

    /// The gradient that `dy`, the gradient of value `y`, sends to operand `k`.
    fn vjp(
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
        let Some(region) = into else { return self.vjp_of(y, op, inputs, k, dy).map(Some) };
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
                    let apart = |other: Vec<(u64, u64)>| own.iter().zip(other).any(|((a, b), (c, d))| *b <= c || d <= *a);
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
