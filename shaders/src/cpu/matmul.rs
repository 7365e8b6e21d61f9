//! Twin of `matmul.wgsl`.

use super::Real;
use crate::matmul::Params;

/// `c = alpha * (carry ? c : 0 + a b) + bias`, one accumulator over ascending k.
pub fn matmul<T: Real>(p: &Params, a: &[T], b: &[T], bias: &[T], c: &mut [T]) {
    for i0 in 0..p.b0 {
        for i1 in 0..p.b1 {
            for row in 0..p.m {
                for col in 0..p.n {
                    let at = (p.c_off + i0 * p.c_b0 + i1 * p.c_b1 + row * p.c_m + col * p.c_n) as usize;
                    let mut acc = if p.carry == 1 { c[at] } else { T::zero() };
                    for k in 0..p.k {
                        // Strides over k may be negative, as wrapping numbers: a sum over descending k.
                        let a_at = p.a_off + i0 * p.a_b0 + i1 * p.a_b1 + row * p.a_m;
                        let b_at = p.b_off + i0 * p.bb0 + i1 * p.bb1 + col * p.b_n;
                        let x = a[a_at.wrapping_add(k.wrapping_mul(p.a_k)) as usize];
                        let w = b[b_at.wrapping_add(k.wrapping_mul(p.b_k)) as usize];
                        acc = x.fma(w, acc);
                    }
                    let alpha = T::of(f64::from(p.alpha));
                    c[at] =
                        if p.has_bias == 1 { alpha.fma(acc, bias[(p.bias_off + col) as usize]) } else { alpha * acc };
                }
            }
        }
    }
}
