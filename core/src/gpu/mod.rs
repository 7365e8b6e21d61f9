//! The GPU: the device, its pipelines, and the recording of commands.
//!
//! The only module with `unsafe`, each use with its reason.

mod device;
mod pipelines;
mod queue;

use std::cell::Cell;

pub use device::{Buffer, Device, DeviceChoice, Faults};
pub(crate) use pipelines::Pipeline;
pub(crate) use queue::{Dispatch, Mapping, Recorder};

thread_local! {
    static FOREIGN: Cell<u32> = const { Cell::new(0) };
}

/// Runs a call into wgpu. A test that counts heap allocations of ours leaves out what happens inside.
pub(crate) fn foreign<T>(call: impl FnOnce() -> T) -> T {
    FOREIGN.set(FOREIGN.get() + 1);
    let result = call();
    FOREIGN.set(FOREIGN.get() - 1);
    result
}

/// Whether this thread is inside a call into wgpu.
#[doc(hidden)]
pub fn in_foreign_code() -> bool {
    FOREIGN.try_with(Cell::get).unwrap_or(0) > 0
}

/// The bytes of a mapped ring chunk, for a reader that fills a slice.
#[allow(unsafe_code)]
pub(crate) fn mapped_bytes(view: &mut wgpu::BufferViewMut) -> &mut [u8] {
    let len = view.len();
    let mut all = view.slice(..);
    let start = all.as_raw_element_ptr();
    // SAFETY: the view owns `len` mapped bytes at `start` for as long as it is borrowed, `u8` has no invalid
    // values, and wgpu zeroed the memory when it was first mapped, so it is initialised. wgpu hands out write-only
    // slices because reads of such memory may be slow, not because they are undefined; a positioned read needs
    // `&mut [u8]`, and going through a copy of 16 MiB a chunk is the alternative that was rejected.
    unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
}
