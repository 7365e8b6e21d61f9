//! Twin of `elementwise.wgsl`. Values only: rounding to a narrower output dtype is the caller's comparison.

use super::{Real, strided};
use crate::elementwise::Params;
use crate::elementwise_op as op;

/// `out[i] = f(a, b, c)` for the operation `code`.
pub fn elementwise<T: Real>(p: &Params, code: u32, a: &[T], b: &[T], c: &[T], out: &mut [T]) {
    for (i, slot) in out.iter_mut().enumerate().take(p.n as usize) {
        let x = |i| a[p.a_off as usize + strided(i, p.rank, &p.shape, &p.a_stride)];
        let y = |i| b[p.b_off as usize + strided(i, p.rank, &p.shape, &p.b_stride)];
        *slot = match code {
            op::CONCAT2 => concat(p, i, a, b),
            op::SELECT => {
                let condition = c[p.c_off as usize + strided(i, p.rank, &p.shape, &p.c_stride)];
                if condition != T::zero() { x(i) } else { y(i) }
            }
            _ if takes_two(code) => apply(code, x(i), y(i), T::of(f64::from(p.scalar))),
            _ => apply(code, x(i), T::zero(), T::of(f64::from(p.scalar))),
        };
    }
}

/// Whether the operation reads `b`.
fn takes_two(code: u32) -> bool {
    matches!(code, op::ADD..=op::POW | op::LT..=op::EQ | op::TANH_GRAD..=op::GELU_TANH_GRAD)
}

fn concat<T: Real>(p: &Params, index: usize, a: &[T], b: &[T]) -> T {
    let mut rest = index;
    let (mut a_at, mut b_at) = (p.a_off as usize, p.b_off as usize);
    let mut in_b = false;
    for d in (0..p.rank as usize).rev() {
        let size = p.shape[d / 4][d % 4] as usize;
        let i = rest % size;
        rest /= size;
        let mut b_i = i;
        if d == p.axis as usize {
            in_b = i >= p.split as usize;
            b_i = i.saturating_sub(p.split as usize);
        }
        a_at += i * p.a_stride[d / 4][d % 4] as usize;
        b_at += b_i * p.b_stride[d / 4][d % 4] as usize;
    }
    if in_b { b[b_at] } else { a[a_at] }
}

fn apply<T: Real>(code: u32, x: T, y: T, scalar: T) -> T {
    let one = T::one();
    let half = T::of(0.5);
    let truth = |t: bool| if t { one } else { T::zero() };
    let root = T::of((2.0 / core::f64::consts::PI).sqrt());
    let inner = |x: T| root * (x + T::of(0.044715) * x * x * x);
    match code {
        op::ADD => x + y,
        op::SUB => x - y,
        op::MUL => x * y,
        op::DIV => x / y,
        op::MIN => x.min(y),
        op::MAX => x.max(y),
        op::POW => x.powf(y),
        op::NEG => -x,
        op::ABS => x.abs(),
        op::EXP => x.exp(),
        op::LOG => x.ln(),
        op::SQRT => x.sqrt(),
        op::RSQRT => one / x.sqrt(),
        op::RECIP => one / x,
        op::TANH => x.tanh(),
        op::SIGMOID => x.sigmoid(),
        op::RELU => x.max(T::zero()),
        op::SILU => x * x.sigmoid(),
        op::GELU_ERF => x * x.normal_cdf(),
        op::GELU_TANH => half * x * (one + inner(x).tanh()),
        op::SIN => x.sin(),
        op::COS => x.cos(),
        op::LT => truth(x < y),
        op::LE => truth(x <= y),
        op::EQ => truth(x == y),
        op::SCALE => x * scalar,
        op::ADD_SCALAR => x + scalar,
        op::TANH_GRAD => y * (one - x * x),
        op::SIGMOID_GRAD => y * (x * (one - x)),
        op::RELU_GRAD => {
            if x > T::zero() {
                y
            } else {
                T::zero()
            }
        }
        op::SILU_GRAD => {
            let s = x.sigmoid();
            y * (s * (one + x * (one - s)))
        }
        op::GELU_ERF_GRAD => {
            let density = T::of(0.5 * core::f64::consts::FRAC_2_SQRT_PI * core::f64::consts::FRAC_1_SQRT_2)
                * (-half * x * x).exp();
            y * (x.normal_cdf() + x * density)
        }
        op::GELU_TANH_GRAD => {
            let t = inner(x).tanh();
            let slope = root * (one + T::of(3.0 * 0.044715) * x * x);
            y * (half * (one + t) + half * x * (one - t * t) * slope)
        }
        _ => x,
    }
}
