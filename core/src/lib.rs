//! The ebbtide engine: trains LoRA adapters on, and runs, models larger than GPU memory, within a byte budget.
//!
//! ```text
//! files ─► Catalog ─► Graph ─► Program(s) ─► PlanSet ─► Session ─► results
//! ```
//!
//! A [`weights::Catalog`] says what weights exist; a [`graph::Graph`] says what to compute; [`compile`] turns
//! programs and a [`Budget`] into verified plans, or refuses in words; a [`Session`] runs them. The library never
//! prints, never blocks on the web and never panics on input. See `docs/design.md`.

#![cfg_attr(
    target_arch = "wasm32",
    allow(
        clippy::arc_with_non_send_sync,
        clippy::drop_non_drop,
        reason = "on the web, where there is one thread and no file system, the same code shares and drops less"
    )
)]

pub mod caps;
pub mod compile;
pub mod error;
pub mod event;
pub mod gpu;
pub mod graph;
pub mod kernels;
pub mod llm;
pub mod memory;
pub mod nn;
pub mod rt;
pub mod stream;
pub mod weights;

pub use caps::Caps;
pub use compile::{Budget, PlanSet, compile, compile_with};
pub use error::{Error, Result};
pub use event::{Event, EventSink, Pass};
pub use gpu::{Device, DeviceChoice};
pub use graph::{Graph, Program, Tensor};
pub use stream::{Cancel, HookCall, Outputs, Session};
pub use weights::{Catalog, Source};
