//! Re-simulates a plan, independently of the passes that made it.
//!
//! Runs for every plan, in release too. It knows nothing of liveness, Belady or step numbers: it walks the actions
//! with a picture of what each buffer holds, and re-adds the memory from the table. A defect of the planner ends
//! here, before any GPU work.

use std::collections::BTreeMap;

use super::PlanSet;
use super::plan::{Action, Binding, Breakdown, Category, Content, Plan, SlotId};
use crate::caps::{ALIGN, Caps, MAX_WEIGHT_BUFFER};
use crate::error::{Error, Result};

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Nothing,
    Segment(u32),
    /// A load is writing it.
    Filling(u32),
    Value(crate::graph::Tensor),
    /// A state array, for ever.
    State(u32),
    /// Folded constants, for ever.
    Folds,
}

struct Simulation<'a> {
    set: &'a PlanSet,
    caps: &'a Caps,
    held: Vec<Held>,
    /// Dynamic slots that exist now.
    alive: Vec<bool>,
    /// Open loads by the action that ends their window.
    windows: BTreeMap<u32, Vec<(SlotId, u32)>>,
    live: u64,
    at: usize,
    updates_from: usize,
    /// Which folded constants are computed.
    folded: Vec<bool>,
    prologue: bool,
}

/// Checks a plan of a set. `home_at_entry` is false for the one plan that begins with empty slots.
///
/// Every read is resident, written before and not evicted; nothing touches a slot inside a load's window; no written
/// range overlaps another binding of its dispatch; bindings, alignments, sizes and grids are within the caps; the plan
/// begins and ends at home; the sum of the table is within the budget and is what was planned.
pub fn verify(plan: &Plan, set: &PlanSet, caps: &Caps, home_at_entry: bool) -> Result<()> {
    let entry = if home_at_entry { Entry::Home } else { Entry::Empty };
    simulate(plan, set, caps, entry)
}

/// As [`verify`], for the set's prologue: it begins with nothing but rings, parameters and the folds' own slots, and
/// ends with every folded constant computed and nothing else on the device.
pub fn verify_prologue(set: &PlanSet, caps: &Caps) -> Result<()> {
    if set.folds.is_empty() { Ok(()) } else { simulate(&set.prologue, set, caps, Entry::Prologue) }
}

/// What a plan finds when it begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Home,
    Empty,
    Prologue,
}

