//! Rotary position embedding, and its tables.
//!
//! The tables are made on the host in f64: WGSL promises its sine on [−π, π] only, and positions go far beyond.

use super::{NnOp, Vjp, adjacent_features, dense_f32, shape_error};
use crate::error::{Error, Result};
use crate::graph::{Graph, Tensor};

/// Which features turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rope {
    /// Feature i with i + half: Llama, Qwen, Mistral, Gemma as stored by Hugging Face.
    HalfSplit,
    /// Feature 2 i with 2 i + 1.
    Interleaved,
}

/// How a model that was trained on short texts stretches its angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All angles divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Long waves divided by the factor, short ones kept, those between blended (Llama 3.1, `rope_type: llama3`).
    Llama3 {
        /// The divisor of long waves.
        factor: f64,
        /// Waves longer than `original / low` are long.
        low: f64,
        /// Waves shorter than `original / high` are short.
        high: f64,
        /// Positions that the model was first trained on.
        original: f64,
    },
}

/// Cosines and sines `[positions, dim / 2]` of the angles position · frequency; `dim` is the number of turned features.
pub fn rope_tables(theta: f64, scaling: RopeScaling, positions: &[u32], dim: usize) -> Result<(Vec<f32>, Vec<f32>)> {
    if !dim.is_multiple_of(2) || !theta.is_finite() || theta <= 0.0 {
        return Err(Error::Invalid {
            what: "rotary tables".into(),
            reason: format!("{dim} features with base {theta}: needs pairs of features and a positive base"),
        });
    }
    let half = dim / 2;
    let frequencies: Vec<f64> =
        (0..half).map(|i| scaled(theta.powf(-(2.0 * i as f64) / dim as f64), scaling)).collect();
    let (mut cosines, mut sines) =
        (Vec::with_capacity(positions.len() * half), Vec::with_capacity(positions.len() * half));
    for position in positions {
        for frequency in &frequencies {
            let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
            cosines.push(cos as f32);
            sines.push(sin as f32);
        }
    }
    Ok((cosines, sines))
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low, high, original } => {
            let wave = 2.0 * std::f64::consts::PI / frequency;
            if wave < original / high {
                frequency
            } else if wave > original / low {
                frequency / factor
            } else {
                let kept = (original / wave - low) / (high - low);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

/// `x` `[b, t, h, d]` turned by tables `[t, half]`, or `[b, t, half]` where rows have positions of their own. Features
/// from 2 · half up pass.
pub fn rope(g: &mut Graph, x: Tensor, cosines: Tensor, sines: Tensor, pairs: Rope) -> Result<Tensor> {
    const OP: &str = "rope";
    let (shape, tables) = (g.shape(x)?, g.shape(cosines)?);
    let [b, t, _, d] = *shape.dims() else {
        return Err(shape_error(OP, format!("{shape} has not four dimensions (rows, positions, heads, features)")));
    };
    let fits = match *tables.dims() {
        [tt, half] => tt == t && 2 * half <= d,
        [tb, tt, half] => tb == b && tt == t && 2 * half <= d,
        _ => false,
    };
    if !fits || g.shape(sines)? != tables {
        return Err(shape_error(OP, format!("tables {tables} and {} do not fit {shape}", g.shape(sines)?)));
    }
    let (x, c, s) = (adjacent_features(g, x)?, dense_f32(g, cosines)?, dense_f32(g, sines)?);
    let op = NnOp::Rope { interleaved: pairs == Rope::Interleaved, inverse: false };
    Ok(g.nn(op, vec![x, c, s], shape, &[]).0)
}

pub(super) fn vjp(g: &mut Graph, call: &Vjp<'_>, interleaved: bool, inverse: bool) -> Result<Vec<Option<Tensor>>> {
    let (c, s) = (call.inputs[1], call.inputs[2]);
    let dy = adjacent_features(g, call.dy)?;
    let shape = g.shape(dy)?;
    Ok(vec![Some(g.nn(NnOp::Rope { interleaved, inverse: !inverse }, vec![dy, c, s], shape, &[]).0), None, None])
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    const LLAMA: RopeScaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };

    #[test]
    fn position_zero_turns_nothing_and_position_one_by_the_frequencies() {
        let (c, s) = rope_tables(10_000.0, RopeScaling::None, &[0, 1], 4).unwrap();
        assert_eq!((&c[..2], &s[..2]), (&[1.0, 1.0][..], &[0.0, 0.0][..]));
        assert_eq!(c[2..], [1f64.cos() as f32, 0.01f64.cos() as f32]);
        assert_eq!(s[2..], [1f64.sin() as f32, 0.01f64.sin() as f32]);
    }

    #[test]
    fn a_far_position_keeps_the_precision_of_f64() {
        let (_, s) = rope_tables(10_000.0, RopeScaling::None, &[131_071], 2).unwrap();
        // sin(131071) to 17 digits, by reduction with an extended π.
        let turns = (131_071.0 / std::f64::consts::TAU).floor();
        let reduced = 131_071.0 - turns * std::f64::consts::TAU - turns * 2.449_293_598_294_706_4e-16;
        assert!((f64::from(s[0]) - reduced.sin()).abs() < 6e-8);
    }

    #[test]
    fn linear_scaling_divides_every_angle() {
        let plain = rope_tables(10_000.0, RopeScaling::None, &[3], 8).unwrap();
        let scaled = rope_tables(10_000.0, RopeScaling::Linear { factor: 4.0 }, &[12], 8).unwrap();
        for (a, b) in plain.0.iter().zip(&scaled.0) {
            assert!((a - b).abs() < 1e-7);
        }
    }

    #[test]
    fn llama_3_keeps_short_waves_divides_long_ones_and_blends_between() {
        // Wavelengths with base 500,000 and 128 features: pair 0 is short, pair 63 long.
        let f = |i: f64| 500_000f64.powf(-2.0 * i / 128.0);
        assert_eq!(scaled(f(0.0), LLAMA), f(0.0));
        assert_eq!(scaled(f(63.0), LLAMA), f(63.0) / 8.0);
        let middle = f(33.0);
        let wave = std::f64::consts::TAU / middle;
        assert!((2048.0..8192.0).contains(&wave), "{wave}");
        let got = scaled(middle, LLAMA);
        assert!(got < middle && got > middle / 8.0);
        let kept = (8192.0 / wave - 1.0) / 3.0;
        assert!((got - (middle / 8.0 + kept * (middle - middle / 8.0))).abs() < 1e-12);
    }

    #[test]
    fn half_a_pair_is_refused() {
        assert!(rope_tables(10_000.0, RopeScaling::None, &[0], 3).is_err());
        assert!(rope_tables(0.0, RopeScaling::None, &[0], 4).is_err());
    }
}
