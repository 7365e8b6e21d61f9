//! From programs and a budget to verified plans.
//!
//! ```text
//! programs ─► steps (kernels, live nodes only) ─► slots ─► residency within the budget ─► plans ─► verify
//! ```
//!
//! Everything here is pure. Acceptance is monotone: the floor is the sum of one defined slot table, a budget is
//! refused if and only if it is below that number, and above it the planner only adds.

mod budget;
mod fold;
mod plan;
mod residency;
mod slots;
mod steps;
mod verify;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

pub use budget::Budget;
pub use fold::{CompileReport, Stage};
pub use plan::{
    Action, Binding, Breakdown, Category, Content, FoldPort, Kernel, Place, Plan, Port, Ring, SegmentLayout, Slot, SlotId,
    SlotTable, StatePort,
};
pub use verify::{verify, verify_prologue};

use serde::Serialize;

use crate::caps::{ALIGN, Caps};
use crate::error::{Bytes, Error, Result};
use crate::event::Pass;
use crate::graph::{Program, Tensor};
use crate::weights::Catalog;
use residency::{Home, Need, Residence, WeightSlot};
use steps::{Step, StepKind};

/// The readback ring at the floor.
const FLOOR_READBACK: Ring = Ring { chunk: 4 << 10, chunks: 1 };
/// Folds up to this size share a slot.
const SMALL_FOLD: u64 = 64 << 10;
/// The shared slot is closed beyond this size.
const MAX_SHARED: u64 = 16 << 20;
/// Largest chunk of a ring.
const MAX_CHUNK: u64 = 16 << 20;
/// Most chunks of a ring.
const MAX_CHUNKS: u32 = 3;

/// Whether the values of marked blocks are kept for the backward pass or computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Kept where the budget holds everything with them, else computed again.
    #[default]
    Auto,
    /// Computed again.
    On,
    /// Kept; the floor is higher.
    Off,
}

/// How programs are lowered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// What becomes of the values of marked blocks. The results have the same bits.
    pub recompute: Recompute,
    /// The set runs one plan once: nothing is resident before or after it.
    pub once: bool,
    /// Compute constants in every step instead of once.
    pub no_fold: bool,
    /// `keep_free: 0`: weight slots are made before each load and really destroyed after each eviction.
    pub keep_free_0: bool,
}

/// Plans compiled together over one slot table.
#[derive(Clone, Debug)]
pub struct PlanSet {
    /// The plans, one a program, in the order given.
    pub plans: Vec<Plan>,
    /// From nothing to home: runs when a session begins, and after a step that failed.
    pub to_home: Plan,
    /// All device memory.
    pub table: SlotTable,
    /// The segments, with their layout.
    pub segments: Vec<SegmentLayout>,
    /// The state arrays.
    pub states: Vec<StatePort>,
    /// The folded constants.
    pub folds: Vec<FoldPort>,
    /// Computes the folded constants; runs once, before the other slots are made.
    pub prologue: Plan,
    /// What compiling does to the constants.
    pub report: CompileReport,
    /// Content of the uniform buffer.
    pub uniforms: Vec<u8>,
    /// Content of weight slots at home: (slot, segment).
    pub home: Vec<(SlotId, u32)>,
    /// Planned peak by category: the sum of the table (with `keep_free: 0`, its greatest value).
    pub planned: Breakdown,
    /// The bytes that may be used.
    pub budget: u64,
    /// The least budget that can be kept.
    pub floor: u64,
    /// What sets the floor.
    pub floor_set_by: String,
    /// The bytes with everything resident.
    pub all: u64,
    /// Weight bytes touched.
    pub weight_bytes: u64,
    /// Weight bytes held by resident segments.
    pub resident_bytes: u64,
    /// Whether block values are computed again in the backward pass.
    pub recomputes: bool,
    /// The options it was compiled with.
    pub options: Options,
}

impl PlanSet {
    /// Planned peak in bytes.
    pub fn planned_peak(&self) -> u64 {
        self.planned.total()
    }

    /// Weight bytes that one run of a plan copies to the device.
    pub fn streamed_bytes(&self, plan: usize) -> u64 {
        let loads = self.plans.get(plan).map(|p| p.actions.as_slice()).unwrap_or_default();
        loads
            .iter()
            .map(|a| match a {
                Action::Load { segment, .. } => self.segments[*segment as usize].bytes,
                _ => 0,
            })
            .sum()
    }
}

/// Compiles programs for a budget. Pure: no GPU, no weight byte is read. Refuses a budget below the floor.
pub fn compile(programs: &[Program], catalog: &Catalog, caps: &Caps, budget: Budget) -> Result<PlanSet> {
    compile_with(programs, catalog, caps, budget, Options::default())
}

