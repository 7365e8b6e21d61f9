//! The only place that knows native from wasm.

pub mod file;
