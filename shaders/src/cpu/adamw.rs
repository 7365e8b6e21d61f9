//! Twin of `adamw.wgsl`.

use super::Real;
use crate::adamw::Params;

/// One AdamW step in place, on `values`, `m` and `v`; `clip` multiplies the gradients, `hyper` is as in the shader.
pub fn adamw<T: Real>(p: &Params, grads: &[T], clip: T, hyper: &[T], values: &mut [T], m: &mut [T], v: &mut [T]) {
    let of = |x: f32| T::of(f64::from(x));
    for at in p.off as usize..(p.off + p.n) as usize {
        let g = grads[at] * clip;
        m[at] = of(p.rest1).fma(g, of(p.beta1) * m[at]);
        v[at] = (of(p.rest2) * g).fma(g, of(p.beta2) * v[at]);
        let step = m[at] * hyper[2] / ((v[at] * hyper[3]).sqrt() + of(p.eps));
        values[at] = (-hyper[0]).fma(step, values[at] * hyper[1]);
    }
}
