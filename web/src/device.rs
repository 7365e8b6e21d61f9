//! The GPU in words.

use ebbtide::Device;
use ebbtide::error::Bytes;

/// What the page shows of it: names and values.
pub fn rows(device: &Device) -> Vec<(String, String)> {
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
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
