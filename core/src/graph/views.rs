//! The same elements seen otherwise, and elements written into a larger tensor.
//!
//! Views cost nothing: they are strides over storage that is there anyway, and a copy is made only where a kernel needs
//! elements to lie one after another.

use super::{Graph, MAX_RANK, Op, Region, Shape, Tensor, Unary, View};
use crate::error::{Error, Result};
use crate::weights::DType;

impl Graph {
    /// Dense elements `offset ..` of a tensor, under another shape; costs nothing.
    pub fn window(&mut self, x: Tensor, offset: u64, shape: Shape) -> Result<Tensor> {
        let from = self.shape(x)?;
        if offset.checked_add(shape.elements()).is_none_or(|end| end > from.elements()) {
            return Err(Error::Shape { op: "window", reason: format!("{shape} at {offset} does not lie in {from}") });
        }
        let x = self.dense(x)?;
        Ok(self.push(Op::View(View { offset, strides: shape.dense_strides() }), vec![x], shape))
    }

    /// Elements `start .. end` along a dimension; costs nothing.
    pub fn slice(&mut self, x: Tensor, dim: usize, start: u64, end: u64) -> Result<Tensor> {
        let from = self.shape(x)?;
        if dim >= from.rank() || start > end || end > from.dims()[dim] {
            return Err(Error::Shape {
                op: "slice",
                reason: format!("{start}..{end} of dimension {dim} does not lie in {from}"),
            });
        }
        let mut dims = from.dims().to_vec();
        dims[dim] = end - start;
        let strides = from.dense_strides();
        Ok(self.push(Op::View(View { offset: start * strides[dim], strides }), vec![x], Shape::new(&dims)?))
    }

    /// Tensors behind one another along a dimension.
    pub fn concat(&mut self, parts: &[Tensor], dim: usize) -> Result<Tensor> {
        let fail = |reason: String| Error::Shape { op: "concat", reason };
        let first = self.shape(*parts.first().ok_or_else(|| fail("there is nothing to join".into()))?)?;
        let mut dims = first.dims().to_vec();
        if dim >= dims.len() {
            return Err(fail(format!("{first} has no dimension {dim}")));
        }
        dims[dim] = 0;
        for part in parts {
            let s = self.shape(*part)?;
            let fits = s.rank() == first.rank() && (0..s.rank()).all(|d| d == dim || s.dims()[d] == first.dims()[d]);
            if !fits {
                return Err(fail(format!("{s} and {first} differ outside dimension {dim}")));
            }
            dims[dim] += s.dims()[dim];
        }
        let shape = Shape::new(&dims)?;
        let mut joined = self.push(Op::Empty, vec![], shape);
        let (mut at, strides) = (0, shape.dense_strides());
        for part in parts {
            let s = self.shape(*part)?;
            let view = View { offset: at * strides[dim], strides };
            joined = self.place(*part, joined, Region { shape: s, view, carry: false })?;
            at += s.dims()[dim];
        }
        Ok(joined)
    }

    /// `into` with `x` written (or, with `carry`, added) at a region. Storage made by [`Graph::empty`], a state and the
    /// result of another `place` are written where they lie and must be read through the result from then on; anything
    /// else is copied first.
    pub fn place(&mut self, x: Tensor, into: Tensor, region: Region) -> Result<Tensor> {
        let root = self.storage(into).0;
        let state = matches!(self.nodes[root.index()].op, Op::State(_));
        let owned =
            state || matches!(self.nodes[root.index()].op, Op::Empty) || self.nodes[into.index()].into.is_some();
        let shared = self.storage(x).0 == root;
        let into = if state || owned && self.is_whole(into) && !shared { into } else { self.unary(Unary::Copy, into)? };
        self.place_over(x, into, region)
    }

    /// As [`Graph::place`], over whatever `into` holds.
    pub(crate) fn place_over(&mut self, x: Tensor, into: Tensor, region: Region) -> Result<Tensor> {
        let x = self.computed(x)?;
        self.push_into(Op::Place, vec![x], into, region)
    }

    /// A node that writes into a region of `into`.
    pub(crate) fn push_into(
        &mut self,
        op: Op,
        mut inputs: Vec<Tensor>,
        into: Tensor,
        region: Region,
    ) -> Result<Tensor> {
        if !self.is_whole(into) {
            let reason = "a write goes into a whole tensor; name the part by its region".into();
            return Err(Error::Shape { op: "place", reason });
        }
        let shape = self.shape(into)?;
        inputs.push(into);
        Ok(self.push_with(op, inputs, shape, Some(region)))
    }

    /// Storage without content, to be written into.
    pub fn empty(&mut self, shape: Shape) -> Tensor {
        self.push(Op::Empty, vec![], shape)
    }

    /// The dimensions in another order; costs nothing.
    pub fn permute(&mut self, x: Tensor, order: &[usize]) -> Result<Tensor> {
        let shape = self.shape(x)?;
        let mut seen = [false; MAX_RANK];
        if order.len() != shape.rank()
            || order.iter().any(|d| *d >= shape.rank() || std::mem::replace(&mut seen[*d], true))
        {
            return Err(Error::Shape {
                op: "permute",
                reason: format!("{order:?} is no order of the dimensions of {shape}"),
            });
        }
        if order.iter().enumerate().all(|(i, d)| i == *d) {
            return Ok(x);
        }
        let dense = shape.dense_strides();
        let mut strides = [0; MAX_RANK];
        for (i, d) in order.iter().enumerate() {
            strides[i] = dense[*d];
        }
        let shape = Shape::new(&order.iter().map(|d| shape.dims()[*d]).collect::<Vec<_>>())?;
        Ok(self.push(Op::View(View { offset: 0, strides }), vec![x], shape))
    }

