//! The WGSL kernels of ebbtide. Every `wgsl/NAME.wgsl` is checked by naga when this crate is built, and the host's view of it —
//! `NAME::Params`, bindings, workgroup size, overrides — is generated from the shader, so the two cannot disagree.
//!
//! Beside each shader stands its twin, `cpu::NAME`: the same geometry in plain loops, generic over f32 and f64. It is
//! documentation, oracle and subject of finite differences in one.
//!
//! Guaranteed for every kernel: entry point `main`; group 0, uniform `Params` at binding 0, storage from 1, at most 8; `Params`
//! begins with `first_group`, `groups`; the linear workgroup id `x + y * count_x + first_group` names a piece of the output, and
//! ids from `groups` up do nothing. So any dispatch may be folded to two dimensions or cut into ranges of groups, with the same
//! bits. No kernel uses `groups` for anything else, so a cut sets it to the end of its range: a folded cut may hang over, and a
//! group of a kernel that updates in place (`adamw`, `carry`, `add`) must not run twice.

pub mod cpu;

/// Storage access of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `var<storage, read>`.
    Read,
    /// `var<storage, read_write>`.
    ReadWrite,
}

/// One storage binding of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Number, 1 and up.
    pub binding: u32,
    /// Name of the variable in the shader.
    pub name: &'static str,
    /// How the shader accesses it.
    pub access: Access,
}

/// A pipeline-overridable constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Override {
    /// Name in the shader, the key of the pipeline's constants.
    pub name: &'static str,
    /// Value where the pipeline names none.
    pub default: f64,
}

/// What the host must know of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Shader {
    /// File name without extension.
    pub name: &'static str,
    /// The WGSL text.
    pub source: &'static str,
    /// Invocations of a workgroup, fixed by the kernel.
    pub workgroup_size: [u32; 3],
    /// Bytes of `Params`, a multiple of 16.
    pub params_size: u32,
    /// Storage bindings, ascending.
    pub bindings: &'static [Binding],
    /// Overrides in order of declaration.
    pub overrides: &'static [Override],
    /// Workgroup memory in bytes.
    pub workgroup_bytes: u32,
}

/// Value of a dtype override: IEEE binary32.
pub const F32: u32 = 0;
/// Value of a dtype override: IEEE binary16.
pub const F16: u32 = 1;
/// Value of a dtype override: the upper half of a binary32.
pub const BF16: u32 = 2;
/// Value of a dtype override: signed 32-bit integer.
pub const I32: u32 = 3;
/// Value of a dtype override: unsigned 8-bit integer.
pub const U8: u32 = 4;
/// Value of a dtype override: signed 64-bit integer, of which kernels read the low word.
pub const I64: u32 = 5;

/// Largest rank that strided kernels take.
pub const MAX_RANK: usize = 6;

/// Packs up to eight dimensions or strides the way `array<vec4<u32>, 2>` holds them, the rest zero.
///
/// `None` if there are more than [`MAX_RANK`].
pub fn dims(of: &[u32]) -> Option<[[u32; 4]; 2]> {
    if of.len() > MAX_RANK {
        return None;
    }
    let mut out = [[0; 4]; 2];
    for (d, &v) in of.iter().enumerate() {
        out[d / 4][d % 4] = v;
    }
    Some(out)
}

include!(concat!(env!("OUT_DIR"), "/generated.rs"));
