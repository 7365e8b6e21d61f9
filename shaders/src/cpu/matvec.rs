//! Twin of `matvec.wgsl`.

use super::Real;
use crate::matvec::Params;

/// Partials of an output, and neighbouring elements that one partial takes.
const PARTIALS: usize = 32;
const RUN: usize = 4;

/// `y = alpha * (carry ? y : 0 + x w) + bias` by 32 partials and a binary tree.
pub fn matvec<T: Real>(p: &Params, x: &[T], w: &[T], bias: &[T], y: &mut [T]) {
    for row in 0..p.m {
        for col in 0..p.n {
            let at = (p.y_off + row * p.y_m + col * p.y_n) as usize;
            let mut partials = [T::zero(); PARTIALS];
            if p.carry == 1 {
                partials[0] = y[at];
            }
            for k in 0..p.k {
                let part = &mut partials[k as usize / RUN % PARTIALS];
                let left = x[(p.x_off + row * p.x_m + k * p.x_k) as usize];
                *part = left.fma(w[(p.w_off + k * p.w_k + col * p.w_n) as usize], *part);
            }
            let mut step = PARTIALS / 2;
            while step > 0 {
                for i in 0..step {
                    partials[i] += partials[i + step];
                }
                step /= 2;
            }
            let alpha = T::of(f64::from(p.alpha));
            y[at] = if p.has_bias == 1 {
                alpha.fma(partials[0], bias[(p.bias_off + col) as usize])
            } else {
                alpha * partials[0]
            };
        }
    }
}