/// As [`compile`], with options.
pub fn compile_with(
    programs: &[Program],
    catalog: &Catalog,
    caps: &Caps,
    budget: Budget,
    options: Options,
) -> Result<PlanSet> {
    if programs.is_empty() {
        return Err(Error::Invalid { what: "programs".into(), reason: "there are none to compile".into() });
    }
    let kept: Vec<&Program> = programs.iter().map(|p| p.kept.as_deref().unwrap_or(p)).collect();
    let again: Vec<&Program> = programs.iter().collect();
    let has_blocks = programs.iter().any(|p| p.kept.is_some());
    let (first, second) = match options.recompute {
        Recompute::Off => (kept, None),
        Recompute::On => (again, None),
        Recompute::Auto => (again, has_blocks.then_some(kept)),
    };
    let lean = Candidate::new(first, catalog, caps)?;
    let rich = second.map(|p| Candidate::new(p, catalog, caps)).transpose()?;
    // The floor is the lean one's; everything resident means everything, kept values too.
    let all = rich.as_ref().map_or(lean.all, |r| r.all.max(lean.all));
    let bytes = budget.resolve(lean.floor, lean.base, lean.shape.touched, all);
    if bytes < lean.floor {
        let set_by = lean.lowering.floor_set_by(&lean.shape);
        return Err(Error::BudgetBelowFloor { asked: Bytes(bytes), floor: Bytes(lean.floor), set_by });
    }
    let floor = lean.floor;
    let recomputes = has_blocks && options.recompute != Recompute::Off && rich.as_ref().is_none_or(|r| bytes < r.all);
    let chosen = match rich {
        Some(rich) if !recomputes => rich,
        _ => lean,
    };
    let Candidate { mut lowering, shape, base, .. } = chosen;
    let set_by = lowering.floor_set_by(&shape);
    let residence = shape.reside(bytes - base);
    let limits = Limits { budget: bytes, floor, all, base, touched: shape.touched, set_by, recomputes, unlimited: false };
    // Everything resident includes what compiling needs.
    let limits = Limits { unlimited: budget == Budget::All, ..limits };
    let mut folded_set = None;
    let mut reasons = fold::Folding::default();
    for growth in [fold::GROWTH, 0] {
        if folded_set.is_none() && !(options.once || options.keep_free_0 || options.no_fold) {
            let folding = find_folds(&lowering, &shape, &residence, catalog, growth);
            folded_set = folded(&lowering, &folding, &residence, catalog, caps, &limits, options)?;
            reasons = folding;
        }
    }
    let set = match folded_set {
        Some(set) => set,
        None => {
            let mut set = lowering.finish(&shape, residence, limits, options)?;
            set.report.skipped = reasons.skipped;
            let unmade = reasons.folds.into_iter().map(|f| (f.name, "the budget does not hold it while compiling".into()));
            set.report.skipped.extend(unmade);
            set
        }
    };
    verify_prologue(&set, caps)?;
    for (i, plan) in set.plans.iter().chain([&set.to_home]).enumerate() {
        let home_at_entry = i < set.plans.len();
        verify(plan, &set, caps, home_at_entry)?;
    }
    Ok(set)
}

/// One way to lower the programs, with the sums that decide about budgets.
struct Candidate<'a> {
    lowering: Lowering<'a>,
    shape: WeightsShape,
    base: u64,
    floor: u64,
    all: u64,
}

impl<'a> Candidate<'a> {
    fn new(programs: Vec<&'a Program>, catalog: &Catalog, caps: &Caps) -> Result<Candidate<'a>> {
        let lowering = Lowering::new(programs, catalog, caps)?;
        let shape = lowering.weights_shape();
        let base = lowering.base_bytes(shape.floor_ring());
        let floor = base + shape.floor_slots();
        let (mut upload, mut readback, mut room) = (shape.floor_ring(), FLOOR_READBACK, u64::MAX);
        grow(&mut upload, &mut room, shape.largest().iter().sum());
        grow(&mut readback, &mut room, lowering.largest_output());
        let all = base + shape.all_slots() + (u64::MAX - room);
        Ok(Candidate { lowering, shape, base, floor, all })
    }
}

/// The constants that may be computed once: those of weights that stay.
fn find_folds(
    lowering: &Lowering<'_>,
    shape: &WeightsShape,
    residence: &Residence,
    catalog: &Catalog,
    growth: u64,
) -> fold::Folding {
    let resident = |id: crate::weights::WeightId| {
        shape.used().all(|s| {
            residence.pinned.contains(&s) && !shape.by_hand.contains(&s)
                || lowering.segments[s as usize].places.iter().all(|p| p.weight != id)
        })
    };
    let lives: Vec<Vec<bool>> = lowering.programs.iter().map(|p| steps::live(p)).collect();
    fold::analyse(&lowering.programs, &lives, catalog, &resident, growth)
}

/// The set with its constants folded, if there are any and the budget holds them.
fn folded(
    lowering: &Lowering<'_>,
    folding: &fold::Folding,
    residence: &Residence,
    catalog: &Catalog,
    caps: &Caps,
    limits: &Limits,
    options: Options,
) -> Result<Option<PlanSet>> {
    if folding.folds.is_empty() {
        return Ok(None);
    }
    let rewritten = folding.rewrite(&lowering.programs);
    let prologue = folding.program(&lowering.programs, catalog)?;
    let mut second = Lowering::with_folds(rewritten.iter().collect(), Some((folding, &prologue)), catalog, caps)?;
    let shape2 = second.weights_shape();
    let pinned: BTreeSet<_> = residence.pinned.iter().map(|s| lowering.segments[*s as usize].segment.id).collect();
    let streaming = if shape2.used().all(|s| pinned.contains(&second.segments[s as usize].segment.id)) {
        residence.streaming.min(shape2.by_hand.len() as u32)
    } else {
        residence.streaming
    };
    let pinned = (0..second.segments.len() as u32).filter(|s| pinned.contains(&second.segments[*s as usize].segment.id));
    let used: BTreeSet<u32> = shape2.used().collect();
    let residence2 = Residence { pinned: pinned.filter(|s| used.contains(s)).collect(), streaming };
    let base = second.base_bytes(shape2.floor_ring());
    let unlimited = limits.unlimited;
    let limits = Limits { base, set_by: limits.set_by.clone(), ..*limits };
    let mut set = second.finish(&shape2, residence2, limits, options)?;
    if unlimited {
        set.budget = set.budget.max(set.planned_peak());
        set.all = set.budget;
    }
    Ok((set.planned_peak() <= set.budget).then_some(set))
}

struct Limits {
    unlimited: bool,
    touched: u64,
    recomputes: bool,
    budget: u64,
    floor: u64,
    all: u64,
    base: u64,
    set_by: String,
}

/// What the weights ask of the slot table.
struct WeightsShape {
    /// Per automatic segment, in order of first use: (segment, buffers, uses).
    automatic: Vec<(u32, Vec<u64>, usize)>,
    /// Buffers of every segment.
    layouts: Vec<Vec<u64>>,
    /// Segments used by hand.
    by_hand: BTreeSet<u32>,
    /// Most segments that one step reads.
    at_once: u32,
    /// Weight bytes touched.
    touched: u64,
    /// Per program, per step.
    needs: Vec<Vec<Need>>,
}

/// Elementwise largest: the buffers of a slot that each of these segments fits in.
fn envelope<'a>(layouts: impl Iterator<Item = &'a Vec<u64>>) -> Vec<u64> {
    let mut out: Vec<u64> = Vec::new();
    for layout in layouts {
        out.resize(out.len().max(layout.len()), 0);
        for (o, b) in out.iter_mut().zip(layout) {
            *o = (*o).max(*b);
        }
    }
    out
}

