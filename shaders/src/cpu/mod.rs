//! CPU twins of the kernels: the same geometry and the same order of operations, in plain loops.
//!
//! Inputs arrive decoded, one `T` an element; `T` is f32 or f64 ([`Real`]). With f64 a twin is the oracle of its kernel, with
//! f32 it shows what the order of operations costs. Slices too short for the parameters panic: twins are for tests.

mod elementwise;
mod fill;
mod matmul;
mod real;
mod reduce;

pub use elementwise::elementwise;
pub use fill::{fill, fill_from};
pub use matmul::matmul;
pub use real::Real;
pub use reduce::{reduce, reduce_small};

/// Offset of row-major element `index` of a strided tensor.
pub(crate) fn strided(index: usize, rank: u32, shape: &[[u32; 4]; 2], stride: &[[u32; 4]; 2]) -> usize {
    let mut rest = index;
    let mut at = 0;
    for d in (0..rank as usize).rev() {
        let size = shape[d / 4][d % 4] as usize;
        at += rest % size * stride[d / 4][d % 4] as usize;
        rest /= size;
    }
    at
}
