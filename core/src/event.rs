//! The one way out for information.
//!
//! Progress bar, page, trace file and tests all read this enum; the library never prints. Events hold shared
//! names instead of strings of their own, so that emitting one allocates nothing.

use std::sync::Arc;

use serde::Serialize;

/// Which half of a training step something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

/// Something that happened. `"format": 1` in its JSON form.
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