impl WeightsShape {
    fn largest(&self) -> Vec<u64> {
        envelope(self.used().map(|s| &self.layouts[s as usize]))
    }

    fn used(&self) -> impl Iterator<Item = u32> + '_ {
        self.automatic.iter().map(|(s, ..)| *s).chain(self.by_hand.iter().copied())
    }

    fn floor_slots(&self) -> u64 {
        u64::from(self.at_once) * self.largest().iter().sum::<u64>()
    }

    /// With everything resident: each automatic segment in a slot of its own, and the by-hand ones' slots.
    fn all_slots(&self) -> u64 {
        let own: u64 = self.automatic.iter().flat_map(|(_, b, _)| b).sum();
        let by_hand: u64 = envelope(self.by_hand.iter().map(|s| &self.layouts[*s as usize])).iter().sum();
        (own + by_hand).max(self.floor_slots())
    }

    /// Chunk of the upload ring at the floor: a 64th of the largest segment, in whole 4 KiB.
    fn floor_ring(&self) -> Ring {
        let largest: u64 = self.largest().iter().sum();
        Ring { chunk: (largest / 64).next_multiple_of(4 << 10).clamp(4 << 10, MAX_CHUNK), chunks: 1 }
    }

    /// The best residence within so many bytes of weight slots, which are at least the floor's.
    fn reside(&self, bytes: u64) -> Residence {
        let all: BTreeSet<u32> = self.automatic.iter().map(|(s, ..)| *s).collect();
        let by_hand = u32::from(!self.by_hand.is_empty());
        if bytes >= self.all_slots() {
            let streaming = if self.by_hand.is_empty() { 0 } else { self.at_once.max(by_hand) };
            let residence = Residence { pinned: all, streaming };
            if self.slot_bytes(&residence) <= bytes {
                return residence;
            }
        }
        // A slot to load ahead into, where more than one segment streams; then pins: those used most often first.
        let mut residence = Residence { pinned: BTreeSet::new(), streaming: self.at_once };
        let ahead = Residence { streaming: self.at_once + 1, ..residence.clone() };
        if self.automatic.len() > self.at_once as usize && self.slot_bytes(&ahead) <= bytes {
            residence = ahead;
        }
        let mut order: Vec<&(u32, Vec<u64>, usize)> = self.automatic.iter().collect();
        order.sort_by_key(|(_, _, uses)| std::cmp::Reverse(*uses));
        for (segment, ..) in order {
            if self.automatic.len() <= residence.pinned.len() + residence.streaming as usize {
                break;
            }
            residence.pinned.insert(*segment);
            if self.slot_bytes(&residence) > bytes {
                residence.pinned.remove(segment);
            }
        }
        residence
    }

    fn streaming_buffers(&self, residence: &Residence) -> Vec<u64> {
        // A segment that is used by hand as well streams even where it is pinned.
        let streams = |s: &u32| !residence.pinned.contains(s) || self.by_hand.contains(s);
        envelope(self.used().filter(streams).map(|s| &self.layouts[s as usize]))
    }

    fn slot_bytes(&self, residence: &Residence) -> u64 {
        let pinned: u64 = residence.pinned.iter().flat_map(|s| &self.layouts[*s as usize]).sum();
        pinned + u64::from(residence.streaming) * self.streaming_buffers(residence).iter().sum::<u64>()
    }
}

