//! Running plans: the session owns the device memory of a set and the one queue.
//!
//! The stream decides nothing that the plan does not say. Actions run strictly in list order, except that loads run
//! ahead inside their windows, chunk by chunk, as the reader and the ring allow.

mod feed;
mod session;
mod slots;

pub use session::{Cancel, HookCall, Outputs, Session};
