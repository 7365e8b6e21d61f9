//! Reverse-mode differentiation: adds the backward nodes to the same graph.
//!
//! Nothing is built below the lowest tensor that a gradient is asked for. A node of a by-hand visit gets its
//! gradients in a mirrored visit, so what is released after the forward is loaded again before the backward.

use std::collections::HashMap;

use super::{CustomGrad, Graph, Op, Region, Tensor, View, Visit};
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
    /// Place of each of the sinks' parameters among them.
    params: HashMap<Tensor, usize>,
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
            return Err(Error::Shape {
                op: "gradient",
                reason: format!("the loss has shape {shape}, not one element"),
            });
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
            params: sunk.iter().enumerate().rev().map(|(k, t)| (*t, k)).collect(),
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
                        let reason = format!(
                            "a gradient of shape {} for an operand of {}",
                            self.shape(part)?,
                            self.shape(*input)?
                        );
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
            && let Some((k, view)) = self.sunk(input, &walk.params)
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
    fn sunk(&self, t: Tensor, params: &HashMap<Tensor, usize>) -> Option<(usize, View)> {
        let find = |t: Tensor| params.get(&t).copied();
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
        self.settle(part.index()..part.index() + 1); // nobody has read it
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
        for i in self.blocks[block as usize].clone() {
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
            // Append writes the same entries again; a sum would be added twice.
            let adds = node.into.as_ref().is_some_and(|r| r.carry) && node.op != Op::Nn(NnOp::Append);
            if adds && self.nodes[self.storage(old).0.index()].block != Some(block) {
                let reason = "it adds to storage from outside, which computing it again would do twice".into();
                return Err(Error::Invalid { what: "block".into(), reason });
            }
            for t in node.inputs.iter_mut() {
                *t = values.get(t).copied().unwrap_or(*t);
            }
            node.pass = Pass::Backward;
            node.visit = node.visit.map(|v| self.mirror(v, &mut walk.mirrors));
            node.extras.clear();
            let of = matches!(node.op, Op::Extra).then(|| node.inputs[0]);
            let new = self.push_node(node);
            if let Some(dtype) = self.dtypes.get(&old.0).copied() {
                self.dtypes.insert(new.0, dtype);
            }
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use crate::graph::{Graph, Region, Shape, View};

    #[test]
    fn a_block_that_adds_to_storage_from_outside_is_not_computed_again() {
        let shape = Shape::new(&[3]).unwrap();
        let build = |inside: bool| {
            let mut g = Graph::new();
            let x = g.input("x", [3]).unwrap();
            let outside = g.empty(shape);
            let y = g
                .block(|g| {
                    let into = if inside { g.empty(shape) } else { outside };
                    let first = g.place(x, into, Region { shape, view: View::dense(&shape), carry: false })?;
                    let sum = g.place(x, first, Region { shape, view: View::dense(&shape), carry: true })?;
                    g.mul(sum, sum)
                })
                .unwrap();
            let loss = g.sum(y).unwrap();
            g.value_and_grad(loss, &[x])
        };
        assert!(build(true).is_ok());
        assert!(build(false).unwrap_err().to_string().contains("twice"));
    }
}
