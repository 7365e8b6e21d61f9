//! Web: reads run in the worker's own loop, and waiting means awaiting what the browser reports.
//!
//! Weight bytes stay in memory of the browser on their whole way: a source reads into a JavaScript buffer of a ring chunk,
//! and `writeBuffer` takes it from there. wasm memory never shrinks, so what went through it once would stay for ever.

use std::cell::Cell;
use std::marker::PhantomData;
use std::pin::{Pin, pin};

use futures_util::future::{select, try_join_all};
use js_sys::Uint8Array;
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;

use super::{Done, Job, Read};
use crate::error::{Bytes, Error, Result};

/// Chunks of the rings are host buffers for `writeBuffer`.
pub const MAPPED_RINGS: bool = false;

/// Bytes that pass through wasm memory at once, for sources that can only fill a slice.
const PIECE: usize = 64 << 10;
/// How long one wait may take, so that cancelling and a lost device are noticed.
const SLICE: i32 = 50;

/// What sources are on the web: of this thread.
pub trait Shared {}

impl<T: ?Sized> Shared for T {}

/// A future that a source hands out.
pub type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Where a source puts the bytes that it reads.
pub struct Sink<'a>(Place<'a>);

enum Place<'a> {
    Slice(&'a mut [u8]),
    Host(Uint8Array, PhantomData<&'a mut Scratch>),
}

impl<'a> Sink<'a> {
    /// Memory of the module.
    pub fn new(bytes: &'a mut [u8]) -> Sink<'a> {
        Sink(Place::Slice(bytes))
    }

    /// Bytes that it takes.
    #[allow(clippy::len_without_is_empty, reason = "nothing asks")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Slice(bytes) => bytes.len(),
            Place::Host(bytes, _) => bytes.length() as usize,
        }
    }

    /// Puts bytes at a place. Panics past the end, as a slice does.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        match &mut self.0 {
            Place::Slice(to) => to[at..at + bytes.len()].copy_from_slice(bytes),
            Place::Host(to, _) => to.subarray(at as u32, (at + bytes.len()) as u32).copy_from(bytes),
        }
    }

    /// Puts bytes of the browser at a place. Panics past the end.
    pub fn put_host(&mut self, at: usize, bytes: &Uint8Array) {
        match &mut self.0 {
            Place::Slice(to) => bytes.copy_to(&mut to[at..at + bytes.length() as usize]),
            Place::Host(to, _) => to.set(bytes, at as u32),
        }
    }

    /// The browser's memory behind it, for what reads into such memory itself; `None` for memory of the module.
    pub fn host(&self) -> Option<&Uint8Array> {
        match &self.0 {
            Place::Slice(_) => None,
            Place::Host(bytes, _) => Some(bytes),
        }
    }

    /// Zeroes all of it.
    pub fn zero(&mut self) {
        match &mut self.0 {
            Place::Slice(bytes) => bytes.fill(0),
            Place::Host(bytes, _) => _ = bytes.fill(0, 0, bytes.length()),
        }
    }

    /// Lets bytes be read into it, in pieces in order: each with its first byte's place.
    pub fn by_pieces<E>(self, mut each: impl FnMut(usize, &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        match self.0 {
            Place::Slice(bytes) => each(0, bytes),
            Place::Host(bytes, _) => {
                let all = bytes.length() as usize;
                let mut piece = vec![0; PIECE.min(all)];
                for at in (0..all).step_by(PIECE) {
                    let piece = &mut piece[..PIECE.min(all - at)];
                    each(at, piece)?;
                    bytes.subarray(at as u32, (at + piece.len()) as u32).copy_from(piece);
                }
                Ok(())
            }
        }
    }
}

/// A buffer of the browser in place of a mapped chunk.
pub struct Scratch(Uint8Array);

impl Scratch {
    /// A buffer of so many bytes.
    pub fn new(bytes: u64) -> Result<Option<Scratch>> {
        // The constructor throws where there is no memory; called plainly, that would end the module.
        let constructor = js_sys::Reflect::get(&js_sys::global(), &"Uint8Array".into());
        let made = constructor.and_then(|c| {
            let class: &js_sys::Function = c.unchecked_ref();
            js_sys::Reflect::construct(class, &js_sys::Array::of1(&(bytes as f64).into()))
        });
        match made {
            Ok(buffer) => Ok(Some(Scratch(buffer.unchecked_into()))),
            Err(_) => Err(Error::OutOfMemory {
                what: "a chunk of the browser's memory".into(),
                size: Bytes(bytes),
                in_use: Bytes(flight().bytes),
            }),
        }
    }

