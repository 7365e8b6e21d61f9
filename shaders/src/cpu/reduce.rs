//! Twin of `reduce.wgsl`.

use super::{Real, strided};
use crate::reduce::Params;
use crate::reduce_op::{ARGMAX, MAX, MEAN, SUM};

/// Threads of a workgroup: partials of the op.
const LANES: usize = 256;

/// One output by 256 partials and a binary tree. An argmax is written as a number.
pub fn reduce<T: Real>(p: &Params, op: u32, a: &[T], out: &mut [T]) {
    for (output, slot) in out.iter_mut().enumerate().take(p.outputs as usize) {
        let base = p.a_off as usize + strided(output, p.kept_rank, &p.kept_shape, &p.kept_stride);
        let load = |i: usize| a[base + strided(i, p.red_rank, &p.red_shape, &p.red_stride)];
        let count = p.count as usize;
        let mut lanes: Vec<(T, usize)> = (0..LANES)
            .map(|lane| {
                if op == SUM || op == MEAN {
                    return ((lane..count).step_by(LANES).fold(T::zero(), |sum, i| sum + load(i)), 0);
                }
                let start = lane.min(count - 1);
                (start..count).step_by(LANES).skip(1).fold((load(start), start), |best, i| better(best, (load(i), i)))
            })
            .collect();
        let mut step = LANES / 2;
        while step > 0 {
            for lane in 0..step {
                let (x, y) = (lanes[lane], lanes[lane + step]);
                lanes[lane] = if op == SUM || op == MEAN { (x.0 + y.0, 0) } else { better(x, y) };
            }
            step /= 2;
        }
        *slot = finish(op, p.scale, lanes[0]);
    }
}

/// The larger value; of equal ones the lower index.
pub(crate) fn better<T: Real>(x: (T, usize), y: (T, usize)) -> (T, usize) {
    if y.0 > x.0 || (y.0 == x.0 && y.1 < x.1) { y } else { x }
}

/// What of the winner is stored.
pub(crate) fn finish<T: Real>(op: u32, scale: f32, (value, index): (T, usize)) -> T {
    match op {
        SUM | MAX => value,
        MEAN => T::of(f64::from(scale)) * value,
        ARGMAX => T::of(index as f64),
        _ => value,
    }
}
