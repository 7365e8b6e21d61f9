//! A session: device memory for one set of plans, and the runs of its plans.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::feed::{Part, ReadbackRing, UploadRing};
use super::slots::{Store, uniform_buffer};
use crate::compile::{Action, Binding, Content, Plan, PlanSet, Ring, SlotId, StatePort, verify, verify_prologue};
use crate::error::{Error, Result};
use crate::event::{Event, EventSink, NoEvents, Pass};
use crate::gpu::{Buffer, Device, Dispatch, Pipeline, Recorder, foreign};
use crate::memory::Claim;
use crate::rt::{Read, Reads};
use crate::weights::{Catalog, WeightId};
use rows::{Rows, check_ids};

/// Cancels a run from anywhere: looked at between actions and during waits.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A token that nobody has used.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Asks the run to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the run is to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What a hook is told.
#[derive(Clone, Copy, Debug)]
pub struct HookCall<'a> {
    /// The hook's name.
    pub name: &'a str,
    /// The pass.
    pub pass: Pass,
    /// The tensor's bytes (f32, dense), for [`crate::graph::HookWhen::Value`].
    pub value: Option<&'a [u8]>,
}

type HookFn = Box<dyn FnMut(HookCall<'_>) -> Result<()>>;

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    values: Vec<(Arc<str>, Vec<u8>)>,
    /// Segments loaded.
    pub loads: u64,
    /// Segments evicted.
    pub evictions: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// Bytes copied back to the host.
    pub downloaded_bytes: u64,
}

impl Outputs {
    /// The bytes of an output: f32, dense, row-major, little-endian.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        self.values.iter().find(|(n, _)| &**n == name).map(|(_, v)| v.as_slice()).ok_or_else(|| Error::NotFound {
            what: "output",
            name: name.into(),
            hint: Some(format!("there are {:?}", self.values.iter().map(|(n, _)| &**n).collect::<Vec<_>>())),
        })
    }

    /// An output as numbers.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.bytes(name)?.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn clear_for(&mut self, plan: &Plan) {
        (self.loads, self.evictions, self.streamed_bytes, self.downloaded_bytes) = (0, 0, 0, 0);
        self.values.truncate(plan.outputs.len());
        for (i, port) in plan.outputs.iter().enumerate() {
            match self.values.get_mut(i) {
                Some((name, value)) => {
                    *name = port.name.clone();
                    value.clear();
                    value.resize(port.bytes as usize, 0);
                }
                None => self.values.push((port.name.clone(), vec![0; port.bytes as usize])),
            }
        }
    }
}

/// A part of a segment's way through the ring.
#[derive(Clone, Debug)]
struct Chunk {
    buffer: u32,
    offset: u64,
    len: u32,
    reads: std::ops::Range<u32>,
}