    /// A part of it.
    pub fn sink(&mut self, range: std::ops::Range<usize>) -> Sink<'_> {
        Sink(Place::Host(self.0.subarray(range.start as u32, range.end as u32), PhantomData))
    }

    /// Hands its first bytes to the queue, which copies them before this returns.
    pub fn write(&self, queue: &wgpu::Queue, to: (&wgpu::Buffer, u64), len: u32) -> Result<()> {
        let refused = |reason: String| Error::Gpu { what: "writeBuffer".into(), reason };
        let (Some(queue), Some(buffer)) = (queue.as_webgpu(), to.0.as_webgpu()) else {
            return Err(refused("the queue is none of the browser's".into()));
        };
        queue
            .write_buffer_with_f64_and_buffer_source_and_f64_and_f64(buffer, to.1 as f64, &self.0, 0.0, f64::from(len))
            .map_err(|e| refused(format!("{e:?}")))
    }
}

/// Bytes of chunks that sources are filling now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flight {
    /// Now.
    pub bytes: u64,
    /// The most that ever were.
    pub peak: u64,
}

thread_local! {
    static FLIGHT: Cell<Flight> = const { Cell::new(Flight { bytes: 0, peak: 0 }) };
}

/// Bytes on their way from sources to chunks, of all sessions of this worker.
pub fn flight() -> Flight {
    FLIGHT.get()
}

/// Fills a chunk: all its reads at once, as each waits for the browser. After an error its content must not be used.
async fn fill(job: &mut Job) -> Result<()> {
    job.zero_gaps();
    // Reads that go on where the one before ended are one.
    let mut reads: Vec<Read> = Vec::new();
    for read in &job.table.reads[job.reads.start as usize..job.reads.end as usize] {
        match reads.last_mut() {
            Some(last)
                if last.source == read.source
                    && last.at + u64::from(last.len) == read.at
                    && last.to + last.len == read.to =>
            {
                last.len += read.len;
            }
            _ => reads.push(*read),
        }
    }
    let Job { memory: super::ChunkMemory::Scratch(Scratch(buffer)), table, .. } = job else {
        return Err(Error::Gpu { what: "an upload chunk".into(), reason: "it is not of the browser".into() });
    };
    let all = reads.iter().map(|read| {
        let sink = Sink(Place::Host(buffer.subarray(read.to, read.to + read.len), PhantomData));
        table.sources[read.source as usize].fill_sink(read.at, sink)
    });
    try_join_all(all).await.map(|_| ())
}

/// Fills ring chunks as tasks of their own: a run whose future is dropped takes no chunk with it.
pub struct Reader {
    done: (async_channel::Sender<Done>, async_channel::Receiver<Done>),
}

impl Reader {
    /// A reader for a ring of so many chunks.
    pub fn new(chunks: u32) -> Result<Reader> {
        Ok(Reader { done: async_channel::bounded(chunks.max(1) as usize) })
    }

    /// Begins a job.
    pub fn start(&mut self, mut job: Job) -> Result<()> {
        let done = self.done.0.clone();
        let len = u64::from(job.len);
        let now = flight().bytes + len;
        FLIGHT.set(Flight { bytes: now, peak: flight().peak.max(now) });
        wasm_bindgen_futures::spawn_local(async move {
            let result = fill(&mut job).await;
            FLIGHT.set(Flight { bytes: flight().bytes - len, ..flight() });
            // The session may be gone by now, and its chunks with it.
            let _ = done.send(job.done(result)).await;
        });
        Ok(())
    }

    /// The next finished job; with `wait`, waits for it a short while.
    pub async fn next(&mut self, wait: bool) -> Result<Option<Done>> {
        if wait { Ok(soon(self.done.1.recv()).await.and_then(Result::ok)) } else { Ok(self.done.1.try_recv().ok()) }
    }
}

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_name = setTimeout, catch)]
    fn set_timeout(call: &js_sys::Function, milliseconds: i32) -> Result<JsValue, JsValue>;
}

/// Goes back to the browser's event loop for about so long.
pub async fn pause(milliseconds: i32) {
    let timer = js_sys::Promise::new(&mut |resolve, _| {
        if set_timeout(&resolve, milliseconds).is_err() {
            let _ = resolve.call0(&JsValue::UNDEFINED);
        }
    });
    let _ = wasm_bindgen_futures::JsFuture::from(timer).await;
}

/// What a future comes to, if it does so within a short while.
async fn soon<T>(future: impl Future<Output = T>) -> Option<T> {
    use futures_util::future::Either;
    match select(pin!(future), pin!(pause(SLICE))).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(_) => None,
    }
}

/// With `wait`, waits a short while for the browser to report something: the end of a submission, or a mapping.
pub async fn pump(_: &wgpu::Device, _: Option<wgpu::SubmissionIndex>, wait: bool, wake: &async_channel::Receiver<()>) {
    if wait {
        let _ = soon(wake.recv()).await;
    }
}
