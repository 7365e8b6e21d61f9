//! From steps, slots and a choice of resident weights to a set of plans with its sums.

use std::collections::{BTreeMap, BTreeSet};

use super::actions::{fill_order, to_home};
use super::fold::{self, CompileReport, Stage};
use super::lowering::Lowering;
use super::plan::{Action, Breakdown, Category, Plan, Slot, SlotId, SlotTable};
use super::residency::{self, Home, Need, Residence, WeightSlot};
use super::rings::{FLOOR_READBACK, grow};
use super::steps::Step;
use super::weights::{WeightsShape, envelope};
use super::{Limits, Options, PlanSet};
use crate::error::Result;
use crate::graph::Program;

impl Lowering<'_> {
    pub(super) fn finish(
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
        // The prologue runs when nothing but the upload ring and parameters exists; it makes the folds' slots itself.
        let mut early = dynamic_peak(&prologue, &table);
        planned.add(Category::Readback, readback.bytes());
        for sum in [&mut planned, &mut early] {
            sum.add(Category::Upload, upload.bytes());
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
            catalog: limits.catalog,
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

    pub(super) fn largest_output(&self) -> u64 {
        let bytes =
            |p: &Program| p.outputs.iter().map(|(_, t)| p.graph.bytes(p.graph.storage(*t).0)).max().unwrap_or(0);
        self.programs.iter().map(|p| bytes(p)).max().unwrap_or(0)
    }

    /// The plan that computes the folds: their sources go one after the other through a slot that is made for it.
    pub(super) fn prologue(&self, slots: &mut Vec<Slot>) -> Result<Plan> {
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

    pub(super) fn report(&self, table: &SlotTable, prologue: &Plan, planned: &Breakdown) -> CompileReport {
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
            // The result is among what is held.
            report.largest_fold_bytes = folding.folds.iter().map(sources).max().unwrap_or(0);
            report.stages.push(stage("folding, at its peak", peak));
            report.stages.push(stage("folded, sources freed", folded));
        }
        report.stages.push(stage("compiled", held));
        report
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
