//! Native: a reader thread, and waiting by polling the device in short slices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
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
                    let filled = catch_unwind(AssertUnwindSafe(|| at_once(job.fill())));
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
