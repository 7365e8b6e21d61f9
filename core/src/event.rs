//! The one way out for information.
//!
//! Progress bar, page, trace file and tests all read this enum; the library never prints. Events hold shared
//! names instead of strings of their own, so that emitting one allocates nothing.

use std::sync::Arc;

use serde::Serialize;

use crate::compile::Forecast;

/// Which half of a training step something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

/// Something that happened. Its JSON form is an object with `"event"`; `plan`, the first of a training, has the version of
/// all as `"format"`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A run of a program began.
    RunStart {
        /// The program's name.
        program: Arc<str>,
    },
    /// A segment's last byte was handed to the queue.
    Load {
        /// The segment's name.
        segment: Arc<str>,
        /// The pass that asked for it.
        pass: Pass,
        /// Bytes copied to the device.
        bytes: u64,
    },
    /// A segment's slot was given up.
    Evict {
        /// The segment's name.
        segment: Arc<str>,
        /// The pass of its last use.
        pass: Pass,
    },
    /// A run ended; everything was seen done.
    RunEnd {
        /// The program's name.
        program: Arc<str>,
        /// Segments loaded in this run.
        loads: u64,
        /// Segments evicted in this run.
        evictions: u64,
        /// Weight bytes copied to the device in this run.
        streamed_bytes: u64,
    },
    /// What a training was planned to need; before its first step.
    Plan(Arc<Forecast>),
    /// Something the user should know: rows that were cut, settings that differ from the checkpoint's.
    Note {
        /// In words.
        text: Arc<str>,
    },
    /// A training goes on from a checkpoint.
    Resumed {
        /// Optimizer steps done.
        step: u64,
    },
    /// An optimizer step is done.
    Step(Step),
    /// A validation is done.
    Eval {
        /// Optimizer steps done.
        step: u64,
        /// Mean loss over the trained tokens.
        #[serde(serialize_with = "finite")]
        loss: f64,
        /// How long it took.
        seconds: f64,
    },
    /// A sample was written.
    Sample {
        /// Optimizer steps done.
        step: u64,
        /// What it goes on from.
        prompt: Arc<str>,
        /// The text behind the prompt.
        text: Arc<str>,
    },
    /// Checkpoint and adapter were saved.
    Saved {
        /// Optimizer steps done.
        step: u64,
        /// Where.
        place: Arc<str>,
    },
    /// A training came to its end.
    End {
        /// Optimizer steps done.
        step: u64,
        /// How long it took, without planning and without steps before it was resumed.
        seconds: f64,
    },
}

/// An optimizer step, measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Step {
    /// Its number, counted from 1.
    pub step: u64,
    /// Steps of the whole training.
    pub steps: u64,
    /// Mean loss over the trained tokens, before the update. `null` in JSON if it is not finite.
    #[serde(serialize_with = "finite")]
    pub loss: f64,
    /// Whether loss and gradients were finite; if not, nothing was updated.
    pub finite: bool,
    /// Global norm of the gradients.
    #[serde(serialize_with = "finite")]
    pub norm: f64,
    /// Learning rate.
    pub learning_rate: f64,
    /// Trained tokens.
    pub trained_tokens: u64,
    /// Tokens of the batches, padding included.
    pub tokens: u64,
    /// How long it took.
    pub seconds: f64,
    /// Trained tokens a second.
    pub tokens_per_second: f64,
    /// Device memory at its most so far, counted where buffers are made.
    pub peak_bytes: u64,
    /// The same, as planned.
    pub planned_peak_bytes: u64,
    /// Device memory now.
    pub active_bytes: u64,
    /// Segments loaded.
    pub loads: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// Multiply-adds, an estimate.
    pub work: u64,
    /// Memory as an outside witness sees it, where there is one.
    pub witness_bytes: Option<u64>,
}

/// JSON knows no infinity: `null`.
fn finite<S: serde::Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { s.serialize_f64(*value) } else { s.serialize_none() }
}

/// Receives events. Implemented for closures and for `Vec<Event>`.
pub trait EventSink {
    /// Takes one event.
    fn event(&mut self, event: Event);
}

impl<F: FnMut(Event)> EventSink for F {
    fn event(&mut self, event: Event) {
        self(event);
    }
}

impl EventSink for Vec<Event> {
    fn event(&mut self, event: Event) {
        self.push(event);
    }
}

/// Drops every event.
pub struct NoEvents;

impl EventSink for NoEvents {
    fn event(&mut self, _: Event) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_in_json_is_one_object_with_its_name_and_null_for_what_is_not_finite() {
        let step = Event::Step(Step { step: 3, loss: f64::NAN, ..Step::default() });
        let json = serde_json::to_value(step).unwrap();
        assert_eq!((&json["event"], &json["step"], &json["loss"]), (&"step".into(), &3.into(), &().into()));
        let eval = serde_json::to_value(Event::Eval { step: 3, loss: 0.5, seconds: 1.0 }).unwrap();
        assert_eq!((&eval["event"], &eval["loss"]), (&"eval".into(), &0.5.into()));
    }
}
