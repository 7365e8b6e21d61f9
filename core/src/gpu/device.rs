//! Opening a device, and the one place where buffers are made.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::foreign;
use super::pipelines::PipelineCache;
use crate::caps::{AdapterClass, Caps};
use crate::compile::Category;
use crate::error::{Bytes, Error, Result};
use crate::memory::Ledger;

/// Which adapter to open, and how.
#[derive(Clone, Debug, Default)]
pub struct DeviceChoice {
    /// Part of the adapter's name, in any case; without it the fastest kind is taken.
    pub adapter: Option<String>,
    /// Ask only for WebGPU's default limits, as a browser without more would grant.
    pub default_limits: bool,
    /// Failures to inject, for tests.
    pub faults: Faults,
}

impl DeviceChoice {
    /// Reads `EBBTIDE_ADAPTER` (part of a name) and `EBBTIDE_LIMITS` (`default`).
    pub fn from_env() -> DeviceChoice {
        DeviceChoice {
            adapter: std::env::var("EBBTIDE_ADAPTER").ok().filter(|s| !s.is_empty()),
            default_limits: std::env::var("EBBTIDE_LIMITS").is_ok_and(|s| s == "default"),
            faults: Faults::default(),
        }
    }
}

/// Failures that a test injects, since software adapters never fail by themselves.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The making of this buffer (counted from 0) finds the device out of memory.
    pub out_of_memory_at: Option<u64>,
}

/// What failed asynchronously, noted by callbacks.
#[derive(Debug, Default)]
struct Failures {
    lost: Option<String>,
    error: Option<(bool, String)>,
}

/// A GPU device with the record of its memory. Cheap to clone; a clone is the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    caps: Caps,
    ledger: Arc<Ledger>,
    failures: Arc<Mutex<Failures>>,
    pipelines: PipelineCache,
    folds: FoldStore,
    faults: Faults,
    made: AtomicU64,
}

