//! The number type of the twins: f32 or f64, with the functions kernels use.

use core::fmt::Debug;
use core::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

/// f32 or f64.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    /// The nearest value of this type.
    fn of(value: f64) -> Self;
    /// The value as f64.
    fn f64(self) -> f64;
    /// `self * b + c` with one rounding.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the self.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Self to the power.
    fn powf(self, power: Self) -> Self;
    /// Sine.
    fn sin(self) -> Self;
    /// Cosine.
    fn cos(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;

    /// Zero.
    fn zero() -> Self {
        Self::default()
    }
    /// One.
    fn one() -> Self {
        Self::of(1.0)
    }
    /// Absolute value.
    fn abs(self) -> Self {
        if self < Self::zero() { -self } else { self }
    }
    /// The larger.
    fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
    /// The smaller.
    fn min(self, other: Self) -> Self {
        if other < self { other } else { self }
    }
    /// Logistic function.
    fn sigmoid(self) -> Self {
        let e = (-self.abs()).exp();
        (if self >= Self::zero() { Self::one() } else { e }) / (Self::one() + e)
    }
    /// Distribution function of the standard normal.
    fn normal_cdf(self) -> Self {
        Self::of(0.5 * erfc(-self.f64() * core::f64::consts::FRAC_1_SQRT_2))
    }
}

macro_rules! real {
    ($t:ty) => {
        impl Real for $t {
            fn of(value: f64) -> Self {
                value as $t
            }
            fn f64(self) -> f64 {
                self as f64
            }
            fn fma(self, b: Self, c: Self) -> Self {
                self.mul_add(b, c)
            }
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            fn powf(self, power: Self) -> Self {
                <$t>::powf(self, power)
            }
            fn sin(self) -> Self {
                <$t>::sin(self)
            }
            fn cos(self) -> Self {
                <$t>::cos(self)
            }
            fn tanh(self) -> Self {
                <$t>::tanh(self)
            }
        }
    };
}
real!(f32);
real!(f64);

/// Complementary error function in f64: power series near zero, continued fraction beyond.
fn erfc(z: f64) -> f64 {
    if z < 0.0 {
        return 2.0 - erfc(-z);
    }
    if z < 2.5 {
        // erf(z) = 2/sqrt(pi) exp(-z^2) sum of z (2 z^2)^n / (1 3 5 .. (2n + 1)): all terms positive, no cancellation.
        let mut term = z;
        let mut sum = z;
        let mut n = 1.0;
        while term > sum * 1e-17 {
            term *= 2.0 * z * z / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        return 1.0 - core::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp() * sum;
    }
    let mut tail = 0.0;
    for k in (1..200).rev() {
        tail = 0.5 * f64::from(k) / (z + tail);
    }
    0.5 * core::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp() / (z + tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution_has_its_tabled_values() {
        for (x, want) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-1.0, 0.158_655_253_931_457_05),
            (-3.0, 0.001_349_898_031_630_094_5),
            (-6.0, 9.865_876_450_376_98e-10),
        ] {
            let got = x.normal_cdf();
            assert!((got / want - 1.0).abs() < 1e-12, "Phi({x}) = {got}, want {want}");
        }
    }
}
