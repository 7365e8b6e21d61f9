//! The two rings: bytes to the device in plan order, and bytes back.
//!
//! A chunk goes round: idle → filled by the reader (or from the caller's memory) → its copy recorded → submitted →
//! seen done → idle. Natively a chunk is a mapped buffer that the reader writes into; on the web it is a host buffer
//! of the same size that `writeBuffer` copies from, counted just the same.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::compile::{Category, Ring};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Device, Mapping, Recorder, foreign};
use crate::memory::Chunks;
use crate::rt::{ChunkMemory, Job, MAPPED_RINGS, Reader, Reads, Scratch};

/// A filled chunk's destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Index of the action that it belongs to.
    pub action: u32,
    /// Which part of the action.
    pub part: u32,
    /// Bytes.
    pub len: u32,
}

struct Issued {
    part: Part,
    chunk: u32,
    ready: Option<ChunkMemory>,
}

/// Host to device.
pub(crate) struct UploadRing {
    ring: Ring,
    device: Device,
    chunks: Chunks,
    buffers: Vec<Buffer>,
    mapped: Vec<Mapping>,
    /// Whether a mapping was asked for and not used yet.
    asked: Vec<bool>,
    /// Memory of idle chunks, where it is at hand.
    memory: Vec<Option<ChunkMemory>>,
    issued: VecDeque<Issued>,
    reader: Reader,
    reading: u32,
}

impl UploadRing {
    pub async fn new(device: &Device, ring: Ring) -> Result<UploadRing> {
        let mut buffers = Vec::new();
        for _ in 0..ring.chunks {
            let usage = if MAPPED_RINGS {
                wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC
            } else {
                wgpu::BufferUsages::COPY_DST
            };
            // On the web this buffer is never written: it stands for the browser's own staging of the same size, so
            // that what is counted is what is taken.
            buffers.push(device.buffer("an upload chunk", Category::Upload, ring.chunk, usage).await?);
        }
        let scratch = |_| Ok(Scratch::new(ring.chunk)?.map(ChunkMemory::Scratch));
        Ok(UploadRing {
            ring,
            device: device.clone(),
            chunks: Chunks::new(ring.chunks),
            buffers,
            mapped: (0..ring.chunks).map(|_| Mapping::default()).collect(),
            asked: vec![false; ring.chunks as usize],
            memory: (0..ring.chunks).map(scratch).collect::<Result<_>>()?,
            issued: VecDeque::with_capacity(ring.chunks as usize),
            reader: Reader::new(ring.chunks)?,
            reading: 0,
        })
    }

    /// Asks for every chunk that the host does not hold to be mapped; uploads wait for it.
    pub fn map_idle(&mut self, recorder: &Recorder) {
        for i in 0..self.buffers.len() {
            if MAPPED_RINGS && self.memory[i].is_none() && !std::mem::replace(&mut self.asked[i], true) {
                recorder.map(self.buffers[i].raw(), wgpu::MapMode::Write, &self.mapped[i]);
            }
        }
    }

    /// Bytes of a chunk.
    pub fn chunk(&self) -> u64 {
        self.ring.chunk
    }

    /// An idle chunk with its memory, if its last copy is seen done.
    fn take(&mut self, recorder: &Recorder) -> Result<Option<(u32, ChunkMemory)>> {
        let Some(next) = self.chunks.peek() else { return Ok(None) };
        let i = next as usize;
        let held = self.memory[i].is_some();
        if !held && !self.mapped[i].is_mapped() {
            return Ok(None);
        }
        let Some(chunk) = self.chunks.take(recorder.completed()) else { return Ok(None) };
        if !held {
            self.mapped[i].clear();
            self.asked[i] = false;
            let view = foreign(|| self.buffers[i].raw().get_mapped_range_mut(..))
                .map_err(|e| Error::Gpu { what: "the mapping of an upload chunk".into(), reason: e.to_string() })?;
            self.memory[i] = Some(ChunkMemory::Mapped(view));
        }
        match self.memory[i].take() {
            Some(memory) => Ok(Some((chunk, memory))),
            None => Err(Error::Gpu { what: "an upload chunk".into(), reason: "its memory is missing".into() }),
        }
    }

