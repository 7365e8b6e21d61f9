//! CPU twins of the kernels: the same geometry and the same order of operations, in plain loops.
//!
//! Inputs arrive decoded, one `T` an element; `T` is f32 or f64 ([`Real`]). With f64 a twin is the oracle of its kernel, with
//! f32 it shows what the order of operations costs. Slices too short for the parameters panic: twins are for tests.

mod adamw;
mod append;
mod attention;
mod attention_delta;
mod attention_dkv;
mod attention_dq;
mod ce_grad;
mod ce_loss;
mod ce_lse;
mod clip_scale;
mod dropout;
mod elementwise;
mod fill;
mod fill_from;
mod gather;
mod gather_grad;
mod layer_norm;
mod layer_norm_grad;
mod matmul;
mod matmul_rows;
mod matvec;
mod nonfinite;
mod norm_stats;
mod norm_weight_grad;
mod place;
mod real;
mod reduce;
mod reduce_small;
mod rms_norm;
mod rms_norm_grad;
mod rope;
mod row;
mod softmax;
mod softmax_grad;
mod sumsq;

pub use adamw::adamw;
pub use append::append;
pub use attention::attention;
pub use attention_delta::attention_delta;
pub use attention_dkv::attention_dkv;
pub use attention_dq::attention_dq;
pub use ce_grad::ce_grad;
pub use ce_loss::ce_loss;
pub use ce_lse::ce_lse;
pub use clip_scale::clip_scale;
pub use dropout::dropout;
pub use elementwise::elementwise;
pub use fill::fill;
pub use fill_from::fill_from;
pub use gather::gather;
pub use gather_grad::gather_grad;
pub use layer_norm::layer_norm;
pub use layer_norm_grad::layer_norm_grad;
pub use matmul::matmul;
pub use matmul_rows::matmul_rows;
pub use matvec::matvec;
pub use nonfinite::nonfinite;
pub use norm_stats::norm_stats;
pub use norm_weight_grad::norm_weight_grad;
pub use place::place;
pub use real::Real;
pub use reduce::reduce;
pub use reduce_small::reduce_small;
pub use rms_norm::rms_norm;
pub use rms_norm_grad::rms_norm_grad;
pub use rope::rope;
pub use softmax::softmax;
pub use softmax_grad::softmax_grad;
pub use sumsq::sumsq;

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
