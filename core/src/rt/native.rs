//! Native: a reader thread, and waiting by polling the device in short slices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Done, Job};
use crate::error::{Error, Result};

/// Chunks of the rings are mapped buffers.
pub const MAPPED_RINGS: bool = true;

/// How long one wait may hold the thread, so that cancelling and a lost device are noticed.
const SLICE: Duration = Duration::from_millis(10);

/// What sources are natively: of any thread.
pub trait Shared: Send + Sync {}

impl<T: Send + Sync + ?Sized> Shared for T {}

/// A future that a source hands out.
pub type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where a source puts the bytes that it reads.
pub struct Sink<'a>(&'a mut [u8]);

impl<'a> Sink<'a> {
    /// Memory of the process.
    pub fn new(bytes: &'a mut [u8]) -> Sink<'a> {
        Sink(bytes)
    }

    /// Bytes that it takes.
    #[allow(clippy::len_without_is_empty, reason = "nothing asks")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Puts bytes at a place. Panics past the end, as a slice does.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Zeroes all of it.
    pub fn zero(&mut self) {
        self.0.fill(0);
    }

    /// Lets bytes be read into it, in pieces in order: each with its first byte's place.
    pub fn by_pieces<E>(self, mut each: impl FnMut(usize, &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        each(0, self.0)
    }
}

/// A host buffer in place of a mapped chunk. Natively there is none.
pub enum Scratch {}

impl Scratch {
    /// None is made natively.
    pub fn new(_: u64) -> Result<Option<Scratch>> {
        Ok(None)
    }

    /// A part of it.
    pub fn sink(&mut self, _: std::ops::Range<usize>) -> Sink<'_> {
        match *self {}
    }

    /// Hands its first bytes to the queue.
    pub fn write(&self, _: &wgpu::Queue, _: (&wgpu::Buffer, u64), _: u32) -> Result<()> {
        match *self {}
    }
}

/// Fills a chunk, read after read. After an error its content must not be used.
async fn fill(job: &mut Job) -> Result<()> {
    job.zero_gaps();
    for i in job.reads.clone() {
        let read = job.table.reads[i as usize];
        let sink = job.memory.sink(read.to as usize..(read.to + read.len) as usize);
        job.table.sources[read.source as usize].fill_sink(read.at, sink).await?;
    }
    Ok(())
}

/// Fills ring chunks on a thread of its own, in the order of the jobs.
pub struct Reader {
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts a reader for a ring of so many chunks.
    pub fn new(chunks: u32) -> Result<Reader> {
        let (jobs, queue) = sync_channel::<Job>(chunks as usize);
        let (results, done) = sync_channel(chunks as usize);
        let thread = std::thread::Builder::new()
            .name("ebbtide-reader".into())
            .spawn(move || {
                for mut job in queue {
                    let filled = catch_unwind(AssertUnwindSafe(|| at_once(fill(&mut job))));
                    // A reader of the caller's that panics must not take the ring's memory with it.
                    let result = filled.unwrap_or_else(|_| {
                        Err(Error::Io { file: "a source".into(), reason: "its reader panicked".into() })
                    });
                    if results.send(job.done(result)).is_err() {
                        break;
                    }
                }
            })
            .map_err(|e| Error::Io { file: "the reader thread".into(), reason: e.to_string() })?;
        Ok(Reader { jobs: Some(jobs), done, thread: Some(thread) })
    }

    /// Hands over a job. There are never more jobs than chunks, so this does not wait.
    pub fn start(&mut self, job: Job) -> Result<()> {
        let gone = || Error::Io { file: "the reader thread".into(), reason: "it ended unexpectedly".into() };
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())
    }

    /// The next finished job; with `wait`, waits for it a short while.
    pub async fn next(&mut self, wait: bool) -> Result<Option<Done>> {
        let gone = || Error::Io { file: "the reader thread".into(), reason: "it ended unexpectedly".into() };
        if wait {
            match self.done.recv_timeout(SLICE) {
                Ok(done) => Ok(Some(done)),
                Err(RecvTimeoutError::Timeout) => Ok(None),
                Err(RecvTimeoutError::Disconnected) => Err(gone()),
            }
        } else {
            Ok(self.done.try_recv().ok())
        }
    }
}

/// Runs a future that never waits: natively sources block. `pollster` would allocate for every chunk.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
        std::thread::yield_now();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.jobs = None;
        // A reader that hangs in a dead file system must not hang the session.
        if let Some(thread) = self.thread.take()
            && thread.is_finished()
        {
            let _ = thread.join();
        }
    }
}

/// Lets the device make progress: callbacks of finished work are called from here. With `wait`, waits a short while,
/// for the submission where one is named.
pub async fn pump(
    device: &wgpu::Device,
    index: Option<wgpu::SubmissionIndex>,
    wait: bool,
    _wake: &async_channel::Receiver<()>,
) {
    let poll = match index {
        Some(index) if wait => wgpu::PollType::Wait { submission_index: Some(index), timeout: Some(SLICE) },
        _ => wgpu::PollType::Poll,
    };
    if wait && matches!(poll, wgpu::PollType::Poll) {
        std::thread::sleep(Duration::from_micros(50));
    }
    crate::gpu::foreign(|| match device.poll(poll) {
        Ok(_) | Err(wgpu::PollError::Timeout) => {}
        // A lost device does not know the submissions that it refused, and only a plain poll calls back to say so.
        Err(_) => {
            std::thread::sleep(Duration::from_micros(50));
            let _ = device.poll(wgpu::PollType::Poll);
        }
    });
}