    /// The last two dimensions exchanged; costs nothing.
    pub fn transpose(&mut self, x: Tensor) -> Result<Tensor> {
        let rank = self.shape(x)?.rank();
        if rank < 2 {
            return Err(Error::Shape { op: "transpose", reason: "needs at least two dimensions".into() });
        }
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        self.permute(x, &order)
    }

    /// The same elements, row-major, under another shape; costs nothing when `x` is dense.
    pub fn reshape(&mut self, x: Tensor, dims: &[u64]) -> Result<Tensor> {
        let (from, to) = (self.shape(x)?, Shape::new(dims)?);
        if from.elements() != to.elements() {
            return Err(Error::Shape { op: "reshape", reason: format!("{from} has other elements than {to}") });
        }
        if from == to {
            return Ok(x);
        }
        let x = self.dense(x)?;
        Ok(self.push(Op::View(View::dense(&to)), vec![x], to))
    }

    /// `x` repeated to the shape that it broadcasts to; costs nothing.
    pub fn broadcast_to(&mut self, x: Tensor, to: Shape) -> Result<Tensor> {
        let from = self.shape(x)?;
        if from == to {
            return Ok(x);
        }
        if from.broadcast(&to)? != to {
            return Err(Error::Shape { op: "broadcast", reason: format!("{from} does not broadcast to {to}") });
        }
        let view = View::dense(&from).broadcast(&from, &to);
        Ok(self.push(Op::View(view), vec![x], to))
    }

    /// `x` with its elements one after another, copied only where a view says otherwise.
    pub fn dense(&mut self, x: Tensor) -> Result<Tensor> {
        let shape = self.shape(x)?;
        let (_, view) = self.storage(x);
        if view.offset == 0 && view.is_dense(&shape) {
            return Ok(x);
        }
        let integers = self.dtype(x) == DType::I32;
        let y = self.unary(Unary::Copy, x)?;
        if integers {
            self.dtypes.insert(y.0, DType::I32);
        }
        Ok(y)
    }

    /// Whether the elements of `x` are those of its storage, one after another.
    fn is_whole(&self, x: Tensor) -> bool {
        let (root, view) = self.storage(x);
        let shape = self.nodes[x.index()].shape;
        view.offset == 0 && view.is_dense(&shape) && self.nodes[root.index()].shape.elements() == shape.elements()
    }

    /// `x` dense, in f32 or i32, and all of its storage: what can be downloaded.
    pub(super) fn computed(&mut self, x: Tensor) -> Result<Tensor> {
        let (root, _) = self.storage(x);
        let stored = matches!(self.nodes[root.index()].op, Op::Weight { .. } | Op::State(_) | Op::Folded(_));
        let part = !self.is_whole(x);
        match self.dtype(x) {
            DType::F32 if stored || part => self.unary(Unary::Copy, x),
            DType::F32 => Ok(x),
            DType::I32 if !part => Ok(x),
            DType::I32 => {
                let y = self.unary(Unary::Copy, x)?;
                self.dtypes.insert(y.0, DType::I32);
                Ok(y)
            }
            _ => self.unary(Unary::Copy, x),
        }
    }

    /// The value whose storage `x` lies in, and how it lies there.
    pub(crate) fn storage(&self, x: Tensor) -> (Tensor, View) {
        self.places[x.index()]
    }

    /// As [`Graph::storage`], found out from the node and the places of its operands.
    pub(super) fn place_of(&self, i: usize) -> (Tensor, View) {
        let node = &self.nodes[i];
        if let (Some(_), Some(into)) = (&node.into, node.inputs.last()) {
            return (self.storage(*into).0, View::dense(&node.shape));
        }
        match &node.op {
            Op::Hook { .. } | Op::Custom(_) => self.storage(node.inputs[0]),
            Op::View(view) => {
                let input = node.inputs[0];
                let (root, base) = self.storage(input);
                (root, compose(view, &self.node(input).shape, &base))
            }
            _ => (Tensor(i as u32), View::dense(&node.shape)),
        }
    }
}

/// A view given over the dense elements of `shape`, seen through `base`, where those elements really lie. Views
/// are only made over dense tensors or by permuting, so each stride of `view` is a stride of the dense shape.
fn compose(view: &View, shape: &Shape, base: &View) -> View {
    if base.is_dense(shape) {
        return View { offset: base.offset + view.offset, strides: view.strides };
    }
    let dense = shape.dense_strides();
    let mut strides = [0; MAX_RANK];
    for (out, stride) in strides.iter_mut().zip(view.strides) {
        // Extents of 1 have a stride that is never followed, so the first dimension that fits is right.
        let found = (0..shape.rank()).find(|d| stride != 0 && dense[*d] == stride && shape.dims()[*d] > 1);
        *out = found.map_or(0, |d| base.strides[d]);
    }
    let mut offset = base.offset;
    let mut rest = view.offset;
    for (step, stride) in dense.iter().zip(base.strides).take(shape.rank()).filter(|(step, _)| **step > 0) {
        offset += rest / step * stride;
        rest %= step;
    }
    View { offset, strides }
}
