//! One run of a plan.

use super::rows::ids_of;
use super::*;
use crate::graph::HookWhen;

impl Session {
    pub(super) async fn execute(
        &mut self,
        plan: &Plan,
        index: usize,
        inputs: &[(&str, &[u8])],
        cancel: &Cancel,
        events: &mut dyn EventSink,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let updating = std::cell::Cell::new(false);
        let stop = || if cancel.is_cancelled() && !updating.get() { Err(Error::Cancelled) } else { Ok(()) };
        let set = self.set.clone();
        let bound_all = self.bound.clone();
        let mut bound = bound_all.get(index).map(|b| b.iter()).unwrap_or_default();
        let mut progress = Progress { fill: 0, part: 0, complete: 0, parts_done: 0, listed: None, at: 0 };
        for (i, action) in plan.actions.iter().enumerate() {
            // Once the first update is recorded the step is done: stopping now would leave half of it.
            stop()?;
            updating.set(i >= plan.updates_from as usize && !plan.actions.is_empty());
            progress.at = i;
            // Everything that this action may need must be recorded before it.
            self.complete_until(plan, inputs, i as u32, &mut progress, &stop, events, outputs).await?;
            match action {
                // A load runs by itself inside its window; an upload's window is its own place.
                Action::Load { .. } => {}
                Action::Upload { .. } | Action::LoadRows { .. } => {
                    progress.at = i + 1;
                    self.complete_until(plan, inputs, i as u32, &mut progress, &stop, events, outputs).await?;
                }
                Action::Evict { segment, slot, pass } => {
                    self.store.held[slot.0 as usize] = None;
                    outputs.evictions += 1;
                    events.event(Event::Evict { segment: set.segments[*segment as usize].name.clone(), pass: *pass });
                }
                Action::Dispatch { kernel, bindings, params, grid, work } => {
                    if self.recorder.is_full(*work) {
                        self.flush()?;
                        // Between updates nothing is awaited, so that a dropped run cannot leave half of them.
                        if !updating.get() {
                            self.recorder.keep_pace(&stop).await?;
                        }
                    }
                    let Some(b) = bound.next() else {
                        return Err(Error::Plan { action: i, reason: "the dispatch was never bound".into() });
                    };
                    let made;
                    let group = match &b.group {
                        Some(group) => &**group,
                        None => {
                            made = self.group(&b.pipeline, kernel.shader, bindings);
                            &made
                        }
                    };
                    self.recorder.dispatch(&Dispatch {
                        pipeline: &b.pipeline,
                        group,
                        params: *params,
                        grid: *grid,
                        work: *work,
                    });
                }
                Action::Download { output, from } => {
                    let value = &mut outputs.values[*output as usize].1;
                    let buffer = self.store.buffer(from.slot, from.buffer);
                    let upload = &mut self.upload;
                    self.readback
                        .fetch(&mut self.recorder, (buffer, from.offset), value, &stop, &mut |r| upload.submitted(r))
                        .await?;
                    outputs.downloaded_bytes += value.len() as u64;
                }
                Action::Alloc { slot } => self.store.make(&self.device, &set.table, *slot).await?,
                Action::Free { slot } => {
                    self.flush()?;
                    self.recorder.wait(self.recorder.submitted(), &stop).await?;
                    self.free(*slot).await?;
                }
                Action::Hook { name, when, pass, value } => {
                    self.flush()?;
                    self.call_hook(name, *when, *pass, value.as_ref(), &stop, outputs).await?;
                }
            }
            self.advance(plan, inputs, &mut progress, events, outputs).await?;
        }
        progress.at = plan.actions.len();
        self.complete_until(plan, inputs, u32::MAX, &mut progress, &stop, events, outputs).await?;
        self.flush()?;
        self.recorder.wait(self.recorder.submitted(), &stop).await?;
        self.device.check()
    }

    /// Destroys a dynamic slot and waits until the device has seen it go.
    async fn free(&mut self, slot: SlotId) -> Result<()> {
        self.store.destroy(slot);
        self.recorder.pump(0, false).await
    }

    async fn call_hook(
        &mut self,
        name: &Arc<str>,
        when: HookWhen,
        pass: Pass,
        value: Option<&Binding>,
        stop: &dyn Fn() -> Result<()>,
        outputs: &mut Outputs,
    ) -> Result<()> {
        if when != HookWhen::Submitted {
            self.recorder.wait(self.recorder.submitted(), stop).await?;
        }
        let mut bytes = std::mem::take(&mut self.hook_value);
        if let Some(from) = value {
            bytes.resize(from.size as usize, 0);
            let buffer = self.store.buffer(from.slot, from.buffer);
            let upload = &mut self.upload;
            self.readback
                .fetch(&mut self.recorder, (buffer, from.offset), &mut bytes, stop, &mut |r| upload.submitted(r))
                .await?;
            outputs.downloaded_bytes += from.size;
        }
        let call = HookCall { name, pass, value: value.map(|_| bytes.as_slice()) };
        let result = match &mut self.hook {
            Some(hook) => hook(call),
            None => Ok(()),
        };
        self.hook_value = bytes;
        result
    }

