//! The engine in a real browser: the device opens, and the browser's own compiler accepts every shader.
//!
//! naga does no uniformity analysis and Chrome does, so a shader that passes every native test can still be refused
//! by a browser; this is where that would show. Runs in headless Chromium by `cargo xtask test --browser-only`.
#![cfg(target_arch = "wasm32")]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

use ebbtide::{Device, DeviceChoice};
use wasm_bindgen_test::{console_log, wasm_bindgen_test, wasm_bindgen_test_configure};

wasm_bindgen_test_configure!(run_in_browser);

async fn device() -> Device {
    // At the default limits, so that a shader which needs more fails here.
    let choice = DeviceChoice { default_limits: true, ..DeviceChoice::default() };
    Device::open(&choice).await.expect("a device")
}

/// What the browser says about a shader: nothing, or its errors and the validation error of the pipeline.
async fn complaints(device: &Device, name: &str, source: &str) -> Vec<String> {
    let device = device.raw();
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name),
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let mut found = Vec::new();
    for message in module.get_compilation_info().await.messages {
        let at = message.location.map(|l| format!(":{}:{}", l.line_number, l.line_position)).unwrap_or_default();
        match message.message_type {
            wgpu::CompilationMessageType::Error => found.push(format!("{name}.wgsl{at}: {}", message.message)),
            _ => console_log!("{name}.wgsl{at}: {}", message.message),
        }
    }
    if let Some(error) = scope.pop().await {
        found.push(format!("{name}: {error}"));
    }
    drop(pipeline);
    found
}

#[wasm_bindgen_test]
async fn the_browser_compiles_every_shader_of_the_engine() {
    let device = device().await;
    let shaders = ebbtide_shaders::all();
    assert!(!shaders.is_empty());
    let mut found = Vec::new();
    for shader in shaders {
        found.extend(complaints(&device, shader.name, shader.source).await);
    }
    console_log!("{} shaders", shaders.len());
    assert!(found.is_empty(), "the browser refuses:\n{}", found.join("\n"));
}

#[wasm_bindgen_test]
async fn the_browser_finds_a_barrier_in_non_uniform_control_flow() {
    // Without this, a test that looked at the wrong place would pass for ever.
    let source = "var<workgroup> w: array<u32, 64>;
        @group(0) @binding(0) var<storage, read_write> out: array<u32>;
        @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32) {
            if (i < 32u) { workgroupBarrier(); }
            w[i] = i; out[i] = w[63u - i];
        }";
    let device = device().await;
    let found = complaints(&device, "broken", source).await;
    assert!(found.iter().any(|text| text.contains("uniform")), "{found:?}");
}
