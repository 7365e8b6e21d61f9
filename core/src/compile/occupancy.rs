//! How much of the allocated memory a plan needs at each of its actions.
//!
//! A slot is allocated from first to last, but its content is needed only between a write and the last read of it. The
//! difference between the two figures is what a smaller budget could give up, and a chart that showed one alone would
//! hide it. Read from the plan, so it costs a run nothing.

use std::collections::BTreeMap;

use super::{Action, Binding, Breakdown, Category, Content, PlanSet, SlotId};
use crate::graph::Tensor;

/// Bytes whose content is needed, by category, from an action of the plan on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupied {
    /// Index of the action.
    pub action: u32,
    /// The bytes.
    pub bytes: Breakdown,
}

impl PlanSet {
    /// The occupied bytes of a plan, at every action where they change; the first entry is at action 0.
    pub fn occupied(&self, plan: usize) -> Vec<Occupied> {
        let Some(plan) = self.plans.get(plan) else { return Vec::new() };
        let end = plan.actions.len() as u32;
        let mut spans: Vec<(u32, u32, Category, u64)> = Vec::new();
        let mut values: BTreeMap<(SlotId, Tensor), (u32, u32, u64)> = BTreeMap::new();
        let mut scratch: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let mut held: BTreeMap<SlotId, (u32, u32)> = self.home.iter().map(|(slot, s)| (*slot, (*s, 0))).collect();
        let mut use_of = |b: &Binding, at: u32| match b.content {
            Content::Value(t) => {
                let entry = values.entry((b.slot, t)).or_insert((at, at, 0));
                (entry.1, entry.2) = (at, entry.2.max(b.offset + b.size));
            }
            Content::State(s) if self.states.get(s as usize).is_some_and(|s| s.scratch) => {
                scratch.entry(s).or_insert((at, at)).1 = at;
            }
            Content::State(_) | Content::Folded(_) | Content::Weight { .. } => {}
        };
        for (at, action) in (0..).zip(&plan.actions) {
            match action {
                Action::Load { segment, slot, .. } => {
                    held.insert(*slot, (*segment, at));
                }
                Action::Evict { slot, .. } => {
                    if let Some((segment, from)) = held.remove(slot) {
                        spans.push((from, at, Category::Weights, self.segments[segment as usize].device_bytes()));
                    }
                }
                Action::Dispatch { bindings, .. } => bindings.iter().for_each(|b| use_of(b, at)),
                Action::Upload { to, .. } | Action::LoadRows { to, .. } => use_of(to, at),
                Action::Download { from, .. } => use_of(from, at),
                Action::Hook { value: Some(value), .. } => use_of(value, at),
                Action::Hook { .. } | Action::Alloc { .. } | Action::Free { .. } => {}
            }
        }
        for (segment, from) in held.into_values() {
            spans.push((from, end, Category::Weights, self.segments[segment as usize].device_bytes()));
        }
        let category = |slot: SlotId| self.table.slots[slot.index()].category;
        spans.extend(values.into_iter().map(|((slot, _), (from, to, bytes))| (from, to + 1, category(slot), bytes)));
        for (index, state) in (0..).zip(&self.states) {
            let (from, to) = match scratch.get(&index) {
                Some((from, to)) => (*from, *to + 1),
                None if state.scratch => continue,
                None => (0, end),
            };
            spans.push((from, to, category(state.slot), state.bytes));
        }
        spans.extend(self.folds.iter().map(|f| (0, end, Category::Folded, f.bytes)));
        let rings = [(Category::Upload, self.table.upload.bytes()), (Category::Readback, self.table.readback.bytes())];
        let fixed = rings.into_iter().chain([(Category::Uniforms, self.table.uniforms)]);
        spans.extend(fixed.map(|(category, bytes)| (0, end, category, bytes)));

        let mut changes: BTreeMap<u32, Vec<(bool, Category, u64)>> = BTreeMap::from([(0, Vec::new())]);
        for (from, to, category, bytes) in spans {
            changes.entry(from).or_default().push((true, category, bytes));
            changes.entry(to).or_default().push((false, category, bytes));
        }
        let mut now = Breakdown::default();
        let mut out = Vec::with_capacity(changes.len());
        for (action, list) in changes {
            for (begins, category, bytes) in list.iter().filter(|c| !c.0).chain(list.iter().filter(|c| c.0)) {
                if *begins { now.add(*category, *bytes) } else { now.sub(*category, *bytes) }
            }
            out.push(Occupied { action, bytes: now });
        }
        out
    }
}
