//! Twin of `rope.wgsl`.

use super::Real;
use crate::rope::Params;

/// Turns the pairs of the first `2 * half` features of each head; the others pass.
pub fn rope<T: Real>(p: &Params, interleaved: bool, x: &[T], cosines: &[T], sines: &[T], y: &mut [T]) {
    for row in 0..p.b {
        for position in 0..p.t {
            for head in 0..p.h {
                let x = &x[(p.x_off + row * p.x_b + position * p.x_t + head * p.x_h) as usize..][..p.d as usize];
                let y = &mut y[(p.y_off + row * p.y_b + position * p.y_t + head * p.y_h) as usize..][..p.d as usize];
                y.copy_from_slice(x);
                for pair in 0..p.half as usize {
                    let tab = (p.tab_off + row * p.tab_b + position * p.tab_t) as usize + pair;
                    let s = if p.inverse == 1 { -sines[tab] } else { sines[tab] };
                    let (i, j) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + p.half as usize) };
                    y[i] = x[i].fma(cosines[tab], x[j] * -s);
                    y[j] = x[j].fma(cosines[tab], x[i] * s);
                }
            }
        }
    }
}
