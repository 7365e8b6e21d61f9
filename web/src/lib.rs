//! The engine in a browser tab: a worker that speaks the typed protocol of the page.
//!
//! This crate exists so that core never stops building for the web. It is thin on purpose: everything the page shows is
//! computed by the engine, and the training loop is the command line's own.
//!
//! Built for any other target it holds what does not need a browser: [`protocol`] and [`http`].

#![cfg_attr(
    target_arch = "wasm32",
    allow(clippy::arc_with_non_send_sync, reason = "on the web, where there is one thread, the same code shares")
)]

pub mod http;
pub mod protocol;

#[cfg(target_arch = "wasm32")]
mod device;
#[cfg(target_arch = "wasm32")]
mod sources;
#[cfg(target_arch = "wasm32")]
mod worker;

#[cfg(target_arch = "wasm32")]
pub use worker::Engine;