/// The state of compiling: steps and slots that do not depend on the budget.
struct Lowering<'a> {
    programs: Vec<&'a Program>,
    steps: Vec<Vec<Step>>,
    states: Vec<StatePort>,
    folds: Vec<FoldPort>,
    /// The fold program stands last; its values live in slots that are made for the prologue alone.
    folding: Option<&'a fold::Folding>,
    segments: Vec<SegmentLayout>,
    /// Where each value lies: (program, value) → slot.
    values: HashMap<(u32, Tensor), SlotId>,
    slots: Vec<Slot>,
    uniforms: Vec<u8>,
    /// Offset of each distinct parameter block.
    params: HashMap<Vec<u8>, u32>,
    max_binding: u64,
    max_groups: u32,
}

impl<'a> Lowering<'a> {
    fn new(programs: Vec<&'a Program>, catalog: &Catalog, caps: &Caps) -> Result<Lowering<'a>> {
        Lowering::with_folds(programs, None, catalog, caps)
    }

    fn with_folds(
        mut programs: Vec<&'a Program>,
        folds: Option<(&'a fold::Folding, &'a Program)>,
        catalog: &Catalog,
        caps: &Caps,
    ) -> Result<Lowering<'a>> {
        programs.extend(folds.map(|(_, program)| program));
        // A part that nothing reads is never loaded.
        let mut used: BTreeMap<u32, BTreeSet<(crate::weights::WeightId, u32)>> = BTreeMap::new();
        let mut order: Vec<crate::weights::Segment> = Vec::new();
        for program in &programs {
            for (node, live) in program.graph.nodes().iter().zip(steps::live(program)) {
                if let crate::graph::Op::Weight { segment, parts } = &node.op
                    && live
                {
                    let entry = used.entry(segment.0).or_insert_with(|| {
                        order.extend(program.graph.segment(*segment).cloned());
                        BTreeSet::new()
                    });
                    entry.extend(parts.iter().map(|p| (p.weight, p.piece)));
                }
            }
        }
        let mut segments: Vec<SegmentLayout> = Vec::new();
        let mut index: HashMap<u32, u32> = HashMap::new();
        for segment in &order {
            index.insert(segment.id.0, segments.len() as u32);
            let used = used.get(&segment.id.0);
            segments.push(SegmentLayout::new(segment, catalog, &|w, p| used.is_some_and(|u| u.contains(&(w, p))))?);
        }
        let dense = |id: crate::weights::SegmentId| index.get(&id.0).copied().unwrap_or(u32::MAX);
        let steps: Vec<Vec<Step>> =
            programs.iter().map(|p| steps::steps(p, &dense, caps)).collect::<Result<_>>()?;

        let mut lowering = Lowering {
            programs,
            steps,
            states: Vec::new(),
            folds: Vec::new(),
            folding: folds.map(|(folding, _)| folding),
            segments,
            values: HashMap::new(),
            slots: Vec::new(),
            uniforms: Vec::new(),
            params: HashMap::new(),
            max_binding: caps.max_binding,
            max_groups: caps.max_groups,
        };
        lowering.place_values(caps)?;
        lowering.place_params();
        Ok(lowering)
    }

    /// State arrays get slots of their own, all other values share.
    fn place_values(&mut self, caps: &Caps) -> Result<()> {
        let mut spans: BTreeMap<(u32, Tensor), (u32, u32)> = BTreeMap::new();
        let mut folded = Vec::new();
        let mut named: BTreeMap<Arc<str>, (u64, crate::graph::StateSpec, Vec<(u32, Tensor)>)> = BTreeMap::new();
        for (p, steps) in self.steps.iter().enumerate() {
            let graph = &self.programs[p].graph;
            for (t, step) in steps.iter().enumerate() {
                for v in step.values() {
                    let key = (p as u32, v);
                    if let crate::graph::Op::State(spec) = &graph.node(v).op {
                        let bytes = graph.bytes(v);
                        let entry = named.entry(spec.name.clone()).or_insert((bytes, (**spec).clone(), Vec::new()));
                        if (entry.0, &entry.1) != (bytes, &**spec) {
                            let reason = format!("programs disagree about `{}`: {} and {bytes} bytes", spec.name, entry.0);
                            return Err(Error::Shape { op: "state", reason });
                        }
                        entry.2.push(key);
                        continue;
                    }
                    if let crate::graph::Op::Folded(i) = &graph.node(v).op {
                        folded.push((key, *i));
                        continue;
                    }
                    let span = spans.entry(key).or_insert((t as u32, t as u32));
                    span.1 = t as u32;
                }
            }
        }
        let limit = self.max_binding.min(caps.max_buffer);
        let fold_program = self.fold_program();
        let mut intervals = Vec::with_capacity(spans.len());
        for ((program, value), (first, last)) in &spans {
            let graph = &self.programs[*program as usize].graph;
            let bytes = graph.bytes(*value);
            if bytes > limit {
                let what = format!("a value of shape {}", graph.node(*value).shape);
                return Err(Error::Limit { what, need: bytes, have: limit });
            }
            intervals.push(slots::Interval { program: *program, first: *first, last: *last, bytes });
        }
        let slot = |category, bytes| Slot { category, buffers: vec![bytes], dynamic: false };
        // The prologue's own values come and go before any other slot exists.
        for (prologue, category) in [(false, Category::Activations), (true, Category::Workspace)] {
            let here = |i: &slots::Interval| (Some(i.program) == fold_program) == prologue;
            let chosen: Vec<slots::Interval> = intervals.iter().filter(|i| here(i)).copied().collect();
            let keys = spans.keys().zip(&intervals).filter(|(_, i)| here(i)).map(|(key, _)| *key);
            let (place, sizes) = slots::assign(&chosen);
            let first = self.slots.len() as u32;
            self.values.extend(keys.zip(place).map(|(key, s)| (key, SlotId(first + s))));
            self.slots.extend(sizes.into_iter().map(|bytes| Slot { dynamic: prologue, ..slot(category, bytes) }));
        }
        self.place_folds(&folded);
        for (name, (bytes, spec, users)) in named {
            if bytes > limit {
                return Err(Error::Limit { what: format!("state `{name}`"), need: bytes, have: limit });
            }
            let id = SlotId(self.slots.len() as u32);
            self.slots.push(slot(spec.category, bytes));
            self.states.push(StatePort { name, bytes, slot: id, scratch: spec.scratch });
            self.values.extend(users.into_iter().map(|key| (key, id)));
        }
        Ok(())
    }

