//! Elementwise functions, folds and products.

use super::{Binary, Fold, Graph, Op, Region, Shape, Tensor, Unary, View};
use crate::error::{Error, Result};
use crate::weights::DType;

impl Graph {
    /// `x` as another dtype: f32, f16, bf16 or i32.
    pub fn cast(&mut self, x: Tensor, dtype: DType) -> Result<Tensor> {
        let shape = self.shape(x)?;
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        if matches!(dtype, DType::I64 | DType::U8) {
            return Err(Error::Shape { op: "cast", reason: format!("nothing is computed as {dtype:?}") });
        }
        let y = self.push(Op::Cast, vec![x], shape);
        self.dtypes.insert(y.0, dtype);
        Ok(y)
    }

    /// `cond ≠ 0 ? a : b`, broadcast.
    pub fn select(&mut self, cond: Tensor, a: Tensor, b: Tensor) -> Result<Tensor> {
        let shape = self.shape(a)?.broadcast(&self.shape(b)?)?.broadcast(&self.shape(cond)?)?;
        Ok(self.push(Op::Select, vec![cond, a, b], shape))
    }

    /// `a · b` over the last two dimensions, the leading ones broadcast; `bias` has the last extent of `b`.
    /// `a`: [.., m, k], `b`: [.., k, n], result [.., m, n], f32.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
        self.scaled_matmul(a, b, bias, 1.0)
    }

    /// `alpha · (a · b) (+ bias)`, see [`Graph::matmul`].
    pub fn scaled_matmul(&mut self, a: Tensor, b: Tensor, bias: Option<Tensor>, alpha: f32) -> Result<Tensor> {
        let shape = self.matmul_shape(a, b, bias)?;
        let mut inputs = vec![a, b];
        inputs.extend(bias);
        Ok(self.push(Op::MatMul { bias: bias.is_some(), alpha }, inputs, shape))
    }

    /// `start + a · b (+ bias)`: every accumulator starts from `start`, whose storage the result takes over. `start`
    /// must not be used by anything else.
    pub(crate) fn matmul_from(&mut self, start: Tensor, a: Tensor, b: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
        let shape = self.matmul_shape(a, b, bias)?;
        let region = Region { shape, view: View::dense(&shape), carry: true };
        let mut inputs = vec![a, b];
        inputs.extend(bias);
        self.push_into(Op::MatMul { bias: bias.is_some(), alpha: 1.0 }, inputs, start, region)
    }

    fn matmul_shape(&self, a: Tensor, b: Tensor, bias: Option<Tensor>) -> Result<Shape> {
        let (sa, sb) = (self.shape(a)?, self.shape(b)?);
        let fail = |reason: String| Err(Error::Shape { op: "matmul", reason });
        if sa.rank() < 2 || sb.rank() < 2 {
            return fail(format!("{sa} · {sb}: both need at least two dimensions"));
        }
        let (da, db) = (sa.dims(), sb.dims());
        let ((ba, ma), (bb, mb)) = (da.split_at(da.len() - 2), db.split_at(db.len() - 2));
        if ma[1] != mb[0] {
            return fail(format!("{sa} · {sb}: inner extents {} and {} differ", ma[1], mb[0]));
        }
        let batch = Shape::new(ba)?.broadcast(&Shape::new(bb)?)?;
        if batch.rank() > 2 && batch.elements() > 1 && !(bb.iter().all(|d| *d == 1)) {
            return fail(format!("{sa} · {sb}: more than two batch dimensions on both sides"));
        }
        if let Some(bias) = bias {
            let s = self.shape(bias)?;
            if s.elements() != mb[1] || s.dims().last().is_some_and(|d| *d != mb[1]) {
                return fail(format!("bias {s} does not fit [{}]", mb[1]));
            }
        }
        let mut dims = batch.dims().to_vec();
        dims.extend([ma[0], mb[1]]);
        Shape::new(&dims)
    }

    /// A function of one operand, elementwise.
    pub fn unary(&mut self, f: Unary, x: Tensor) -> Result<Tensor> {
        let shape = self.shape(x)?;
        Ok(self.push(Op::Unary(f), vec![x], shape))
    }

    /// A function of two operands that broadcast, elementwise.
    pub fn binary(&mut self, f: Binary, a: Tensor, b: Tensor) -> Result<Tensor> {
        let shape = self.shape(a)?.broadcast(&self.shape(b)?)?;
        Ok(self.push(Op::Binary(f), vec![a, b], shape))
    }

    /// `a + b`, broadcast.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.binary(Binary::Add, a, b)
    }

    /// `a · b`, elementwise, broadcast.
    pub fn mul(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.binary(Binary::Mul, a, b)
    }

    /// `x · factor`.
    pub fn scale(&mut self, x: Tensor, factor: f32) -> Result<Tensor> {
        let shape = self.shape(x)?;
        Ok(self.push(Op::Scale(factor), vec![x], shape))
    }

    /// A tensor of one repeated value.
    pub fn fill(&mut self, shape: Shape, value: f32) -> Tensor {
        self.push(Op::Fill(value), vec![], shape)
    }

    /// Folds the named dimensions; they disappear from the shape.
    pub fn reduce(&mut self, fold: Fold, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        let shape = self.shape(x)?;
        if dims.iter().any(|d| *d >= shape.rank()) || dims.is_empty() && shape.rank() > 0 {
            return Err(Error::Shape { op: "reduce", reason: format!("{shape} has no dimensions {dims:?}") });
        }
        let (mut kept, mut folded) = (Vec::new(), Vec::new());
        for d in 0..shape.rank() {
            if dims.contains(&d) { folded.push(d) } else { kept.push(d) }
        }
        let order: Vec<usize> = kept.iter().chain(&folded).copied().collect();
        let x = self.permute(x, &order)?;
        let shape = Shape::new(&kept.iter().map(|d| shape.dims()[*d]).collect::<Vec<_>>())?;
        let y = self.push(Op::Reduce { fold, dims: folded.len() }, vec![x], shape);
        if fold == Fold::Argmax {
            self.dtypes.insert(y.0, DType::I32);
        }
        Ok(y)
    }

    /// Mean of all elements, a scalar.
    pub fn mean(&mut self, x: Tensor) -> Result<Tensor> {
        let rank = self.shape(x)?.rank();
        self.reduce(Fold::Mean, x, &(0..rank).collect::<Vec<_>>())
    }

    /// Sum of all elements, a scalar.
    pub fn sum(&mut self, x: Tensor) -> Result<Tensor> {
        let rank = self.shape(x)?.rank();
        self.reduce(Fold::Sum, x, &(0..rank).collect::<Vec<_>>())
    }
}
