//! Web: reads run in the worker's own loop, and waiting means awaiting what the browser reports.

use std::collections::VecDeque;

use super::{Done, Job};
use crate::error::Result;

/// Chunks of the rings are host buffers for `writeBuffer`.
pub const MAPPED_RINGS: bool = false;

/// Fills ring chunks one after another when asked for the next.
pub struct Reader {
    jobs: VecDeque<Job>,
}

impl Reader {
    /// A reader for a ring of so many chunks.
    pub fn new(chunks: u32) -> Result<Reader> {
        Ok(Reader { jobs: VecDeque::with_capacity(chunks as usize) })
    }

    /// Hands over a job.
    pub fn start(&mut self, job: Job) -> Result<()> {
        self.jobs.push_back(job);
        Ok(())
    }

    /// The next finished job, if there is one to run.
    pub async fn next(&mut self, _wait: bool) -> Result<Option<Done>> {
        // The job stays in the queue while it is filled: dropping this future must not lose the chunk's memory.
        let Some(job) = self.jobs.front_mut() else { return Ok(None) };
        let result = job.fill().await;
        Ok(self.jobs.pop_front().map(|job| job.done(result)))
    }
}

/// With `wait`, waits until the browser reports something: the end of a submission, or a mapping.
pub async fn pump(_: &wgpu::Device, _: Option<wgpu::SubmissionIndex>, wait: bool, wake: &async_channel::Receiver<()>) {
    if wait {
        let _ = wake.recv().await;
    }
}