    fn fold_program(&self) -> Option<u32> {
        self.folding.map(|_| self.programs.len() as u32 - 1)
    }

    /// The programs that the caller gave.
    fn own(&self) -> usize {
        self.programs.len() - usize::from(self.folding.is_some())
    }

    /// Large folds get slots of their own; small ones share one, so that a thousand scalars do not make a thousand
    /// buffers.
    fn place_folds(&mut self, users: &[((u32, Tensor), u32)]) {
        let Some(folding) = self.folding else { return };
        let mut shared: Option<(SlotId, u64)> = None;
        for fold in &folding.folds {
            let (slot, offset) = match &mut shared {
                Some((slot, end)) if fold.bytes <= SMALL_FOLD => (*slot, std::mem::replace(end, (*end + fold.bytes).next_multiple_of(ALIGN))),
                _ => {
                    self.slots.push(Slot { category: fold::CATEGORY, buffers: vec![fold.bytes], dynamic: false });
                    let slot = SlotId(self.slots.len() as u32 - 1);
                    if fold.bytes <= SMALL_FOLD {
                        shared = Some((slot, fold.bytes.next_multiple_of(ALIGN)));
                    }
                    (slot, 0)
                }
            };
            self.slots[slot.index()].buffers[0] = self.slots[slot.index()].buffers[0].max(offset + fold.bytes);
            if shared.is_some_and(|(_, end)| end > MAX_SHARED) {
                shared = None;
            }
            let (name, key, bytes) = (fold.name.clone(), fold.key.clone(), fold.bytes);
            self.folds.push(FoldPort { name, key, slot, offset, bytes });
        }
        for (key, i) in users {
            self.values.insert(*key, self.folds[*i as usize].slot);
        }
    }

    fn place_params(&mut self) {
        let calls = self.steps.iter().flatten().filter_map(|s| match &s.kind {
            StepKind::Call(call) => Some(call),
            _ => None,
        });
        for call in calls {
            if !self.params.contains_key(&call.params) {
                let at = (self.uniforms.len() as u64).next_multiple_of(ALIGN) as usize;
                self.uniforms.resize(at, 0);
                self.uniforms.extend(&call.params);
                self.params.insert(call.params.clone(), at as u32);
            }
        }
    }

    /// Bytes of everything but weight slots.
    fn base_bytes(&self, upload: Ring) -> u64 {
        let slots: u64 = self.slots.iter().filter(|s| !s.dynamic).map(Slot::bytes).sum();
        slots + upload.bytes() + FLOOR_READBACK.bytes() + self.uniforms.len() as u64
    }

    fn weights_shape(&self) -> WeightsShape {
        let needs: Vec<Vec<Need>> = self.steps.iter().map(|s| steps::needs(s)).collect();
        let mut automatic: Vec<(u32, Vec<u64>, usize)> = Vec::new();
        let (mut by_hand, mut at_once, mut touched) = (BTreeSet::new(), 0, BTreeMap::new());
        for need in needs.iter().flatten() {
            let count = need.automatic.len() + usize::from(need.by_hand.is_some());
            at_once = at_once.max(count as u32);
            for s in &need.automatic {
                match automatic.iter_mut().find(|(other, ..)| other == s) {
                    Some(entry) => entry.2 += 1,
                    None => automatic.push((*s, self.segments[*s as usize].buffers.clone(), 1)),
                }
            }
            by_hand.extend(need.by_hand.map(|(s, _)| s));
            for s in need.automatic.iter().chain(need.by_hand.iter().map(|(s, _)| s)) {
                for place in &self.segments[*s as usize].places {
                    touched.insert((place.weight.0, place.piece), place.bytes);
                }
            }
        }
        WeightsShape {
            automatic,
            layouts: self.segments.iter().map(|s| s.buffers.clone()).collect(),
            by_hand,
            at_once,
            touched: touched.values().sum(),
            needs,
        }
    }

    fn floor_set_by(&self, shape: &WeightsShape) -> String {
        let largest = shape.used().max_by_key(|s| self.segments[*s as usize].device_bytes());
        let weights = largest.map(|s| &self.segments[s as usize]);
        let activations: u64 = self.slots.iter().map(Slot::bytes).sum();
        match weights {
            Some(s) if s.device_bytes() >= activations => {
                format!("segment `{}` of {} (the largest)", s.name, Bytes(s.device_bytes()))
            }
            Some(s) => format!("activations of {} and segment `{}` of {}", Bytes(activations), s.name, Bytes(s.device_bytes())),
            None => format!("activations of {}", Bytes(activations)),
        }
    }