    /// Begins to read a part from the sources, if a chunk is idle.
    pub fn read(
        &mut self,
        recorder: &Recorder,
        part: Part,
        reads: std::ops::Range<u32>,
        table: &Arc<Reads>,
    ) -> Result<bool> {
        let Some((chunk, memory)) = self.take(recorder)? else { return Ok(false) };
        self.issued.push_back(Issued { part, chunk, ready: None });
        self.reading += 1;
        self.reader.start(Job { chunk, memory, len: part.len, reads, table: table.clone() })?;
        Ok(true)
    }

    /// Fills a part from the caller's memory, if a chunk is idle.
    pub fn put(&mut self, recorder: &Recorder, part: Part, bytes: &[u8]) -> Result<bool> {
        let Some((chunk, mut memory)) = self.take(recorder)? else { return Ok(false) };
        memory.sink(0..bytes.len()).put(0, bytes);
        self.issued.push_back(Issued { part, chunk, ready: Some(memory) });
        Ok(true)
    }

    /// Takes note of finished reads; with `wait`, waits a short while for one.
    pub async fn collect(&mut self, wait: bool) -> Result<()> {
        let mut wait = wait;
        while self.reading > 0 {
            let done = match self.reader.next(wait).await {
                Ok(Some(done)) => done,
                Ok(None) => break,
                Err(error) => {
                    // The reader is gone, and with it what it was reading: nothing more will come.
                    self.reading = 0;
                    return Err(error);
                }
            };
            wait = false;
            self.reading -= 1;
            match self.issued.iter_mut().find(|i| i.chunk == done.chunk && i.ready.is_none()) {
                Some(issued) => issued.ready = Some(done.memory),
                None => self.memory[done.chunk as usize] = Some(done.memory),
            }
            done.result?;
        }
        Ok(())
    }

    /// The part at the front, if it is filled.
    pub fn ready(&self) -> Option<Part> {
        self.issued.front().filter(|i| i.ready.is_some()).map(|i| i.part)
    }

    /// Whether the part at the front is still being read.
    pub fn is_reading(&self) -> bool {
        self.issued.front().is_some_and(|i| i.ready.is_none())
    }

    /// Records the copy of the part at the front.
    pub fn record(&mut self, recorder: &mut Recorder, to: (&wgpu::Buffer, u64)) -> Result<()> {
        let Some(Issued { part, chunk, ready: Some(memory) }) = self.issued.pop_front() else {
            return Err(Error::Gpu { what: "an upload".into(), reason: "no chunk is ready".into() });
        };
        match memory {
            ChunkMemory::Mapped(view) => {
                foreign(|| {
                    drop(view);
                    self.buffers[chunk as usize].raw().unmap();
                });
                recorder.copy((self.buffers[chunk as usize].raw(), 0), to, u64::from(part.len));
            }
            ChunkMemory::Scratch(scratch) => {
                // writeBuffer goes before everything submitted later, so what is recorded must go out first.
                recorder.submit()?;
                let written = foreign(|| scratch.write(self.device.raw_queue(), to, part.len));
                recorder.touch();
                self.memory[chunk as usize] = Some(ChunkMemory::Scratch(scratch));
                written?;
            }
        }
        self.chunks.recorded(chunk);
        Ok(())
    }

    /// To be called after each submission.
    pub fn submitted(&mut self, recorder: &Recorder) {
        let (buffers, mapped, asked) = (&self.buffers, &self.mapped, &mut self.asked);
        self.chunks.submitted(recorder.submitted(), |i| {
            if MAPPED_RINGS {
                asked[i as usize] = true;
                recorder.map(buffers[i as usize].raw(), wgpu::MapMode::Write, &mapped[i as usize]);
            }
        });
    }

