//! A program's steps, with its loads and evictions between them, as the actions of a plan.

use std::sync::Arc;

use super::Options;
use super::lowering::Lowering;
use super::plan::{Action, Binding, Content, Plan, Port, SlotId};
use super::residency::{self, WeightSlot};
use super::steps::StepKind;
use crate::error::{Error, Result};
use crate::event::Pass;
use crate::graph::{Program, Tensor};

impl Lowering<'_> {
    /// A program's steps with its loads and evictions between them, as actions.
    pub(super) fn plan(
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
                return Binding {
                    content: Content::Folded(i),
                    slot,
                    buffer: 0,
                    offset,
                    size: program.graph.bytes(t),
                    write,
                };
            }
            let content = state.map_or(Content::Value(t), |i| Content::State(i as u32));
            Binding { content, slot, buffer: 0, offset: 0, size: program.graph.bytes(t), write }
        };
        let mut actions = Vec::with_capacity(steps.len() * 2);
        // Index of each step's own action, and the loads that wait to learn it.
        let mut at_step = vec![0u32; steps.len() + 1];
        let mut waiting: Vec<(usize, usize)> = Vec::new();
        let (mut evicts, mut loads): (Vec<_>, Vec<_>) =
            (schedule.evicts.iter().collect(), schedule.loads.iter().collect());
        evicts.sort_by_key(|e| e.at);
        loads.sort_by_key(|l| (l.from, l.by));
        let (mut evicts, mut loads) = (evicts.into_iter().peekable(), loads.into_iter().peekable());
        #[allow(clippy::needless_range_loop)] // `t` is a boundary between steps, not an index of one list
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
pub(super) fn fill_order(actions: &[Action]) -> Vec<u32> {
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
pub(super) fn to_home(home: &[(SlotId, u32)]) -> Plan {
    let by = home.len() as u32;
    let load =
        |(slot, segment): &(SlotId, u32)| Action::Load { segment: *segment, slot: *slot, by, pass: Pass::Forward };
    let actions: Vec<Action> = home.iter().map(load).collect();
    Plan {
        name: "to home".into(),
        fills: fill_order(&actions),
        actions,
        inputs: vec![],
        outputs: vec![],
        updates_from: by,
    }
}
