//! Twin of `matmul_rows.wgsl`: the op is `matmul`, to the bit.

use super::Real;
use crate::matmul_rows::Params;

/// `c = alpha * (carry ? c : 0 + a b) + bias`, one accumulator over ascending k.
pub fn matmul_rows<T: Real>(p: &Params, a: &[T], b: &[T], bias: &[T], c: &mut [T]) {
    super::matmul(&bytemuck::cast(*p), a, b, bias, c);
}
