//! The engine in a browser tab: what the page calls.
//!
//! This crate exists so that core never stops building for the web. It is thin on purpose: everything the page shows
//! is computed by the engine, and what crosses to JavaScript is text.
//!
//! Built for any other target it holds what does not need one: [`protocol`] and [`http`].

pub mod http;
pub mod protocol;

#[cfg(target_arch = "wasm32")]
pub mod device;
