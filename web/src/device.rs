//! The GPU in words.

use ebbtide::error::Bytes;
use ebbtide::{Device, DeviceChoice};
use wasm_bindgen::prelude::*;

/// Opens the GPU through the engine and describes it: JSON `{"rows": [[name, value], …]}`, for showing.
///
/// # Errors
///
/// A message for the user where the browser has no adapter or refuses the device.
#[wasm_bindgen]
pub async fn open_device() -> Result<String, JsError> {
    let device = Device::open(&DeviceChoice::default()).await?;
    let caps = device.caps();
    // Browsers may keep the name to themselves.
    let name = if caps.adapter.is_empty() { "not named by the browser" } else { &caps.adapter };
    let bytes = |n: u64| Bytes(n).to_string();
    let rows = [
        ("adapter", name.to_owned()),
        ("largest buffer", bytes(caps.max_buffer)),
        ("largest storage binding", bytes(caps.max_binding)),
        ("storage buffers a dispatch", caps.max_storage_buffers.to_string()),
        ("workgroups a dimension", caps.max_groups.to_string()),
        ("threads a workgroup", caps.max_invocations.to_string()),
        ("workgroup memory", bytes(caps.max_workgroup_bytes.into())),
        ("alignment of a storage binding", bytes(caps.storage_align)),
    ];
    Ok(serde_json::json!({ "rows": rows }).to_string())
}