    fn finish(
        &mut self,
        shape: &WeightsShape,
        residence: Residence,
        limits: Limits,
        options: Options,
    ) -> Result<PlanSet> {
        let mut slots = std::mem::take(&mut self.slots);
        let mut weight_slots: BTreeMap<WeightSlot, SlotId> = BTreeMap::new();
        let mut dynamic: BTreeMap<(WeightSlot, u32), SlotId> = BTreeMap::new();
        let streaming = shape.streaming_buffers(&residence);
        let mut add = |buffers: Vec<u64>, dynamic: bool| {
            slots.push(Slot { category: Category::Weights, buffers, dynamic });
            SlotId(slots.len() as u32 - 1)
        };
        if options.keep_free_0 {
            for s in shape.used() {
                let slot_of = |w| ((w, s), shape.layouts[s as usize].clone());
                let pinned = residence.pinned.contains(&s);
                let mut places = Vec::new();
                if pinned {
                    places.push(slot_of(WeightSlot::Pinned(s)));
                }
                if !pinned || shape.by_hand.contains(&s) {
                    places.extend((0..residence.streaming).map(|k| slot_of(WeightSlot::Streaming(k))));
                }
                for (key, buffers) in places {
                    dynamic.insert(key, add(buffers, true));
                }
            }
        } else {
            for s in &residence.pinned {
                weight_slots.insert(WeightSlot::Pinned(*s), add(shape.layouts[*s as usize].clone(), false));
            }
            for k in 0..residence.streaming {
                weight_slots.insert(WeightSlot::Streaming(k), add(streaming.clone(), false));
            }
        }
        let locate = |slot: WeightSlot, segment: u32| -> SlotId {
            weight_slots.get(&slot).or_else(|| dynamic.get(&(slot, segment))).copied().unwrap_or(SlotId(u32::MAX))
        };

        let keeps = !options.once && !options.keep_free_0;
        let home: Option<Home> = keeps.then(|| residency::home(&shape.needs[0], &residence));
        let mut plans = Vec::new();
        for (p, program) in self.programs[..self.own()].iter().enumerate() {
            let schedule = residency::schedule(&shape.needs[p], &residence, home.as_ref());
            plans.push(self.plan(p as u32, program, &schedule, &locate, options)?);
        }
        let prologue = self.prologue(&mut slots)?;
        let mut at_home: Vec<(SlotId, u32)> = Vec::new();
        if let Some(home) = &home {
            at_home.extend(residence.pinned.iter().map(|s| (locate(WeightSlot::Pinned(*s), *s), *s)));
            at_home.extend(
                home.iter().enumerate().filter_map(|(k, s)| s.map(|s| (locate(WeightSlot::Streaming(k as u32), s), s))),
            );
        }
        let to_home = to_home(&at_home);

        // What is left of the budget goes to larger rings.
        let mut upload = shape.floor_ring();
        let mut readback = FLOOR_READBACK;
        let mut spare = limits.budget.saturating_sub(limits.base + shape.slot_bytes(&residence));
        grow(&mut upload, &mut spare, shape.largest().iter().sum());
        grow(&mut readback, &mut spare, self.largest_output());

        let table = SlotTable { slots, upload, readback, uniforms: self.uniforms.len() as u64 };
        let mut planned = Breakdown::default();
        for slot in table.slots.iter().filter(|s| !s.dynamic) {
            planned.add(slot.category, slot.bytes());
        }
        let peak_of_dynamic = plans.iter().map(|p| dynamic_peak(p, &table).total()).max().unwrap_or(0);
        planned.add(Category::Weights, peak_of_dynamic);
        // The prologue runs when nothing but rings and parameters exists; it makes the folds' slots itself.
        let mut early = dynamic_peak(&prologue, &table);
        for sum in [&mut planned, &mut early] {
            sum.add(Category::Upload, upload.bytes());
            sum.add(Category::Readback, readback.bytes());
            sum.add(Category::Uniforms, table.uniforms);
        }
        let report = self.report(&table, &prologue, &planned);
        if prologue.actions.is_empty() || early.total() < planned.total() {
            early = planned;
        }
        let planned = early;
        let resident = |s: &u32| self.segments[*s as usize].bytes;
        Ok(PlanSet {
            plans,
            to_home,
            table,
            uniforms: std::mem::take(&mut self.uniforms),
            resident_bytes: residence.pinned.iter().map(resident).sum(),
            home: at_home,
            planned,
            budget: limits.budget,
            floor: limits.floor,
            floor_set_by: limits.set_by,
            all: limits.all,
            weight_bytes: limits.touched,
            folds: std::mem::take(&mut self.folds),
            prologue,
            report,
            segments: std::mem::take(&mut self.segments),
            states: std::mem::take(&mut self.states),
            recomputes: limits.recomputes,
            options,
        })
    }

    fn largest_output(&self) -> u64 {
        let bytes = |p: &Program| p.outputs.iter().map(|(_, t)| p.graph.bytes(p.graph.storage(*t).0)).max().unwrap_or(0);
        self.programs.iter().map(|p| bytes(p)).max().unwrap_or(0)
    }