/// Bind groups by shader and buffers: equal ones are made once.
type Groups = HashMap<(&'static str, Vec<Binding>), Arc<wgpu::BindGroup>>;

/// A dispatch with its pipeline and, for static slots, its bind group.
struct Bound {
    pipeline: Arc<Pipeline>,
    group: Option<Arc<wgpu::BindGroup>>,
}

/// Device memory for a set, and the one queue. All methods run on the thread that made it.
pub struct Session {
    /// The bytes of the device that are this session's.
    _claim: Claim,
    device: Device,
    set: Arc<PlanSet>,
    reads: Arc<Reads>,
    /// Per segment, its chunks in order.
    chunks: Vec<Vec<Chunk>>,
    /// Weights of which single rows are read.
    rows: HashMap<WeightId, Rows>,
    store: Store,
    upload: UploadRing,
    readback: ReadbackRing,
    uniforms: Option<Buffer>,
    /// Per plan, one entry for each of its dispatches in order.
    bound: Arc<Vec<Vec<Bound>>>,
    groups: u64,
    folded: u64,
    recorder: Recorder,
    hook: Option<HookFn>,
    hook_value: Vec<u8>,
    /// A run began and did not end: what the device holds is unknown.
    unsettled: bool,
}

impl Session {
    /// Makes all device memory of the set, compiles its kernels and brings it home. What fails leaves nothing behind.
    pub async fn new(device: &Device, catalog: &Catalog, set: PlanSet) -> Result<Session> {
        Session::begin(device, catalog, set, &Cancel::new(), &mut NoEvents).await
    }

    /// As [`Session::new`], which for a large model takes long: with events of its loads, and to be cancelled.
    pub async fn begin(
        device: &Device,
        catalog: &Catalog,
        set: PlanSet,
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<Session> {
        check_catalog(&set, catalog)?;
        verify_all(&set, device)?;
        let claim = device.claim(set.budget);
        let (reads, chunks) = chunk_table(catalog, &set)?;
        let mut rows = HashMap::new();
        for action in set.plans.iter().flat_map(|p| &p.actions) {
            if let Action::LoadRows { weight: id, .. } = action {
                let weight = catalog.weight(*id);
                rows.insert(*id, Rows::new(catalog.sources()[weight.source].clone(), weight));
            }
        }
        let recorder = Recorder::new(device.clone());
        let store = Store::new(&set.table);
        let mut upload = UploadRing::new(device, set.table.upload).await?;
        // Folding reads nothing back: that ring is made after it.
        let readback = ReadbackRing::new(device, Ring { chunks: 0, ..set.table.readback }).await?;
        let uniforms = uniform_buffer(device, set.table.uniforms).await?;
        upload.map_idle(&recorder);
        let mut session = Session {
            _claim: claim,
            device: device.clone(),
            set: Arc::new(set),
            reads: Arc::new(reads),
            chunks,
            rows,
            store,
            upload,
            readback,
            uniforms,
            bound: Arc::new(Vec::new()),
            groups: 0,
            folded: 0,
            recorder,
            hook: None,
            hook_value: Vec::new(),
            unsettled: true,
        };
        session.write_uniforms().await?;
        session.fold(cancel, events).await?;
        session.readback = ReadbackRing::new(device, session.set.table.readback).await?;
        let set = session.set.clone();
        session.store.make_static(device, &set.table).await?;
        session.bind().await?;
        session.settle(cancel, events).await?;
        Ok(session)
    }

    /// The plans.
    pub fn set(&self) -> &PlanSet {
        &self.set
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bind groups that exist.
    pub fn bind_groups(&self) -> u64 {
        self.groups
    }

    /// The segments that the device holds now.
    pub fn resident(&self) -> impl Iterator<Item = &str> {
        self.store.held.iter().flatten().map(|s| &*self.set.segments[*s as usize].name)
    }

    /// Registers what hooks call. An error from it fails the run.
    pub fn on_hook(&mut self, hook: impl FnMut(HookCall<'_>) -> Result<()> + 'static) {
        self.hook = Some(Box::new(hook));
    }

    /// Runs a plan: `inputs` by name, as bytes (f32, dense, row-major, little-endian).
    pub async fn run(
        &mut self,
        plan: usize,
        inputs: &[(&str, &[u8])],
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<Outputs> {
        let mut outputs = Outputs::default();
        self.run_into(plan, inputs, cancel, events, &mut outputs).await?;
        Ok(outputs)
    }

    /// As [`Session::run`], into outputs of an earlier run, whose memory is used again.
    pub async fn run_into(
        &mut self,
        plan: usize,
        inputs: &[(&str, &[u8])],
        cancel: &Cancel,
        events: &mut dyn EventSink,
        outputs: &mut Outputs,
    ) -> Result<()> {
        let set = self.set.clone();
        let plan_ref = set.plans.get(plan).ok_or_else(|| Error::NotFound {
            what: "plan",
            name: plan.to_string(),
            hint: Some(format!("the set has {}", set.plans.len())),
        })?;
        check_inputs(plan_ref, inputs)?;
        check_ids(plan_ref, inputs, &self.rows)?;
        self.device.check()?;
        self.settle(cancel, &mut NoEvents).await?;
        outputs.clear_for(plan_ref);
        self.unsettled = true;
        events.event(Event::RunStart { program: plan_ref.name.clone() });
        let result = self.execute(plan_ref, plan, inputs, cancel, events, outputs).await;
        match result {
            Ok(()) => {
                self.unsettled = false;
                events.event(Event::RunEnd {
                    program: plan_ref.name.clone(),
                    loads: outputs.loads,
                    evictions: outputs.evictions,
                    streamed_bytes: outputs.streamed_bytes,
                });
                Ok(())
            }
            Err(error) => {
                // Take back what the run held, so that the memory is that of before; home comes with the next run.
                self.abandon().await;
                Err(error)
            }
        }
    }

    /// Brings a session whose last run did not end back home.
    async fn settle(&mut self, cancel: &Cancel, events: &mut dyn EventSink) -> Result<()> {
        if !self.unsettled {
            return Ok(());
        }
        self.abandon().await;
        let set = self.set.clone();
        let mut ignored = Outputs::default();
        self.execute(&set.to_home, usize::MAX, &[], cancel, events, &mut ignored).await?;
        self.unsettled = false;
        Ok(())
    }

    /// The bytes of a state array (f32, dense). Between runs only.
    pub async fn read_state(&mut self, name: &str) -> Result<Vec<u8>> {
        let state = self.state(name)?;
        let mut bytes = vec![0; state.bytes as usize];
        let upload = &mut self.upload;
        let from = (self.store.buffer(state.slot, 0), 0);
        self.readback.fetch(&mut self.recorder, from, &mut bytes, &|| Ok(()), &mut |r| upload.submitted(r)).await?;
        self.device.check()?;
        Ok(bytes)
    }

    /// Sets a state array (f32, dense). Between runs only.
    pub async fn write_state(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let state = self.state(name)?;
        if bytes.len() as u64 != state.bytes {
            let reason = format!("`{name}` has {} bytes, but {} were given", state.bytes, bytes.len());
            return Err(Error::Shape { op: "write_state", reason });
        }
        self.settle(&Cancel::new(), &mut NoEvents).await?;
        let to = self.store.buffer(state.slot, 0).clone();
        self.put_all(&to, bytes).await
    }

    fn state(&self, name: &str) -> Result<StatePort> {
        let states = &self.set.states;
        states.iter().find(|s| &*s.name == name).cloned().ok_or_else(|| Error::NotFound {
            what: "state",
            name: name.into(),
            hint: Some(format!("there are {:?}", states.iter().map(|s| &*s.name).collect::<Vec<_>>())),
        })
    }

    /// Goes over to another set, one with a program more for instance: state arrays that both name keep their
    /// content. The new set's plans are verified before anything of the old one is given up.
    pub async fn adopt(mut self, catalog: &Catalog, set: PlanSet) -> Result<Session> {
        check_catalog(&set, catalog)?;
        verify_all(&set, &self.device)?;
        let mut carried = Vec::new();
        for state in self.set.states.clone().iter().filter(|s| !s.scratch) {
            match set.states.iter().find(|s| s.name == state.name) {
                Some(new) if new.bytes != state.bytes => {
                    let reason = format!("`{}` has {} bytes here and {} there", state.name, state.bytes, new.bytes);
                    return Err(Error::Shape { op: "adopt", reason });
                }
                Some(_) => carried.push((state.name.clone(), self.read_state(&state.name).await?)),
                None => {}
            }
        }
        let (device, hook) = (self.device.clone(), self.hook.take());
        // Folds that the new set has as well are held over, so that they are found and not made again.
        let same = self.set.folds.iter().map(|f| &f.key).eq(set.folds.iter().map(|f| &f.key));
        let held: Vec<_> = self.set.folds.iter().filter(|_| same).map(|f| self.store.shared(f.slot)).collect();
        drop(self);
        let mut session = Session::new(&device, catalog, set).await?;
        drop(held);
        for (name, bytes) in carried {
            session.write_state(&name, &bytes).await?;
        }
        session.hook = hook;
        Ok(session)
    }

    async fn abandon(&mut self) {
        self.recorder.discard();
        self.upload.reset(&self.recorder).await;
        self.readback.reset();
        self.store.forget(&self.set.table);
    }

    /// Computes the folded constants, unless a session of this device holds them all.
    async fn fold(&mut self, cancel: &Cancel, events: &mut dyn EventSink) -> Result<()> {
        let set = self.set.clone();
        if set.folds.is_empty() {
            return Ok(());
        }
        let mut slots: Vec<SlotId> = set.folds.iter().map(|f| f.slot).collect();
        slots.dedup();
        // A slot is known by the folds in it: the same ones lie in the same places.
        let key = |slot: SlotId| -> String {
            set.folds.iter().filter(|f| f.slot == slot).map(|f| format!("{}@{};", f.key, f.offset)).collect()
        };
        let found: Vec<_> = slots.iter().filter_map(|s| Some((*s, self.device.folds().find(&key(*s))?))).collect();
        if found.len() == slots.len() {
            found.into_iter().for_each(|(slot, buffers)| self.store.share(slot, buffers));
            return Ok(());
        }
        drop(found);
        self.bound = Arc::new(vec![self.bind_plan(&set.prologue, None).await?]);
        let mut ignored = Outputs::default();
        self.execute(&set.prologue, 0, &[], cancel, events, &mut ignored).await?;
        self.folded = set.folds.len() as u64;
        for slot in slots {
            self.device.folds().keep(key(slot), &self.store.shared(slot));
        }
        Ok(())
    }

    /// Constants that this session computed itself when it began; the others were there.
    pub fn folded(&self) -> u64 {
        self.folded
    }

    /// Makes pipelines and, for dispatches over static slots, bind groups; equal ones once.
    async fn bind(&mut self) -> Result<()> {
        let set = self.set.clone();
        let mut known = HashMap::new();
        let mut all = Vec::new();
        for plan in &set.plans {
            all.push(self.bind_plan(plan, Some(&mut known)).await?);
        }
        self.groups = known.len() as u64;
        self.bound = Arc::new(all);
        self.device.check()
    }

    /// The pipelines of a plan's dispatches and, with `known`, their bind groups. Where slots come and go, groups are
    /// made at the dispatch.
    async fn bind_plan(&self, plan: &Plan, mut known: Option<&mut Groups>) -> Result<Vec<Bound>> {
        let set = &self.set;
        let mut bound = Vec::new();
        for action in &plan.actions {
            let Action::Dispatch { kernel, bindings, .. } = action else { continue };
            let pipeline = self.device.pipeline(kernel).await?;
            let fixed = bindings.iter().all(|b| !set.table.slots[b.slot.0 as usize].dynamic);
            let group = known.as_deref_mut().filter(|_| fixed).map(|known| {
                let place = |b: &Binding| Binding { content: Content::Value(crate::graph::Tensor(0)), ..*b };
                let key = (kernel.shader.name, bindings.iter().map(place).collect());
                known.entry(key).or_insert_with(|| Arc::new(self.group(&pipeline, kernel.shader, bindings))).clone()
            });
            bound.push(Bound { pipeline, group });
        }
        Ok(bound)
    }

    fn group(&self, pipeline: &Pipeline, shader: &ebbtide_shaders::Shader, bindings: &[Binding]) -> wgpu::BindGroup {
        let range = |buffer, offset, size| {
            wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size: std::num::NonZeroU64::new(size) })
        };
        let mut entries = Vec::with_capacity(bindings.len() + 1);
        if let Some(uniforms) = &self.uniforms {
            entries.push(wgpu::BindGroupEntry {
                binding: 0,
                resource: range(uniforms.raw(), 0, u64::from(shader.params_size)),
            });
        }
        for (b, s) in bindings.iter().zip(shader.bindings) {
            let buffer = self.store.buffer(b.slot, b.buffer);
            entries.push(wgpu::BindGroupEntry { binding: s.binding, resource: range(buffer, b.offset, b.size) });
        }
        let descriptor =
            wgpu::BindGroupDescriptor { label: Some(shader.name), layout: &pipeline.layout, entries: &entries };
        foreign(|| self.device.raw().create_bind_group(&descriptor))
    }

    /// The parameter blocks go to the device once, through the ring like everything else.
    async fn write_uniforms(&mut self) -> Result<()> {
        let set = self.set.clone();
        match self.uniforms.as_ref().map(|u| u.raw().clone()) {
            Some(uniforms) => self.put_all(&uniforms, &set.uniforms).await,
            None => Ok(()),
        }
    }

    /// Host bytes into a buffer, outside of any run.
    async fn put_all(&mut self, to: &wgpu::Buffer, bytes: &[u8]) -> Result<()> {
        let chunk = self.upload.chunk();
        for (i, bytes) in bytes.chunks(chunk as usize).enumerate() {
            let part = Part { action: 0, part: i as u32, len: bytes.len() as u32 };
            while !self.upload.put(&self.recorder, part, bytes)? {
                self.free_a_chunk(&|| Ok(())).await?;
            }
            self.upload.record(&mut self.recorder, (to, i as u64 * chunk))?;
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        self.recorder.submit()?;
        self.upload.submitted(&self.recorder);
        Ok(())
    }

    /// Lets time pass until the ring may have an idle chunk.
    async fn free_a_chunk(&mut self, stop: &dyn Fn() -> Result<()>) -> Result<()> {
        stop()?;
        if self.upload.has_recorded() {
            self.flush()?;
        }
        if let Some(mapping) = self.upload.mapping() {
            self.recorder.not_refused(&mapping).await?;
        }
        let epoch = self.upload.waits_for().unwrap_or(0);
        self.recorder.pump(epoch, true).await
    }
}

/// Fails unless the set was compiled with this catalog's files: its plans name ranges of them.
fn check_catalog(set: &PlanSet, catalog: &Catalog) -> Result<()> {
    if set.catalog == catalog.fingerprint() {
        return Ok(());
    }
    let reason = "the set was compiled with another one: compile the programs with the catalog that the session reads";
    Err(Error::Invalid { what: "catalog".into(), reason: reason.into() })
}

/// Verifies every plan of a set, its prologue and the way home.
fn verify_all(set: &PlanSet, device: &Device) -> Result<()> {
    verify_prologue(set, device.caps())?;
    for plan in &set.plans {
        verify(plan, set, device.caps(), true)?;
    }
    verify(&set.to_home, set, device.caps(), false)
}

fn check_inputs(plan: &Plan, inputs: &[(&str, &[u8])]) -> Result<()> {
    for port in &plan.inputs {
        let given = inputs.iter().find(|(name, _)| **name == *port.name);
        let Some((_, bytes)) = given else {
            return Err(Error::NotFound {
                what: "input",
                name: port.name.to_string(),
                hint: Some(format!("program `{}` needs it, of shape {}", plan.name, port.shape)),
            });
        };
        if bytes.len() as u64 != port.bytes {
            return Err(Error::Shape {
                op: "input",
                reason: format!(
                    "`{}` has {} bytes, but shape {} in f32 has {}",
                    port.name,
                    bytes.len(),
                    port.shape,
                    port.bytes
                ),
            });
        }
    }
    match inputs.iter().find(|(name, _)| !plan.inputs.iter().any(|p| &*p.name == *name)) {
        Some((name, _)) => Err(Error::NotFound {
            what: "input",
            name: name.to_string(),
            hint: Some(format!(
                "program `{}` has {:?}",
                plan.name,
                plan.inputs.iter().map(|p| &*p.name).collect::<Vec<_>>()
            )),
        }),
        None => Ok(()),
    }
}

/// The way of every segment through the ring: for each chunk of a slot's image, the reads that fill it.
fn chunk_table(catalog: &Catalog, set: &PlanSet) -> Result<(Reads, Vec<Vec<Chunk>>)> {
    let mut reads = Vec::new();
    let mut all = Vec::with_capacity(set.segments.len());
    let size = set.table.upload.chunk;
    for layout in &set.segments {
        let mut chunks = Vec::new();
        for (buffer, used) in layout.buffers.iter().enumerate() {
            let mut offset = 0;
            while offset < *used {
                let end = used.min(&(offset + size)).to_owned();
                let first = reads.len() as u32;
                for place in layout.places.iter().filter(|p| p.buffer as usize == buffer) {
                    let (from, to) = (place.offset.max(offset), (place.offset + place.bytes).min(end));
                    if from < to {
                        let weight = catalog.weight(place.weight);
                        let piece = weight.pieces.get(place.piece as usize).ok_or_else(|| Error::NotFound {
                            what: "weight piece",
                            name: weight.name().into(),
                            hint: None,
                        })?;
                        reads.push(Read {
                            source: weight.source as u32,
                            at: piece.range.start + (from - place.offset),
                            to: (from - offset) as u32,
                            len: (to - from) as u32,
                        });
                    }
                }
                chunks.push(Chunk {
                    buffer: buffer as u32,
                    offset,
                    len: (end - offset) as u32,
                    reads: first..reads.len() as u32,
                });
                offset = end;
            }
        }
        all.push(chunks);
    }
    Ok((Reads { sources: catalog.sources().to_vec(), reads }, all))
}

/// Where a run is: the cursor of the ring and what has been recorded.
struct Progress {
    /// Next entry of the plan's fills, and the part of it.
    fill: usize,
    part: u32,
    /// Entries of `fills` that are complete, in order.
    complete: usize,
    parts_done: u32,
    /// The load of rows whose reads are listed.
    listed: Option<u32>,
    /// Action being executed.
    at: usize,
}

mod execute;
mod rows;
