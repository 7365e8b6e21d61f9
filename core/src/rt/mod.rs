//! The only place that knows native from wasm.
//!
//! Everything above is written once, as async code of one thread. Natively that thread is the session's own: it
//! alone submits, polls and destroys, since a `poll(Wait)` in one thread and a `destroy` in another hold each other
//! up. On the web it is the worker, and waiting means going back to its event loop.

pub mod file;
#[cfg_attr(target_arch = "wasm32", path = "web.rs")]
#[cfg_attr(not(target_arch = "wasm32"), path = "native.rs")]
mod platform;

pub use platform::{MAPPED_RINGS, Reader, pump};

use std::sync::Arc;

use crate::error::Result;
use crate::weights::Source;

/// Host memory of a ring chunk.
pub enum ChunkMemory {
    /// A mapped chunk: the reader writes where the GPU copies from.
    Mapped(wgpu::BufferViewMut),
    /// A host buffer that `writeBuffer` copies from.
    Scratch(Vec<u8>),
}

impl ChunkMemory {
    /// The bytes, to be written.
    pub fn bytes(&mut self) -> &mut [u8] {
        match self {
            ChunkMemory::Mapped(view) => crate::gpu::mapped_bytes(view),
            ChunkMemory::Scratch(bytes) => bytes,
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
    /// Fills the chunk. After an error its content must not be used.
    async fn fill(&mut self) -> Result<()> {
        let bytes = self.memory.bytes();
        let mut end = 0;
        for read in &self.table.reads[self.reads.start as usize..self.reads.end as usize] {
            let (to, len) = (read.to as usize, read.len as usize);
            bytes[end..to].fill(0);
            end = to + len;
            self.table.sources[read.source as usize].fill(read.at, &mut bytes[to..end]).await?;
        }
        bytes[end..self.len as usize].fill(0);
        Ok(())
    }

    fn done(self, result: Result<()>) -> Done {
        Done { chunk: self.chunk, memory: self.memory, result }
    }
}