    /// The plan that computes the folds: their sources go one after the other through a slot that is made for it.
    fn prologue(&self, slots: &mut Vec<Slot>) -> Result<Plan> {
        let Some(p) = self.fold_program() else {
            return Ok(Plan::nothing("fold"));
        };
        let program = self.programs[p as usize];
        let needs: Vec<Need> = self.steps[p as usize].iter().map(Step::need).collect();
        let sources: BTreeSet<u32> = needs.iter().flat_map(|n| n.automatic.iter().copied()).collect();
        let residence = Residence { pinned: BTreeSet::new(), streaming: u32::from(!sources.is_empty()) };
        let schedule = residency::schedule(&needs, &residence, None);
        let source = SlotId(slots.len() as u32);
        if !sources.is_empty() {
            let buffers = envelope(sources.iter().map(|s| &self.segments[*s as usize].buffers));
            slots.push(Slot { category: Category::Weights, buffers, dynamic: true });
        }
        let mut plan = self.plan(p, program, &schedule, &|_, _| source, Options::default())?;
        plan.make_slots(&|slot| slots[slot.index()].dynamic, &|slot| slots[slot.index()].category == fold::CATEGORY);
        plan.fills = fill_order(&plan.actions);
        Ok(plan)
    }

    fn report(&self, table: &SlotTable, prologue: &Plan, planned: &Breakdown) -> CompileReport {
        let folded: u64 = table.slots.iter().filter(|s| s.category == fold::CATEGORY).map(Slot::bytes).sum();
        let held = planned.get(Category::Weights) + folded;
        let peak = dynamic_peak(prologue, table).total();
        let mut report = CompileReport {
            held_bytes: held,
            peak_bytes: held.max(peak),
            staging_bytes: table.upload.bytes() + table.readback.bytes(),
            ..Default::default()
        };
        let stage = |name: &str, bytes| Stage { name: name.into(), bytes };
        report.stages.push(stage("dead code, equal constants", 0));
        if let Some(folding) = self.folding {
            let sources = |f: &fold::Fold| f.source_bytes();
            report.folded = folding.folds.iter().map(|f| f.name.clone()).collect();
            (report.skipped, report.retained) = (folding.skipped.clone(), folding.retained.clone());
            (report.freed_bytes, report.duplicated_bytes) = (folding.freed_bytes, folding.duplicated_bytes);
            report.largest_fold_bytes = folding.folds.iter().map(|f| sources(f) + f.bytes).max().unwrap_or(0);
            report.stages.push(stage("folding, at its peak", peak));
            report.stages.push(stage("folded, sources freed", folded));
        }
        report.stages.push(stage("compiled", held));
        report
    }