    /// Records everything whose window ends at or before action `by`, waiting as long as it takes.
    #[allow(clippy::too_many_arguments)] // the state of one run, split so that borrows stay apart
    async fn complete_until(
        &mut self,
        plan: &Plan,
        inputs: &[(&str, &[u8])],
        by: u32,
        progress: &mut Progress,
        stop: &dyn Fn() -> Result<()>,
        events: &mut dyn EventSink,
        outputs: &mut Outputs,
    ) -> Result<()> {
        loop {
            self.advance(plan, inputs, progress, events, outputs).await?;
            let Some(fill) = plan.fills.get(progress.complete) else { return Ok(()) };
            let due = match &plan.actions[*fill as usize] {
                Action::Load { by: end, .. } => *end <= by,
                // An upload is due when the run has reached it.
                _ => (*fill as usize) < progress.at && *fill <= by,
            };
            if !due {
                return Ok(());
            }
            if self.upload.is_reading() {
                stop()?;
                self.upload.collect(true).await?;
            } else if self.upload.ready().is_none() {
                self.free_a_chunk(stop).await?;
            }
        }
    }

    /// Does what can be done without waiting: starts reads, takes note of finished ones, records ready copies.
    async fn advance(
        &mut self,
        plan: &Plan,
        inputs: &[(&str, &[u8])],
        progress: &mut Progress,
        events: &mut dyn EventSink,
        outputs: &mut Outputs,
    ) -> Result<()> {
        if progress.complete == plan.fills.len() {
            return Ok(());
        }
        let set = self.set.clone();
        loop {
            while let Some(fill) = plan.fills.get(progress.fill) {
                let chunk = self.upload.chunk();
                let (started, parts) = match &plan.actions[*fill as usize] {
                    Action::Load { segment, .. } => {
                        let chunks = &self.chunks[*segment as usize];
                        let c = &chunks[progress.part as usize];
                        let part = Part { action: *fill, part: progress.part, len: c.len };
                        (self.upload.read(&self.recorder, part, c.reads.clone(), &self.reads)?, chunks.len() as u32)
                    }
                    Action::Upload { input, .. } => {
                        let name = &plan.inputs[*input as usize].name;
                        let bytes = inputs.iter().find(|(n, _)| **n == **name).map_or(&[][..], |(_, b)| b);
                        let start = progress.part as usize * chunk as usize;
                        let end = bytes.len().min(start + chunk as usize);
                        let part = Part { action: *fill, part: progress.part, len: (end - start) as u32 };
                        let parts = (bytes.len() as u64).div_ceil(chunk) as u32;
                        (self.upload.put(&self.recorder, part, &bytes[start..end])?, parts)
                    }
                    Action::LoadRows { weight, input, to } => {
                        let start = u64::from(progress.part) * chunk;
                        let part =
                            Part { action: *fill, part: progress.part, len: (to.size - start).min(chunk) as u32 };
                        let rows = self.rows.get_mut(weight).ok_or_else(|| Error::NotFound {
                            what: "weight",
                            name: format!("#{}", weight.0),
                            hint: None,
                        })?;
                        if progress.listed != Some(*fill) {
                            rows.prepare(ids_of(plan, *input, inputs), to.size, chunk);
                            progress.listed = Some(*fill);
                        }
                        let (reads, table) = rows.part(progress.part);
                        (self.upload.read(&self.recorder, part, reads, table)?, to.size.div_ceil(chunk) as u32)
                    }
                    _ => return Err(Error::Plan { action: *fill as usize, reason: "it does not use the ring".into() }),
                };
                if !started {
                    break;
                }
                progress.part += 1;
                if progress.part == parts {
                    (progress.fill, progress.part) = (progress.fill + 1, 0);
                }
            }
            self.upload.collect(false).await?;
            let Some(part) = self.upload.ready() else { return Ok(()) };
            // A window opens once its action has been reached.
            if part.action as usize >= progress.at {
                return Ok(());
            }
            let whole = match &plan.actions[part.action as usize] {
                Action::Load { segment, slot, pass, .. } => {
                    let chunks = &self.chunks[*segment as usize];
                    let c = &chunks[part.part as usize];
                    let to = (self.store.buffer(*slot, c.buffer), c.offset);
                    self.upload.record(&mut self.recorder, to)?;
                    let whole = part.part as usize + 1 == chunks.len();
                    if whole {
                        let layout = &set.segments[*segment as usize];
                        self.store.held[slot.0 as usize] = Some(*segment);
                        outputs.loads += 1;
                        outputs.streamed_bytes += layout.bytes;
                        events.event(Event::Load { segment: layout.name.clone(), pass: *pass, bytes: layout.bytes });
                    }
                    whole
                }
                Action::Upload { to, .. } | Action::LoadRows { to, .. } => {
                    let at = u64::from(part.part) * self.upload.chunk();
                    self.upload.record(&mut self.recorder, (self.store.buffer(to.slot, to.buffer), at))?;
                    at + u64::from(part.len) == to.size
                }
                _ => {
                    return Err(Error::Plan {
                        action: part.action as usize,
                        reason: "it does not use the ring".into(),
                    });
                }
            };
            progress.parts_done += 1;
            if whole {
                (progress.complete, progress.parts_done) = (progress.complete + 1, 0);
            }
        }
    }
}
