//! What an adapter can do, as plain data.
//!
//! Plans are made against `Caps`, never against a device: a device reports them, a test invents them, and a
//! plan for a phone can be made and verified on a laptop.

use serde::Serialize;

/// Every tensor in a slot and every block of parameters begins at a multiple of this many bytes. It is the
/// largest alignment an adapter may ask for under WebGPU, so layouts and peaks do not depend on the adapter.
pub const ALIGN: u64 = 256;

/// No weight buffer is larger than this, whatever the adapter allows: WebGPU's default binding limit.
pub const MAX_WEIGHT_BUFFER: u64 = 128 << 20;

/// The kind of adapter, as far as the choice of kernels depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterClass {
    /// A GPU with its own memory.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A software implementation: lavapipe, SwiftShader, WARP.
    Software,
    /// The platform does not say.
    Unknown,
}

/// The limits and properties that plans depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Caps {
    /// Name of the adapter, for people.
    pub adapter: String,
    /// Kind of adapter.
    pub class: AdapterClass,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes of the largest storage binding.
    pub max_binding: u64,
    /// Alignment in bytes of a storage binding's offset.
    pub storage_align: u64,
    /// Alignment in bytes of a uniform binding's offset.
    pub uniform_align: u64,
    /// Storage buffers in one dispatch.
    pub max_storage_buffers: u32,
    /// Workgroups in one dimension of a dispatch.
    pub max_groups: u32,
    /// Invocations in a workgroup.
    pub max_invocations: u32,
    /// Bytes of workgroup memory.
    pub max_workgroup_bytes: u32,
    /// Estimated work of one submission, in multiply-adds: about 100 ms on the slowest adapter of the class.
    pub work_per_submission: u64,
}

impl Caps {
    /// WebGPU's default limits, which every conforming adapter grants.
    pub fn webgpu_defaults() -> Caps {
        Caps {
            adapter: "WebGPU defaults".into(),
            class: AdapterClass::Unknown,
            max_buffer: 256 << 20,
            max_binding: 128 << 20,
            storage_align: ALIGN,
            uniform_align: ALIGN,
            max_storage_buffers: 8,
            max_groups: 65_535,
            max_invocations: 256,
            max_workgroup_bytes: 16 << 10,
            work_per_submission: AdapterClass::Unknown.work_per_submission(),
        }
    }
}

impl AdapterClass {
    /// Multiply-adds that the slowest adapters of this class do in about 100 ms (PLATFORM: SwiftShader has a
    /// peak near 10 GFLOP/s, a small integrated GPU some hundred).
    pub fn work_per_submission(self) -> u64 {
        match self {
            AdapterClass::Software => 100_000_000,
            AdapterClass::Integrated | AdapterClass::Unknown => 2_000_000_000,
            AdapterClass::Discrete => 20_000_000_000,
        }
    }
}