impl Device {
    /// Opens an adapter.
    pub async fn open(choice: &DeviceChoice) -> Result<Device> {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // No validation layers of the driver, and none of wgpu's own indirect-draw checks: they make buffers.
        descriptor.flags = wgpu::InstanceFlags::empty();
        descriptor.backends =
            wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12 | wgpu::Backends::BROWSER_WEBGPU;
        let instance = wgpu::Instance::new(descriptor);
        let adapter = Device::choose(&instance, choice).await?;
        let info = adapter.get_info();
        let limits = if choice.default_limits {
            wgpu::Limits::default()
        } else {
            // DX12 sets up a heap of this size in advance; a session needs some thousands.
            wgpu::Limits { max_non_sampler_bindings: 50_000, ..adapter.limits() }
        };
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("ebbtide"),
                required_features: wgpu::Features::empty(),
                required_limits: limits,
                experimental_features: wgpu::ExperimentalFeatures::disabled(),
                // Above 4 MiB a buffer is an allocation of its own and really goes back to the driver.
                memory_hints: wgpu::MemoryHints::Manual { suballocated_device_memory_block_size: 4 << 20..4 << 20 },
                trace: wgpu::Trace::Off,
            })
            .await
            .map_err(|e| Error::NoAdapter { reason: format!("{} refused a device: {e}", info.name) })?;

        let failures = Arc::new(Mutex::new(Failures::default()));
        let note = failures.clone();
        device.set_device_lost_callback(move |reason, message| {
            let mut f = note.lock().unwrap_or_else(|p| p.into_inner());
            f.lost.get_or_insert_with(|| if message.is_empty() { format!("{reason:?}") } else { message });
        });
        let note = failures.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let memory = matches!(error, wgpu::Error::OutOfMemory { .. });
            let mut f = note.lock().unwrap_or_else(|p| p.into_inner());
            f.error.get_or_insert_with(|| (memory, error.to_string()));
        }));

        let class = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => AdapterClass::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterClass::Integrated,
            wgpu::DeviceType::Cpu => AdapterClass::Software,
            _ if info.name.contains("SwiftShader") || info.name.contains("llvmpipe") => AdapterClass::Software,
            _ => AdapterClass::Unknown,
        };
        let l = device.limits();
        let caps = Caps {
            adapter: info.name,
            class,
            max_buffer: l.max_buffer_size,
            max_binding: l.max_storage_buffer_binding_size,
            storage_align: u64::from(l.min_storage_buffer_offset_alignment),
            uniform_align: u64::from(l.min_uniform_buffer_offset_alignment),
            max_storage_buffers: l.max_storage_buffers_per_shader_stage,
            max_groups: l.max_compute_workgroups_per_dimension,
            max_invocations: l.max_compute_invocations_per_workgroup,
            max_workgroup_bytes: l.max_compute_workgroup_storage_size,
            work_per_submission: class.work_per_submission(),
        };
        let pipelines = PipelineCache::default();
        let ledger = Arc::new(Ledger::default());
        let faults = choice.faults.clone();
        Ok(Device(Arc::new(Inner {
            device,
            queue,
            caps,
            ledger,
            failures,
            pipelines,
            folds: FoldStore::default(),
            faults,
            made: AtomicU64::new(0),
        })))
    }

    async fn choose(instance: &wgpu::Instance, choice: &DeviceChoice) -> Result<wgpu::Adapter> {
        let mut adapters = instance.enumerate_adapters(wgpu::Backends::all()).await;
        if adapters.is_empty() {
            // Browsers have no list: there is the one that the page is given.
            adapters.extend(instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await.ok());
        }
        let names: Vec<String> = adapters.iter().map(|a| a.get_info().name).collect();
        if let Some(wanted) = &choice.adapter {
            let wanted_lower = wanted.to_lowercase();
            adapters.retain(|a| a.get_info().name.to_lowercase().contains(&wanted_lower));
            if adapters.is_empty() {
                return Err(Error::NoAdapter { reason: format!("none is named `{wanted}`; there are {names:?}") });
            }
        }
        adapters.sort_by_key(|a| match a.get_info().device_type {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other => 3,
            wgpu::DeviceType::Cpu => 4,
        });
        adapters.into_iter().next().ok_or_else(|| Error::NoAdapter { reason: "no driver offers one".into() })
    }

    /// What the device can do.
    pub fn caps(&self) -> &Caps {
        &self.0.caps
    }

    /// The record of its memory.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    pub(crate) fn claim(&self, bytes: u64) -> crate::memory::Claim {
        self.0.ledger.claim(bytes)
    }

    /// Bytes in use now, as MLX names it.
    pub fn active_memory(&self) -> u64 {
        self.0.ledger.active()
    }

    /// Most bytes in use since the last reset.
    pub fn peak_memory(&self) -> u64 {
        self.0.ledger.peak()
    }

    /// Begins a new peak.
    pub fn reset_peak_memory(&self) {
        self.0.ledger.reset_peak();
    }

    /// The wgpu device, for measurements from outside (allocator report, counters) and for tests.
    pub fn raw(&self) -> &wgpu::Device {
        &self.0.device
    }

    /// The wgpu queue, for measurements.
    pub fn raw_queue(&self) -> &wgpu::Queue {
        &self.0.queue
    }

    pub(crate) fn folds(&self) -> &FoldStore {
        &self.0.folds
    }

    pub(crate) fn pipelines(&self) -> &PipelineCache {
        &self.0.pipelines
    }

    /// Fails if something went wrong asynchronously. An error is reported once, a lost device for ever.
    pub(crate) fn check(&self) -> Result<()> {
        let mut f = self.0.failures.lock().unwrap_or_else(|p| p.into_inner());
        if let Some(reason) = &f.lost {
            return Err(Error::DeviceLost { reason: reason.clone() });
        }
        match f.error.take() {
            Some((true, reason)) => {
                Err(Error::OutOfMemory { what: reason, size: Bytes(0), in_use: Bytes(self.0.ledger.active()) })
            }
            Some((false, reason)) => Err(Error::Gpu { what: "a command".into(), reason }),
            None => Ok(()),
        }
    }

    /// Makes a buffer and counts it. An allocation that fails is a typed error and leaves nothing counted.
    pub(crate) async fn buffer(
        &self,
        what: &str,
        category: Category,
        size: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<Buffer> {
        self.check()?;
        self.0.ledger.take(what, category, size)?;
        // From here on the bytes are given back by dropping `buffer`.
        let memory = foreign(|| self.0.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory));
        let validation = foreign(|| self.0.device.push_error_scope(wgpu::ErrorFilter::Validation));
        let raw = foreign(|| {
            self.0.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage,
                mapped_at_creation: false,
            })
        });
        let buffer = Buffer { raw, size, category, ledger: self.0.ledger.clone() };
        let refused = validation.pop().await;
        let mut failed = memory.pop().await;
        if self.0.faults.out_of_memory_at == Some(self.0.made.fetch_add(1, Ordering::Relaxed)) {
            failed = Some(wgpu::Error::OutOfMemory { source: "injected by a test".into() });
        }
        if let Some(error) = failed {
            let in_use = Bytes(self.0.ledger.active() - size);
            return Err(Error::OutOfMemory { what: format!("{what} ({error})"), size: Bytes(size), in_use });
        }
        if let Some(error) = refused {
            return Err(Error::Gpu { what: format!("{what} of {}", Bytes(size)), reason: error.to_string() });
        }
        self.check()?;
        Ok(buffer)
    }
}

/// Folded constants that live sessions of a device hold, by what they compute from which bytes.
#[derive(Default)]
pub(crate) struct FoldStore(Mutex<HashMap<String, Vec<Weak<Buffer>>>>);

impl FoldStore {
    /// The buffers of a fold, if they still exist.
    pub fn find(&self, key: &str) -> Option<Vec<Arc<Buffer>>> {
        let known = self.0.lock().unwrap_or_else(|p| p.into_inner());
        known.get(key)?.iter().map(Weak::upgrade).collect()
    }

    /// Takes note of a fold; it lives as long as a session holds it.
    pub fn keep(&self, key: String, buffers: &[Arc<Buffer>]) {
        let mut known = self.0.lock().unwrap_or_else(|p| p.into_inner());
        known.retain(|_, buffers| buffers.iter().all(|b| b.strong_count() > 0));
        known.insert(key, buffers.iter().map(Arc::downgrade).collect());
    }
}

/// A counted buffer, destroyed when dropped.
pub struct Buffer {
    raw: wgpu::Buffer,
    size: u64,
    category: Category,
    ledger: Arc<Ledger>,
}

impl Buffer {
    pub(crate) fn raw(&self) -> &wgpu::Buffer {
        &self.raw
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Bind groups keep the memory of a buffer that is merely dropped; on the web nothing is ever freed so.
        foreign(|| self.raw.destroy());
        self.ledger.give_back(self.category, self.size);
    }
}
