//! The learning rate of a step: warm-up, then constant, linear or cosine.
//!
//! A rate depends on the step's number and on nothing that happened before, so that a resumed training has the rates of the
//! uninterrupted one. It is computed on the host in f64 and rounded once, where the update kernel gets it.

use std::f64::consts::PI;
use std::str::FromStr;

use crate::error::{Error, Result};

/// What the rate does after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub enum Decay {
    /// Stays at the peak.
    #[default]
    Constant,
    /// Falls to the end rate along a line.
    Linear,
    /// Falls to the end rate along half a cosine.
    Cosine,
}

impl FromStr for Decay {
    type Err = Error;

    fn from_str(name: &str) -> Result<Decay> {
        match name {
            "constant" => Ok(Decay::Constant),
            "linear" => Ok(Decay::Linear),
            "cosine" => Ok(Decay::Cosine),
            _ => Err(invalid("--lr-schedule", format!("{name:?} is none of constant, linear, cosine"))),
        }
    }
}

/// A training's learning rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    peak: f64,
    end: f64,
    warmup: u64,
    steps: u64,
    decay: Decay,
}

impl Schedule {
    /// Rates up to `peak` over `warmup` steps, then down to `end` over the rest of `steps`; `end` is not used by
    /// [`Decay::Constant`].
    ///
    /// Errors: [`Error::Invalid`] if a rate is negative or not finite, if `end` is above `peak`, or if the warm-up is longer
    /// than the training.
    pub fn new(peak: f64, end: f64, warmup: u64, steps: u64, decay: Decay) -> Result<Schedule> {
        if !peak.is_finite() || peak < 0.0 {
            return Err(invalid("--learning-rate", format!("{peak} is not a finite number of at least 0")));
        }
        if !end.is_finite() || !(0.0..=peak).contains(&end) {
            return Err(invalid("the last learning rate", format!("{end} is not between 0 and the peak, {peak}")));
        }
        if warmup > steps {
            return Err(invalid("--warmup", format!("{warmup} steps are more than the training's {steps}")));
        }
        Ok(Schedule { peak, end, warmup, steps, decay })
    }

    /// One rate for all steps.
    pub fn constant(rate: f64) -> Result<Schedule> {
        Schedule::new(rate, 0.0, 0, 0, Decay::Constant)
    }

    /// The rate of a step, counted from 0.
    ///
    /// Warm-up: peak · (step + 1) / warm-up, so that no step has a rate of 0. After it, with p the part done of the steps
    /// that are left: end + (peak − end) · (1 − p), or · (1 + cos πp) / 2. Steps beyond the last have its end rate.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step as f64 + 1.0) / self.warmup as f64;
        }
        let left = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let part = ((step - self.warmup) as f64 / left).min(1.0);
        match self.decay {
            Decay::Constant => self.peak,
            Decay::Linear => self.end + (self.peak - self.end) * (1.0 - part),
            Decay::Cosine => self.end + (self.peak - self.end) * 0.5 * (1.0 + (PI * part).cos()),
        }
    }
}

fn invalid(what: &str, reason: String) -> Error {
    Error::Invalid { what: what.into(), reason }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn rates_climb_to_the_peak_and_fall_as_the_schedule_says() {
        let of = |decay| {
            let s = Schedule::new(1.0, 0.1, 4, 12, decay).unwrap();
            [0, 3, 4, 8, 12, 99].map(|step| (s.rate(step) * 1e12).round() / 1e12)
        };
        assert_eq!(of(Decay::Constant), [0.25, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(of(Decay::Linear), [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]);
        assert_eq!(of(Decay::Cosine), [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]);
        let cosine = Schedule::new(1.0, 0.0, 0, 4, Decay::Cosine).unwrap();
        assert!((cosine.rate(1) - (1.0 + (PI / 4.0).cos()) / 2.0).abs() < 1e-15);
    }

    #[test]
    fn no_warm_up_and_no_steps_divide_by_nothing() {
        assert_eq!(Schedule::constant(2e-3).unwrap().rate(1_000_000), 2e-3);
        let all_warm = Schedule::new(1.0, 0.0, 4, 4, Decay::Linear).unwrap();
        assert_eq!((all_warm.rate(3), all_warm.rate(4), all_warm.rate(5)), (1.0, 1.0, 0.0));
        assert_eq!(Schedule::new(1.0, 0.0, 0, 0, Decay::Cosine).unwrap().rate(u64::MAX), 0.0);
    }

    #[test]
    fn rates_that_make_no_sense_are_refused() {
        for (peak, end, warmup) in
            [(-1.0, 0.0, 0), (f64::NAN, 0.0, 0), (1.0, 2.0, 0), (1.0, f64::INFINITY, 0), (1.0, 0.0, 11)]
        {
            assert_eq!(Schedule::new(peak, end, warmup, 10, Decay::Linear).unwrap_err().code(), "invalid");
        }
        assert_eq!("step".parse::<Decay>().unwrap_err().code(), "invalid");
        assert_eq!("cosine".parse::<Decay>().unwrap(), Decay::Cosine);
    }
}
