//! The only place that knows native from wasm.
//!
//! Everything above is written once, as async code of one thread. Natively that thread is the session's own: it
//! alone submits, polls and destroys, since a `poll(Wait)` in one thread and a `destroy` in another hold each other
//! up. On the web it is the worker, and waiting means going back to its event loop.

pub mod file;
#[cfg_attr(target_arch = "wasm32", path = "web.rs")]
#[cfg_attr(not(target_arch = "wasm32"), path = "native.rs")]
mod platform;

#[cfg(target_arch = "wasm32")]
pub use platform::{Flight, flight, pause};
pub use platform::{MAPPED_RINGS, Reader, Scratch, Shared, Sink, Waiting, pump};
/// A clock of both sides; `std`'s own panics in a browser.
pub use web_time::Instant;

use std::sync::Arc;

use crate::error::Result;
use crate::weights::Source;

/// Host memory of a ring chunk.
pub enum ChunkMemory {
    /// A mapped chunk: the reader writes where the GPU copies from.
    Mapped(wgpu::BufferViewMut),
    /// A host buffer that `writeBuffer` copies from.
    Scratch(Scratch),
}

impl ChunkMemory {
    /// A part of it, to be written.
    pub fn sink(&mut self, range: std::ops::Range<usize>) -> Sink<'_> {
        match self {
            ChunkMemory::Mapped(view) => Sink::new(&mut crate::gpu::mapped_bytes(view)[range]),
            ChunkMemory::Scratch(scratch) => scratch.sink(range),
        }
    }
}

/// One read of a chunk: bytes of a source to a place in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Index of the source in the table.
    pub source: u32,
    /// First byte in the source.
    pub at: u64,
    /// First byte in the chunk.
    pub to: u32,
    /// Bytes.
    pub len: u32,
}

/// All reads of a set, shared with the reader, so that a job carries only a range of them.
pub struct Reads {
    /// The sources.
    pub sources: Vec<Source>,
    /// The reads.
    pub reads: Vec<Read>,
}

/// A chunk to be filled.
pub struct Job {
    /// Which chunk of the ring.
    pub chunk: u32,
    /// Its memory, handed back with the result.
    pub memory: ChunkMemory,
    /// Bytes of the chunk that will be copied; those that no read covers are zeroed.
    pub len: u32,
    /// The reads, a range of the table.
    pub reads: std::ops::Range<u32>,
    /// The table.
    pub table: Arc<Reads>,
}

/// A filled chunk.
pub struct Done {
    /// Which chunk of the ring.
    pub chunk: u32,
    /// Its memory.
    pub memory: ChunkMemory,
    /// Whether it holds the bytes.
    pub result: Result<()>,
}

impl Job {
    /// Zeroes what no read covers.
    fn zero_gaps(&mut self) {
        let mut end = 0;
        for i in self.reads.clone() {
            let read = self.table.reads[i as usize];
            self.memory.sink(end..read.to as usize).zero();
            end = (read.to + read.len) as usize;
        }
        self.memory.sink(end..self.len as usize).zero();
    }

    fn done(self, result: Result<()>) -> Done {
        Done { chunk: self.chunk, memory: self.memory, result }
    }
}