    /// A program's steps with its loads and evictions between them, as actions.
    fn plan(
        &self,
        p: u32,
        program: &Program,
        schedule: &residency::Schedule,
        locate: &dyn Fn(WeightSlot, u32) -> SlotId,
        options: Options,
    ) -> Result<Plan> {
        let steps = &self.steps[p as usize];
        let value = |t: Tensor, write: bool| {
            let slot = self.values.get(&(p, t)).copied().unwrap_or(SlotId(u32::MAX));
            let state = self.states.iter().position(|s| s.slot == slot);
            if let crate::graph::Op::Folded(i) = program.graph.node(t).op {
                let offset = self.folds[i as usize].offset;
                return Binding { content: Content::Folded(i), slot, buffer: 0, offset, size: program.graph.bytes(t), write };
            }
            let content = state.map_or(Content::Value(t), |i| Content::State(i as u32));
            Binding { content, slot, buffer: 0, offset: 0, size: program.graph.bytes(t), write }
        };
        let mut actions = Vec::with_capacity(steps.len() * 2);
        // Index of each step's own action, and the loads that wait to learn it.
        let mut at_step = vec![0u32; steps.len() + 1];
        let mut waiting: Vec<(usize, usize)> = Vec::new();
        let (mut evicts, mut loads): (Vec<_>, Vec<_>) = (schedule.evicts.iter().collect(), schedule.loads.iter().collect());
        evicts.sort_by_key(|e| e.at);
        loads.sort_by_key(|l| (l.from, l.by));
        let (mut evicts, mut loads) = (evicts.into_iter().peekable(), loads.into_iter().peekable());
        for t in 0..=steps.len() {
            while let Some(e) = evicts.next_if(|e| e.at == t) {
                let slot = locate(e.slot, e.segment);
                actions.push(Action::Evict { segment: e.segment, slot, pass: e.pass });
                if options.keep_free_0 {
                    actions.push(Action::Free { slot });
                }
            }
            while let Some(l) = loads.next_if(|l| l.from == t) {
                let slot = locate(l.slot, l.segment);
                if options.keep_free_0 {
                    actions.push(Action::Alloc { slot });
                }
                waiting.push((actions.len(), l.by));
                actions.push(Action::Load { segment: l.segment, slot, by: 0, pass: l.pass });
            }
            at_step[t] = actions.len() as u32;
            let Some(step) = steps.get(t) else { break };
            actions.push(match &step.kind {
                StepKind::Upload { input, value: v } => Action::Upload { input: *input, to: value(*v, true) },
                StepKind::LoadRows { weight, input, value: v } => {
                    Action::LoadRows { weight: *weight, input: *input, to: value(*v, true) }
                }
                StepKind::Download { output, value: v } => Action::Download { output: *output, from: value(*v, false) },
                StepKind::Hook { name, when, value: v } => {
                    Action::Hook { name: name.clone(), when: *when, pass: step.pass, value: v.map(|v| value(v, false)) }
                }
                StepKind::Call(call) => {
                    let mut bindings = Vec::with_capacity(call.bindings.len());
                    for (content, write) in &call.bindings {
                        bindings.push(match content {
                            // Kernels name a state by its node, like any value.
                            Content::State(_) | Content::Folded(_) => continue,
                            Content::Value(v) => value(*v, *write),
                            Content::Weight { segment, weight, piece } => {
                                let found = schedule.found[t].iter().find(|(s, _)| s == segment);
                                let place = self.segments[*segment as usize].place(*weight, *piece);
                                match (found, place) {
                                    (Some((_, slot)), Some(place)) => Binding {
                                        content: *content,
                                        slot: locate(*slot, *segment),
                                        buffer: place.buffer,
                                        offset: place.offset,
                                        size: place.bytes.next_multiple_of(4),
                                        write: false,
                                    },
                                    _ => {
                                        return Err(Error::Plan {
                                            action: actions.len(),
                                            reason: format!("segment #{segment} has no place in step {t}"),
                                        });
                                    }
                                }
                            }
                        });
                    }
                    let max = u64::from(self.max_groups);
                    let x = call.groups.min(max);
                    let y = call.groups.div_ceil(max.max(1));
                    Action::Dispatch {
                        kernel: call.kernel,
                        bindings: bindings.into(),
                        params: self.params.get(&call.params).copied().unwrap_or(0),
                        grid: [x as u32, y as u32],
                        work: call.work,
                    }
                }
            });
        }
        // What only has to be there at home is loaded before the first update: from there on nothing may fail.
        let first_update = steps.iter().position(|s| s.update).unwrap_or(steps.len());
        let updates_from = at_step[first_update];
        for (load, step) in waiting {
            if let Action::Load { by, .. } = &mut actions[load] {
                *by = at_step[step.min(first_update)];
            }
        }
        let fills = fill_order(&actions);
        let port = |(name, t): (&Arc<str>, Tensor)| {
            let bytes = program.graph.bytes(program.graph.storage(t).0);
            Port { name: name.clone(), bytes, shape: program.graph.node(t).shape }
        };
        let inputs = program.graph.nodes().iter().enumerate().filter_map(|(i, n)| match &n.op {
            crate::graph::Op::Input { name } => Some(port((name, Tensor(i as u32)))),
            _ => None,
        });
        Ok(Plan {
            name: program.name.clone(),
            actions,
            inputs: inputs.collect(),
            outputs: program.outputs.iter().map(|(name, t)| port((name, *t))).collect(),
            updates_from,
            fills,
        })
    }
}

/// The order in which bytes go through the upload ring: by the action that needs them. A load whose window is not
/// yet open only holds ring chunks; whatever an earlier action needs stands before it, so the ring never locks up.
fn fill_order(actions: &[Action]) -> Vec<u32> {
    let mut order: Vec<(u32, u32)> = actions
        .iter()
        .enumerate()
        .filter_map(|(i, a)| match a {
            Action::Load { by, .. } => Some((*by, i as u32)),
            Action::Upload { .. } | Action::LoadRows { .. } => Some((i as u32, i as u32)),
            _ => None,
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, i)| i).collect()
}

/// Loads everything that is resident at home.
fn to_home(home: &[(SlotId, u32)]) -> Plan {
    let by = home.len() as u32;
    let load = |(slot, segment): &(SlotId, u32)| Action::Load { segment: *segment, slot: *slot, by, pass: Pass::Forward };
    let actions: Vec<Action> = home.iter().map(load).collect();
    Plan { name: "to home".into(), fills: fill_order(&actions), actions, inputs: vec![], outputs: vec![], updates_from: by }
}

/// Grows a ring within `spare` bytes: up to three chunks, each up to 16 MiB but no larger than `useful`.
fn grow(ring: &mut Ring, spare: &mut u64, useful: u64) {
    let mut chunk = useful.next_multiple_of(4 << 10).clamp(ring.chunk, MAX_CHUNK.max(ring.chunk));
    loop {
        let larger = Ring { chunk, chunks: MAX_CHUNKS };
        if larger.bytes() - ring.bytes() <= *spare {
            *spare -= larger.bytes() - ring.bytes();
            *ring = larger;
            return;
        }
        if chunk == ring.chunk {
            return;
        }
        chunk = (chunk / 2).next_multiple_of(4 << 10).max(ring.chunk);
    }
}

/// The dynamic slots that are alive at once, at their greatest sum.
fn dynamic_peak(plan: &Plan, table: &SlotTable) -> Breakdown {
    let (mut live, mut peak) = (Breakdown::default(), Breakdown::default());
    for action in &plan.actions {
        match action {
            Action::Alloc { slot } => {
                let slot = &table.slots[slot.index()];
                live.add(slot.category, slot.bytes());
            }
            Action::Free { slot } => {
                let slot = &table.slots[slot.index()];
                live.sub(slot.category, slot.bytes());
            }
            _ => {}
        }
        if live.total() > peak.total() {
            peak = live;
        }
    }
    peak
}
