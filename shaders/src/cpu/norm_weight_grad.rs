//! Twin of `norm_weight_grad.wgsl`.

use super::Real;
use crate::norm_weight_grad::Params;
use crate::norm_weight_grad_op::GAMMA;

/// Gradient of a norm's weight or bias, over the rows in order.
pub fn norm_weight_grad<T: Real>(p: &Params, op: u32, x: &[T], stats: &[T], dy: &[T], dw: &mut [T]) {
    let n = p.n as usize;
    for col in 0..n {
        let slot = &mut dw[p.out_off as usize + col];
        let mut acc = if p.carry == 1 { *slot } else { T::zero() };
        for row in 0..p.rows as usize {
            let at = row * n + col;
            acc =
                if op == GAMMA { dy[at].fma((x[at] - stats[2 * row]) * stats[2 * row + 1], acc) } else { acc + dy[at] };
        }
        *slot = acc;
    }
}