    /// Whether a copy waits to be submitted.
    pub fn has_recorded(&self) -> bool {
        self.chunks.has_recorded()
    }

    /// The epoch that the next chunk waits for.
    pub fn waits_for(&self) -> Option<u64> {
        self.chunks.waits_for()
    }

    /// The mapping that the next chunk waits for.
    pub fn mapping(&self) -> Option<Mapping> {
        let next = self.chunks.peek()? as usize;
        self.memory[next].is_none().then(|| self.mapped[next].clone())
    }

    /// After a failure: waits for the reader, and takes all chunks back.
    pub async fn reset(&mut self, recorder: &Recorder) {
        while self.reading > 0 {
            // The error was reported when it came first.
            let _ = self.collect(true).await;
        }
        while let Some(issued) = self.issued.pop_front() {
            self.memory[issued.chunk as usize] = issued.ready;
        }
        self.chunks.reset(recorder.submitted());
        self.map_idle(recorder);
    }
}

/// Device to host.
pub(crate) struct ReadbackRing {
    ring: Ring,
    buffers: Vec<Buffer>,
    mapped: Vec<Mapping>,
    /// Whether a mapping was asked for and not ended.
    asked: Vec<bool>,
}

impl ReadbackRing {
    pub async fn new(device: &Device, ring: Ring) -> Result<ReadbackRing> {
        let mut buffers = Vec::new();
        for _ in 0..ring.chunks {
            let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
            buffers.push(device.buffer("a readback chunk", Category::Readback, ring.chunk, usage).await?);
        }
        Ok(ReadbackRing {
            ring,
            mapped: buffers.iter().map(|_| Default::default()).collect(),
            asked: vec![false; buffers.len()],
            buffers,
        })
    }

    /// Copies bytes of a buffer to the host, as many chunks at a time as there are. `submitted` is called after each
    /// submission.
    pub async fn fetch(
        &mut self,
        recorder: &mut Recorder,
        from: (&wgpu::Buffer, u64),
        to: &mut [u8],
        stop: &dyn Fn() -> Result<()>,
        submitted: &mut dyn FnMut(&Recorder),
    ) -> Result<()> {
        let chunk = self.ring.chunk as usize;
        let mut at = 0;
        while at < to.len() {
            let parts = to.len().div_ceil(chunk) - at / chunk;
            let parts = parts.min(self.buffers.len());
            for i in 0..parts {
                let start = at + i * chunk;
                let len = chunk.min(to.len() - start) as u64;
                recorder.copy((from.0, from.1 + start as u64), (self.buffers[i].raw(), 0), len);
            }
            let epoch = recorder.submit()?;
            submitted(recorder);
            for i in 0..parts {
                self.asked[i] = true;
                recorder.map(self.buffers[i].raw(), wgpu::MapMode::Read, &self.mapped[i]);
            }
            for i in 0..parts {
                let waited = recorder.wait_for(&self.mapped[i], epoch, stop).await;
                if waited.is_err() {
                    self.reset();
                    return waited;
                }
                let start = at + i * chunk;
                let end = to.len().min(start + chunk);
                foreign(|| -> Result<()> {
                    let raw = self.buffers[i].raw();
                    let view = raw.get_mapped_range(..).map_err(|e| Error::Gpu {
                        what: "the mapping of a readback chunk".into(),
                        reason: e.to_string(),
                    })?;
                    to[start..end].copy_from_slice(&view[..end - start]);
                    drop(view);
                    raw.unmap();
                    Ok(())
                })?;
                self.asked[i] = false;
            }
            at += parts * chunk;
        }
        Ok(())
    }

    /// Ends every mapping that a failed or dropped run left behind; its callback, should it still come, tells nobody.
    pub fn reset(&mut self) {
        for (i, asked) in self.asked.iter_mut().enumerate().filter(|(_, asked)| **asked) {
            foreign(|| self.buffers[i].raw().unmap());
            (*asked, self.mapped[i]) = (false, Mapping::default());
        }
    }
}
