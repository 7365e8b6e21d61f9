//! Recording, submitting, and knowing what is done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::{Device, Pipeline, foreign};
use crate::error::{Error, Result};
use crate::rt;

/// Most dispatches in one submission.
const MAX_DISPATCHES: u32 = 64;
/// Most submissions that the host runs ahead of the queue.
const MAX_AHEAD: u64 = 8;

/// Short waits in which a device that refuses a mapping may still say that it is lost.
const LAST_WORDS: u32 = 20;

/// What became of a buffer that was asked to be mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mapping(Arc<AtomicU8>);

const MAPPED: u8 = 1;
const REFUSED: u8 = 2;

impl Mapping {
    /// Whether it is mapped.
    pub fn is_mapped(&self) -> bool {
        self.0.load(Ordering::Acquire) == MAPPED
    }

    fn is_refused(&self) -> bool {
        self.0.load(Ordering::Acquire) == REFUSED
    }

    /// Before it is asked for, or after it was used.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    fn end(&self, mapped: bool) {
        self.0.store(if mapped { MAPPED } else { REFUSED }, Ordering::Release);
    }
}

/// A kernel call with everything bound.
pub(crate) struct Dispatch<'a> {
    pub pipeline: &'a Pipeline,
    pub group: &'a wgpu::BindGroup,
    pub params: u32,
    pub grid: [u32; 2],
    pub work: u64,
}

/// Records commands into short submissions and numbers them by epoch.
pub(crate) struct Recorder {
    device: Device,
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    dispatches: u32,
    work: u64,
    submitted: u64,
    completed: Arc<AtomicU64>,
    in_flight: VecDeque<(u64, wgpu::SubmissionIndex)>,
    wake: (async_channel::Sender<()>, async_channel::Receiver<()>),
}

impl Recorder {
    pub fn new(device: Device) -> Recorder {
        Recorder {
            device,
            encoder: None,
            pass: None,
            dispatches: 0,
            work: 0,
            submitted: 0,
            completed: Arc::new(AtomicU64::new(0)),
            in_flight: VecDeque::with_capacity(64),
            wake: async_channel::bounded(1),
        }
    }

    /// The last epoch seen done.
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The last epoch submitted.
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Whether the submission has reached the work or the number of dispatches that it should not exceed.
    pub fn is_full(&self, more: u64) -> bool {
        self.dispatches >= MAX_DISPATCHES
            || self.dispatches > 0 && self.work + more > self.device.caps().work_per_submission
    }

    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        let device = self.device.raw();
        self.encoder.get_or_insert_with(|| {
            foreign(|| device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: None }))
        })
    }

    pub fn dispatch(&mut self, d: &Dispatch<'_>) {
        if self.pass.is_none() {
            let encoder = self.encoder();
            let pass = foreign(|| encoder.begin_compute_pass(&Default::default()).forget_lifetime());
            self.pass = Some(pass);
        }
        if let Some(pass) = &mut self.pass {
            foreign(|| {
                pass.set_pipeline(&d.pipeline.raw);
                pass.set_bind_group(0, d.group, &[d.params]);
                pass.dispatch_workgroups(d.grid[0], d.grid[1], 1);
            });
        }
        self.dispatches += 1;
        self.work += d.work;
    }

    fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take() {
            foreign(|| drop(pass));
        }
    }

    pub fn copy(&mut self, from: (&wgpu::Buffer, u64), to: (&wgpu::Buffer, u64), len: u64) {
        self.end_pass();
        let encoder = self.encoder();
        foreign(|| encoder.copy_buffer_to_buffer(from.0, from.1, to.0, to.1, len));
    }

    /// Makes sure that there is something to submit, so that a `writeBuffer` gets an epoch of its own.
    pub fn touch(&mut self) {
        self.encoder();
    }

    /// Submits what is recorded; gives the epoch of the last submission.
    pub fn submit(&mut self) -> Result<u64> {
        self.end_pass();
        if let Some(encoder) = self.encoder.take() {
            self.device.check()?;
            self.submitted += 1;
            let (epoch, completed, wake) = (self.submitted, self.completed.clone(), self.wake.0.clone());
            let queue = self.device.raw_queue();
            let index = foreign(|| {
                let index = queue.submit([encoder.finish()]);
                queue.on_submitted_work_done(move || {
                    completed.fetch_max(epoch, Ordering::AcqRel);
                    let _ = wake.try_send(());
                });
                index
            });
            self.in_flight.push_back((epoch, index));
            (self.dispatches, self.work) = (0, 0);
            self.device.check()?;
        }
        Ok(self.submitted)
    }

    /// Drops what is recorded and not submitted.
    pub fn discard(&mut self) {
        self.end_pass();
        if let Some(encoder) = self.encoder.take() {
            foreign(|| drop(encoder));
        }
        (self.dispatches, self.work) = (0, 0);
    }

    /// Lets callbacks run. With `wait`, waits a short while for something to happen, best for this epoch's end.
    pub async fn pump(&mut self, epoch: u64, wait: bool) -> Result<()> {
        self.device.check()?;
        let done = self.completed();
        while self.in_flight.front().is_some_and(|(e, _)| *e <= done) {
            self.in_flight.pop_front();
        }
        let index = self.in_flight.iter().find(|(e, _)| *e >= epoch && epoch > done).map(|(_, i)| i.clone());
        rt::pump(self.device.raw(), index, wait, &self.wake.1).await;
        self.device.check()
    }

    /// Waits until an epoch is seen done. `stop` is asked between short waits.
    pub async fn wait(&mut self, epoch: u64, stop: &dyn Fn() -> Result<()>) -> Result<()> {
        while self.completed() < epoch {
            stop()?;
            self.pump(epoch, true).await?;
        }
        Ok(())
    }

    /// Holds the host back when it runs too far ahead of the queue.
    pub async fn keep_pace(&mut self, stop: &dyn Fn() -> Result<()>) -> Result<()> {
        self.pump(0, false).await?;
        self.wait(self.submitted.saturating_sub(MAX_AHEAD), stop).await
    }

    /// Begins to map a buffer. Awaited by [`Recorder::wait_for`].
    pub fn map(&self, buffer: &wgpu::Buffer, mode: wgpu::MapMode, mapping: &Mapping) {
        mapping.clear();
        let (mapping, wake) = (mapping.clone(), self.wake.0.clone());
        foreign(|| {
            buffer.slice(..).map_async(mode, move |result| {
                mapping.end(result.is_ok());
                let _ = wake.try_send(());
            });
        });
    }

    /// Waits for the end of a [`Recorder::map`] of a buffer last used in `epoch`.
    pub async fn wait_for(&mut self, mapping: &Mapping, epoch: u64, stop: &dyn Fn() -> Result<()>) -> Result<()> {
        while !mapping.is_mapped() {
            stop()?;
            self.not_refused(mapping).await?;
            self.pump(epoch, true).await?;
        }
        Ok(())
    }

    /// An error if the mapping was refused: that the device is lost, where it says so.
    pub async fn not_refused(&mut self, mapping: &Mapping) -> Result<()> {
        if !mapping.is_refused() {
            return Ok(());
        }
        for _ in 0..LAST_WORDS {
            self.pump(0, true).await?;
        }
        Err(Error::Gpu { what: "the mapping of a ring's chunk".into(), reason: "the driver gave no reason".into() })
    }
}