fn simulate(plan: &Plan, set: &PlanSet, caps: &Caps, entry: Entry) -> Result<()> {
    let table = &set.table;
    let prologue = entry == Entry::Prologue;
    // Before the prologue nothing but rings and parameters exists; after it, the folds.
    let exists = |s: &super::Slot| !s.dynamic && !prologue;
    let remains = |s: &super::Slot| !s.dynamic && (!prologue || s.category == Category::Folded);
    let mut sim = Simulation {
        set,
        caps,
        held: vec![Held::Nothing; table.slots.len()],
        alive: table.slots.iter().map(exists).collect(),
        windows: BTreeMap::new(),
        live: 0,
        at: 0,
        updates_from: plan.updates_from as usize,
        folded: vec![!prologue; set.folds.len()],
        prologue,
    };
    for fold in &set.folds {
        let size = sim.slot(fold.slot)?.bytes();
        sim.check(fold.offset + fold.bytes <= size, || format!("the fold `{}` does not fit its slot", fold.name))?;
        sim.held[fold.slot.index()] = Held::Folds;
    }
    for (i, state) in set.states.iter().enumerate() {
        let size = sim.slot(state.slot)?.bytes();
        sim.check(size >= state.bytes, || format!("state `{}` does not fit its slot", state.name))?;
        sim.held[state.slot.index()] = Held::State(i as u32);
    }
    let mut sum = Breakdown::default();
    for slot in &table.slots {
        for bytes in &slot.buffers {
            sim.check(*bytes > 0, || "a slot has a buffer of no bytes".into())?;
            sim.check(*bytes <= caps.max_buffer, || format!("a buffer of {bytes} bytes is above the adapter's limit"))?;
            if slot.category == Category::Weights {
                sim.check(*bytes <= MAX_WEIGHT_BUFFER, || {
                    format!("a weight buffer of {bytes} bytes is above 128 MiB")
                })?;
            }
            if exists(slot) {
                sum.add(slot.category, *bytes);
            }
        }
    }
    sum.add(Category::Upload, table.upload.chunk * u64::from(table.upload.chunks));
    // Folding reads nothing back.
    if !prologue {
        sum.add(Category::Readback, table.readback.chunk * u64::from(table.readback.chunks));
    }
    sum.add(Category::Uniforms, table.uniforms);
    for (chunk, chunks) in [(table.upload.chunk, table.upload.chunks), (table.readback.chunk, table.readback.chunks)] {
        sim.check(chunk > 0 && chunk % 4 == 0 && chunks > 0, || "a ring has no usable chunk".into())?;
    }
    let fixed = sum.total();

    sim.check(table.uniforms == set.uniforms.len() as u64, || {
        "the uniform buffer is not as large as its content".into()
    })?;
    for (slot, _) in &set.home {
        sim.slot(*slot)?;
    }
    if entry == Entry::Home {
        for (slot, segment) in &set.home {
            sim.held[slot.index()] = Held::Segment(*segment);
        }
    }
    let mut peak = fixed;
    let mut ring_order = Vec::new();
    for (i, action) in plan.actions.iter().enumerate() {
        sim.at = i;
        sim.close_windows(i as u32)?;
        let updating = i >= sim.updates_from;
        sim.check(!updating || matches!(action, Action::Dispatch { .. } | Action::Evict { .. }), || {
            "something that can fail comes after the first update".into()
        })?;
        sim.check(!updating || sim.windows.is_empty(), || "a load's window reaches into the updates".into())?;
        sim.step(plan, action)?;
        if let Action::Load { by, .. } = action {
            ring_order.push((*by, i as u32));
        } else if matches!(action, Action::Upload { .. } | Action::LoadRows { .. }) {
            ring_order.push((i as u32, i as u32));
        }
        peak = peak.max(fixed + sim.live);
    }
    sim.at = plan.actions.len();
    sim.close_windows(plan.actions.len() as u32)?;
    sim.check(sim.windows.is_empty(), || "a load's window ends after the plan".into())?;
    sim.check(sim.folded.iter().all(|done| *done), || "a folded constant is never computed".into())?;
    for (slot, segment) in set.home.iter().filter(|_| !prologue) {
        let held = sim.held[slot.index()];
        sim.check(held == Held::Segment(*segment), || format!("slot {} is not at home at the end: {held:?}", slot.0))?;
    }
    sim.check(table.slots.iter().zip(&sim.alive).all(|(s, alive)| *alive == remains(s)), || {
        "a dynamic slot outlives the plan".into()
    })?;
    ring_order.sort_unstable();
    sim.check(ring_order.iter().map(|(_, i)| *i).eq(plan.fills.iter().copied()), || {
        "the ring's order is not that of the actions that need the bytes".into()
    })?;
    sim.check(peak <= set.budget, || format!("the peak of {peak} bytes is above the budget of {}", set.budget))?;
    sim.check(peak <= set.planned_peak() && fixed <= set.planned_peak(), || {
        format!("the table adds up to {peak} bytes, but {} were planned", set.planned_peak())
    })?;
    // Plans that make no slot have one peak, the sum of the table; only a prologue may have set a higher one.
    if !prologue && !set.options.keep_free_0 {
        let by_prologue = sum.total() < set.planned_peak() && prologue_peak(set) == set.planned_peak();
        sim.check(sum == set.planned || by_prologue, || {
            format!("the table adds up to {sum:?}, but {:?} was planned", set.planned)
        })?;
    }
    Ok(())
}

/// The prologue's greatest sum, added up from its actions.
fn prologue_peak(set: &PlanSet) -> u64 {
    let table = &set.table;
    let ring = table.upload.chunk * u64::from(table.upload.chunks);
    let (mut live, mut peak) = (ring + table.uniforms, 0);
    for action in &set.prologue.actions {
        let bytes = |slot: &SlotId| table.slots.get(slot.index()).map_or(0, super::Slot::bytes);
        match action {
            Action::Alloc { slot } => live += bytes(slot),
            Action::Free { slot } => live = live.saturating_sub(bytes(slot)),
            _ => {}
        }
        peak = peak.max(live);
    }
    peak
}

