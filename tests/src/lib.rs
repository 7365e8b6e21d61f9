//! Conformance, budget, fault and browser tests of ebbtide; what they share stands here.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[cfg(not(target_arch = "wasm32"))]
pub mod engine;
pub mod kernel;
#[cfg(not(target_arch = "wasm32"))]
pub mod models;
#[cfg(not(target_arch = "wasm32"))]
pub mod refs;
#[cfg(not(target_arch = "wasm32"))]
pub mod stack;
