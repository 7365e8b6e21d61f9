//! Shapes and strided views: the arithmetic that lets transpose, slice and broadcast cost nothing.
//!
//! Everything is checked: a shape product that overflows is an error where the shape is made, so no later
//! code multiplies unchecked numbers that came from a file.

use std::fmt;

use crate::error::{Error, Result};

/// Highest rank of a tensor.
pub const MAX_RANK: usize = 6;

/// The extents of a tensor, outermost first. Rank 0 is a scalar of one element; an extent may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Shape {
    rank: u8,
    dims: [u64; MAX_RANK],
}

impl Shape {
    /// Makes a shape. Fails above rank 6 or when the number of elements does not fit 32 bits, the width of
    /// an index in a kernel.
    pub fn new(dims: &[u64]) -> Result<Shape> {
        if dims.len() > MAX_RANK {
            return Err(shape_error(format!("rank {} is above the highest of {MAX_RANK}", dims.len())));
        }
        let elements = dims.iter().try_fold(1u64, |n, d| n.checked_mul((*d).max(1)));
        if elements.is_none_or(|n| n > u64::from(u32::MAX)) {
            return Err(shape_error(format!("{dims:?} has more elements than a 32-bit index reaches")));
        }
        let mut all = [1; MAX_RANK];
        all[..dims.len()].copy_from_slice(dims);
        Ok(Shape { rank: dims.len() as u8, dims: all })
    }

    /// The scalar shape.
    pub fn scalar() -> Shape {
        Shape { rank: 0, dims: [1; MAX_RANK] }
    }

    /// The extents.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.rank as usize]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of elements; 0 when an extent is 0.
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }

    /// The strides, in elements, of a dense row-major tensor of this shape.
    pub fn dense_strides(&self) -> [u64; MAX_RANK] {
        let mut strides = [0; MAX_RANK];
        let mut step = 1;
        for i in (0..self.rank()).rev() {
            strides[i] = step;
            step *= self.dims[i].max(1);
        }
        strides
    }

    /// The shape that two operands broadcast to, NumPy's rule.
    pub fn broadcast(&self, other: &Shape) -> Result<Shape> {
        let rank = self.rank().max(other.rank());
        let extent = |s: &Shape, i: usize| {
            if i + s.rank() < rank { 1 } else { s.dims[i + s.rank() - rank] }
        };
        let mut dims = [1; MAX_RANK];
        for (i, d) in dims.iter_mut().enumerate().take(rank) {
            let (a, b) = (extent(self, i), extent(other, i));
            *d = match (a, b) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return Err(shape_error(format!("{self} and {other} do not broadcast"))),
            };
        }
        Shape::new(&dims[..rank])
    }
}

fn shape_error(reason: String) -> Error {
    Error::Shape { op: "shape", reason }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// How a tensor's elements lie in the storage it shares: element `i` is at `offset + Σ i_d · strides_d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// First element, in elements of the storage.
    pub offset: u64,
    /// One stride a dimension, in elements; 0 repeats.
    pub strides: [u64; MAX_RANK],
}

impl View {
    /// The view of a dense row-major tensor.
    pub fn dense(shape: &Shape) -> View {
        View { offset: 0, strides: shape.dense_strides() }
    }

    /// Whether the elements lie one after another in row-major order.
    pub fn is_dense(&self, shape: &Shape) -> bool {
        let want = shape.dense_strides();
        (0..shape.rank()).all(|i| shape.dims()[i] <= 1 || self.strides[i] == want[i])
    }

    /// This view seen under a larger shape that `shape` broadcasts to: added and stretched dimensions repeat.
    pub fn broadcast(&self, shape: &Shape, to: &Shape) -> View {
        let shift = to.rank() - shape.rank();
        let mut strides = [0; MAX_RANK];
        for i in 0..shape.rank() {
            if shape.dims()[i] == to.dims()[i + shift] {
                strides[i + shift] = self.strides[i];
            }
        }
        View { offset: self.offset, strides }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        let s = |d: &[u64]| Shape::new(d).unwrap();
        assert_eq!(s(&[3, 1]).broadcast(&s(&[4])).unwrap(), s(&[3, 4]));
        assert_eq!(Shape::scalar().broadcast(&s(&[2, 0])).unwrap(), s(&[2, 0]));
        assert!(s(&[3]).broadcast(&s(&[4])).is_err());
    }

    #[test]
    fn a_shape_that_overflows_is_refused_where_it_is_made() {
        assert!(Shape::new(&[1 << 20, 1 << 20]).is_err());
        assert!(Shape::new(&[0, u64::MAX]).is_err());
        assert!(Shape::new(&[1; 7]).is_err());
    }

    #[test]
    fn a_stretched_dimension_repeats() {
        let from = Shape::new(&[3, 1]).unwrap();
        let to = Shape::new(&[2, 3, 5]).unwrap();
        let view = View::dense(&from).broadcast(&from, &to);
        assert_eq!(&view.strides[..3], &[0, 1, 0]);
    }
}
