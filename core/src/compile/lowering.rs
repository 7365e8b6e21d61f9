//! Programs as steps, and the place of every value: what does not depend on the budget.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::fold;
use super::plan::{Category, FoldPort, Ring, SegmentLayout, Slot, SlotId, StatePort};
use super::residency::Need;
use super::rings::FLOOR_READBACK;
use super::slots;
use super::steps::{self, Step, StepKind};
use super::weights::WeightsShape;
use crate::caps::{ALIGN, Caps};
use crate::error::{Bytes, Error, Result};
use crate::graph::{Program, Tensor};
use crate::weights::Catalog;

/// Folds up to this size share a slot.
const SMALL_FOLD: u64 = 64 << 10;
/// The shared slot is closed beyond this size.
const MAX_SHARED: u64 = 16 << 20;

/// The state of compiling: steps and slots that do not depend on the budget.
pub(super) struct Lowering<'a> {
    pub(super) programs: Vec<&'a Program>,
    pub(super) steps: Vec<Vec<Step>>,
    pub(super) states: Vec<StatePort>,
    pub(super) folds: Vec<FoldPort>,
    /// The fold program stands last; its values live in slots that are made for the prologue alone.
    pub(super) folding: Option<&'a fold::Folding>,
    pub(super) segments: Vec<SegmentLayout>,
    /// Where each value lies: (program, value) → slot.
    pub(super) values: HashMap<(u32, Tensor), SlotId>,
    pub(super) slots: Vec<Slot>,
    pub(super) uniforms: Vec<u8>,
    /// Offset of each distinct parameter block.
    pub(super) params: HashMap<Vec<u8>, u32>,
    pub(super) max_binding: u64,
    pub(super) max_groups: u32,
}

/// A state array: its bytes, what it is, and the values of the programs that name it.
type NamedState = (u64, crate::graph::StateSpec, Vec<(u32, Tensor)>);

impl<'a> Lowering<'a> {
    pub(super) fn new(programs: Vec<&'a Program>, catalog: &Catalog, caps: &Caps) -> Result<Lowering<'a>> {
        Lowering::with_folds(programs, None, catalog, caps)
    }

    pub(super) fn with_folds(
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
        let steps: Vec<Vec<Step>> = programs.iter().map(|p| steps::steps(p, &dense, caps)).collect::<Result<_>>()?;

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
    pub(super) fn place_values(&mut self, caps: &Caps) -> Result<()> {
        let mut spans: BTreeMap<(u32, Tensor), (u32, u32)> = BTreeMap::new();
        let mut folded = Vec::new();
        let mut named: BTreeMap<Arc<str>, NamedState> = BTreeMap::new();
        for (p, steps) in self.steps.iter().enumerate() {
            let graph = &self.programs[p].graph;
            for (t, step) in steps.iter().enumerate() {
                for v in step.values() {
                    let key = (p as u32, v);
                    if let crate::graph::Op::State(spec) = &graph.node(v).op {
                        let bytes = graph.bytes(v);
                        let entry = named.entry(spec.name.clone()).or_insert((bytes, (**spec).clone(), Vec::new()));
                        if (entry.0, &entry.1) != (bytes, &**spec) {
                            let reason =
                                format!("programs disagree about `{}`: {} and {bytes} bytes", spec.name, entry.0);
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

    pub(super) fn fold_program(&self) -> Option<u32> {
        self.folding.map(|_| self.programs.len() as u32 - 1)
    }

    /// The programs that the caller gave.
    pub(super) fn own(&self) -> usize {
        self.programs.len() - usize::from(self.folding.is_some())
    }

    /// Large folds get slots of their own; small ones share one, so that a thousand scalars do not make a thousand
    /// buffers.
    pub(super) fn place_folds(&mut self, users: &[((u32, Tensor), u32)]) {
        let Some(folding) = self.folding else { return };
        let mut shared: Option<(SlotId, u64)> = None;
        for fold in &folding.folds {
            let (slot, offset) = match &mut shared {
                Some((slot, end)) if fold.bytes <= SMALL_FOLD => {
                    (*slot, std::mem::replace(end, (*end + fold.bytes).next_multiple_of(ALIGN)))
                }
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

    pub(super) fn place_params(&mut self) {
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
    pub(super) fn base_bytes(&self, upload: Ring) -> u64 {
        let slots: u64 = self.slots.iter().filter(|s| !s.dynamic).map(Slot::bytes).sum();
        slots + upload.bytes() + FLOOR_READBACK.bytes() + self.uniforms.len() as u64
    }

    pub(super) fn weights_shape(&self) -> WeightsShape {
        let needs: Vec<Vec<Need>> = self.steps.iter().map(|s| steps::needs(s)).collect();
        let mut automatic: Vec<(u32, Vec<u64>, usize)> = Vec::new();
        // Where a segment stands in `automatic`.
        let mut order: Vec<Option<usize>> = vec![None; self.segments.len()];
        let (mut by_hand, mut at_once) = (BTreeSet::new(), 0);
        for need in needs.iter().flatten() {
            let count = need.automatic.len() + usize::from(need.by_hand.is_some());
            at_once = at_once.max(count as u32);
            for s in &need.automatic {
                let at = *order[*s as usize].get_or_insert_with(|| {
                    automatic.push((*s, self.segments[*s as usize].buffers.clone(), 0));
                    automatic.len() - 1
                });
                automatic[at].2 += 1;
            }
            by_hand.extend(need.by_hand.map(|(s, _)| s));
        }
        let mut touched = BTreeMap::new();
        for s in automatic.iter().map(|(s, ..)| s).chain(&by_hand) {
            for place in &self.segments[*s as usize].places {
                touched.insert((place.weight.0, place.piece), place.bytes);
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

    pub(super) fn floor_set_by(&self, shape: &WeightsShape) -> String {
        let largest = shape.used().max_by_key(|s| self.segments[*s as usize].device_bytes());
        let weights = largest.map(|s| &self.segments[s as usize]);
        let activations: u64 = self.slots.iter().map(Slot::bytes).sum();
        match weights {
            Some(s) if s.device_bytes() >= activations => {
                format!("segment `{}` of {} (the largest)", s.name, Bytes(s.device_bytes()))
            }
            Some(s) => {
                format!("activations of {} and segment `{}` of {}", Bytes(activations), s.name, Bytes(s.device_bytes()))
            }
            None => format!("activations of {}", Bytes(activations)),
        }
    }
}
