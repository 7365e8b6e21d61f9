//! The engine in a browser tab: what the page calls.
//!
//! This crate exists so that core never stops building for the web. It is thin on purpose: everything the page shows
//! is computed by the engine, and what crosses to JavaScript is text.
//!
//! Built for any other target it is empty.
#![cfg(target_arch = "wasm32")]

use wasm_bindgen::prelude::*;

/// Opens the GPU as the engine does and describes it: JSON `{"rows": [[name, value], …]}`, for showing.
///
/// # Errors
///
/// A message for the user where the browser has no adapter or refuses the device.
#[wasm_bindgen]
pub async fn open_device() -> Result<String, JsError> {
    let instance = wgpu::Instance::default();
    let adapter = instance
        .request_adapter(&wgpu::RequestAdapterOptions::default())
        .await
        .map_err(|e| JsError::new(&e.to_string()))?;
    let info = adapter.get_info();
    let limits = adapter.limits();
    let rows = vec![
        ("adapter".to_owned(), info.name),
        (
            "largest buffer".to_owned(),
            ebbtide::error::Bytes(limits.max_buffer_size).to_string(),
        ),
    ];
    Ok(serde_json::json!({ "rows": rows }).to_string())
}