impl Simulation<'_> {
    fn check(&self, holds: bool, reason: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(Error::Plan { action: self.at, reason: reason() }) }
    }

    /// Windows that end before this action: from here on the slot holds its segment.
    fn close_windows(&mut self, now: u32) -> Result<()> {
        while let Some(entry) = self.windows.first_entry() {
            if *entry.key() > now {
                break;
            }
            for (slot, segment) in entry.remove() {
                let held = self.held[slot.index()];
                self.check(held == Held::Filling(segment), || {
                    format!("slot {} changed inside a load's window", slot.0)
                })?;
                self.held[slot.index()] = Held::Segment(segment);
            }
        }
        Ok(())
    }

    fn slot(&self, slot: SlotId) -> Result<&super::Slot> {
        self.set
            .table
            .slots
            .get(slot.index())
            .ok_or_else(|| Error::Plan { action: self.at, reason: format!("slot {} does not exist", slot.0) })
    }

    fn step(&mut self, plan: &Plan, action: &Action) -> Result<()> {
        match action {
            Action::Load { segment, slot, by, .. } => {
                let layout = self.set.segments.get(*segment as usize);
                let buffers = &self.slot(*slot)?.buffers;
                let fits = layout.is_some_and(|l| {
                    l.buffers.len() <= buffers.len() && l.buffers.iter().zip(buffers).all(|(need, have)| need <= have)
                });
                self.check(fits, || format!("segment #{segment} does not fit slot {}", slot.0))?;
                self.check(self.alive[slot.index()], || format!("slot {} does not exist yet", slot.0))?;
                let held = self.held[slot.index()];
                self.check(held == Held::Nothing, || format!("slot {} is loaded while it holds {held:?}", slot.0))?;
                self.check(*by as usize > self.at, || "a load's window ends before it begins".into())?;
                self.held[slot.index()] = Held::Filling(*segment);
                self.windows.entry(*by).or_default().push((*slot, *segment));
            }
            Action::Evict { segment, slot, .. } => {
                self.slot(*slot)?;
                let held = self.held[slot.index()];
                self.check(held == Held::Segment(*segment), || {
                    format!("segment #{segment} is evicted from slot {}, which holds {held:?}", slot.0)
                })?;
                self.held[slot.index()] = Held::Nothing;
            }
            Action::Alloc { slot } => {
                let bytes = self.slot(*slot)?.bytes();
                self.check(!self.alive[slot.index()], || format!("slot {} is made twice", slot.0))?;
                self.alive[slot.index()] = true;
                self.live += bytes;
            }
            Action::Free { slot } => {
                let (dynamic, bytes) = (self.slot(*slot)?.dynamic, self.slot(*slot)?.bytes());
                self.check(dynamic && self.alive[slot.index()], || format!("slot {} cannot be freed", slot.0))?;
                let held = self.held[slot.index()];
                let unused = matches!(held, Held::Nothing | Held::Value(_));
                self.check(unused, || format!("slot {} is freed while it holds {held:?}", slot.0))?;
                self.held[slot.index()] = Held::Nothing;
                self.alive[slot.index()] = false;
                self.live -= bytes;
            }
            Action::Dispatch { kernel, bindings, params, grid, .. } => {
                let shader = kernel.shader;
                self.check(bindings.len() == shader.bindings.len(), || {
                    format!("`{}` has {} bindings, not {}", shader.name, shader.bindings.len(), bindings.len())
                })?;
                self.check(bindings.len() <= self.caps.max_storage_buffers as usize, || {
                    format!("{} storage bindings", bindings.len())
                })?;
                let end = u64::from(*params) + u64::from(shader.params_size);
                self.check(
                    u64::from(*params) % self.caps.uniform_align.max(ALIGN) == 0 && end <= self.set.table.uniforms,
                    || format!("parameters at {params} are misplaced"),
                )?;
                self.check(grid.iter().all(|g| *g > 0 && *g <= self.caps.max_groups), || {
                    format!("a grid of {grid:?} workgroups")
                })?;
                let invocations: u32 = shader.workgroup_size.iter().product();
                self.check(
                    invocations <= self.caps.max_invocations && shader.workgroup_bytes <= self.caps.max_workgroup_bytes,
                    || format!("workgroups of `{}` are too large", shader.name),
                )?;
                for (i, b) in bindings.iter().enumerate() {
                    self.check(b.write == (shader.bindings[i].access == ebbtide_shaders::Access::ReadWrite), || {
                        format!("binding {i} of `{}` has the wrong access", shader.name)
                    })?;
                    self.place(b)?;
                    for other in &bindings[..i] {
                        let same = (b.slot, b.buffer) == (other.slot, other.buffer);
                        // One buffer cannot be read and written in one dispatch, not even at disjoint ranges.
                        self.check(!(same && (b.write || other.write)), || {
                            format!("bindings of `{}` read and write one buffer of slot {}", shader.name, b.slot.0)
                        })?;
                    }
                }
                for b in bindings.iter().filter(|b| !b.write) {
                    self.read(b)?;
                }
                for b in bindings.iter().filter(|b| b.write) {
                    self.write(b)?;
                }
            }
            Action::Upload { input, to } => {
                let port = plan.inputs.get(*input as usize);
                self.check(port.is_some_and(|p| p.bytes == to.size), || format!("input {input} does not fit"))?;
                self.place(to)?;
                self.write(to)?;
            }
            Action::LoadRows { input, to, .. } => {
                self.check((*input as usize) < plan.inputs.len(), || format!("input {input} does not exist"))?;
                self.place(to)?;
                self.write(to)?;
            }
            Action::Download { output, from } => {
                let port = plan.outputs.get(*output as usize);
                self.check(port.is_some_and(|p| p.bytes == from.size), || format!("output {output} does not fit"))?;
                self.place(from)?;
                self.read(from)?;
            }
            Action::Hook { value, .. } => {
                if let Some(b) = value {
                    self.place(b)?;
                    self.read(b)?;
                }
            }
        }
        Ok(())
    }

    /// A binding lies within its buffer and the caps, and where its content belongs.
    fn place(&self, b: &Binding) -> Result<()> {
        let slot = self.slot(b.slot)?;
        self.check(self.alive[b.slot.index()], || format!("slot {} does not exist now", b.slot.0))?;
        let size = slot.buffers.get(b.buffer as usize).copied().unwrap_or(0);
        self.check(b.size > 0 && b.size.is_multiple_of(4), || format!("a binding of {} bytes", b.size))?;
        self.check(b.offset.is_multiple_of(self.caps.storage_align.max(ALIGN)), || {
            format!("a binding at offset {}", b.offset)
        })?;
        self.check(b.offset.checked_add(b.size).is_some_and(|end| end <= size), || {
            format!("a binding of {} bytes at {} in a buffer of {size}", b.size, b.offset)
        })?;
        self.check(b.size <= self.caps.max_binding, || {
            format!("a binding of {} bytes is above the adapter's limit", b.size)
        })?;
        if let Content::Folded(i) = b.content {
            let fold = self.set.folds.get(i as usize);
            let right =
                fold.is_some_and(|f| (f.slot, f.offset, f.bytes) == (b.slot, b.offset, b.size) && b.buffer == 0);
            self.check(right, || format!("the fold #{i} is looked for in the wrong place"))?;
        }
        if let Content::Weight { segment, weight, piece } = b.content {
            let place = self.set.segments.get(segment as usize).and_then(|s| s.place(weight, piece));
            let right = place
                .is_some_and(|p| (p.buffer, p.offset) == (b.buffer, b.offset) && p.bytes.next_multiple_of(4) == b.size);
            self.check(right, || format!("a weight of segment #{segment} is looked for in the wrong place"))?;
        }
        Ok(())
    }

    fn read(&self, b: &Binding) -> Result<()> {
        let held = self.held[b.slot.index()];
        let right = match b.content {
            Content::Weight { segment, .. } => held == Held::Segment(segment),
            Content::Value(t) => held == Held::Value(t),
            Content::State(i) => held == Held::State(i),
            Content::Folded(i) => held == Held::Folds && self.folded.get(i as usize) == Some(&true),
        };
        self.check(right, || format!("slot {} is read for {:?} but holds {held:?}", b.slot.0, b.content))
    }

    fn write(&mut self, b: &Binding) -> Result<()> {
        let held = self.held[b.slot.index()];
        if let Content::State(i) = b.content {
            let free = self.at >= self.updates_from || self.set.states.get(i as usize).is_some_and(|s| s.scratch);
            self.check(held == Held::State(i), || {
                format!("state #{i} is written in slot {}, which holds {held:?}", b.slot.0)
            })?;
            return self.check(free, || format!("state #{i} is written before the updates"));
        }
        if let Content::Folded(i) = b.content {
            self.check(self.prologue && held == Held::Folds, || {
                format!("the fold #{i} is written after the prologue")
            })?;
            self.folded[i as usize] = true;
            return Ok(());
        }
        let Content::Value(t) = b.content else {
            return Err(Error::Plan { action: self.at, reason: "a weight is written".into() });
        };
        self.check(!matches!(held, Held::Filling(_) | Held::Segment(_) | Held::State(_) | Held::Folds), || {
            format!("slot {} is written while it holds {held:?}", b.slot.0)
        })?;
        self.held[b.slot.index()] = Held::Value(t);
        Ok(())
    }
}
