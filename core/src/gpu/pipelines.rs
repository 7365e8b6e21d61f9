//! Pipelines, one for each kernel with its constants, with layouts taken from the shader's text.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ebbtide_shaders::{Access, Shader};

use super::{Device, foreign};
use crate::compile::Kernel;
use crate::error::{Error, Result};

/// A compiled kernel.
pub(crate) struct Pipeline {
    pub raw: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

/// The pipelines of a device, made at their first use and kept.
#[derive(Default)]
pub(crate) struct PipelineCache(Mutex<HashMap<Kernel, Arc<Pipeline>>>);

impl Device {
    /// The pipeline of a kernel.
    pub(crate) async fn pipeline(&self, kernel: &Kernel) -> Result<Arc<Pipeline>> {
        let cache = &self.pipelines().0;
        if let Some(found) = cache.lock().unwrap_or_else(|p| p.into_inner()).get(kernel) {
            return Ok(found.clone());
        }
        let scope = foreign(|| self.raw().push_error_scope(wgpu::ErrorFilter::Validation));
        let pipeline = Arc::new(foreign(|| build(self.raw(), kernel)));
        if let Some(error) = scope.pop().await {
            return Err(Error::Gpu { what: format!("kernel `{}`", kernel.shader.name), reason: error.to_string() });
        }
        self.check()?;
        cache.lock().unwrap_or_else(|p| p.into_inner()).insert(*kernel, pipeline.clone());
        Ok(pipeline)
    }

    /// Number of pipelines made.
    pub fn pipeline_count(&self) -> usize {
        self.pipelines().0.lock().unwrap_or_else(|p| p.into_inner()).len()
    }
}

fn build(device: &wgpu::Device, kernel: &Kernel) -> Pipeline {
    let shader = kernel.shader;
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(shader.name),
        source: wgpu::ShaderSource::Wgsl(shader.source.into()),
    });
    let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: Some(shader.name),
        entries: &entries(shader),
    });
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(shader.name),
        bind_group_layouts: &[Some(&layout)],
        ..Default::default()
    });
    let constants: Vec<(&str, f64)> =
        shader.overrides.iter().zip(kernel.overrides).map(|(o, value)| (o.name, f64::from(value))).collect();
    let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(shader.name),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions { constants: &constants, ..Default::default() },
        cache: None,
    });
    Pipeline { raw, layout }
}

fn entries(shader: &Shader) -> Vec<wgpu::BindGroupLayoutEntry> {
    let entry = |binding, ty, dynamic, size| wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset: dynamic,
            min_binding_size: std::num::NonZeroU64::new(size),
        },
        count: None,
    };
    // Parameters are bound at a dynamic offset: one bind group serves all parameter blocks of the same buffers.
    let params = entry(0, wgpu::BufferBindingType::Uniform, true, u64::from(shader.params_size));
    let storage = shader.bindings.iter().map(|b| {
        let read_only = b.access == Access::Read;
        entry(b.binding, wgpu::BufferBindingType::Storage { read_only }, false, 0)
    });
    std::iter::once(params).chain(storage).collect()
}
