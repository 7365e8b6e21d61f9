//! The live part of a program as a list of steps: uploads, kernel calls, hooks, downloads.
//!
//! Dead code never becomes a step. An input is uploaded just before its first use, so that it holds no memory
//! before; outputs are downloaded at the end, so that nothing waits for a readback inside a step.

use std::collections::HashMap;
use std::sync::Arc;

use super::plan::Content;
use super::residency::Need;
use crate::caps::Caps;
use crate::error::Result;
use crate::event::Pass;
use crate::graph::{HookWhen, Op, Program, Tensor};
use crate::kernels::{self, Call, SegmentIndex};
use crate::weights::WeightId;

#[derive(Clone, Debug)]
pub(crate) enum StepKind {
    Upload { input: u32, value: Tensor },
    LoadRows { weight: WeightId, input: u32, value: Tensor },
    Call(Call),
    Hook { name: Arc<str>, when: HookWhen, value: Option<Tensor> },
    Download { output: u32, value: Tensor },
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub kind: StepKind,
    pub pass: Pass,
    /// Segment and visit, where the step belongs to a by-hand visit.
    pub visit: Option<(u32, u32)>,
    /// Writes state: runs after everything else.
    pub update: bool,
}

impl Step {
    /// The values that the step reads or writes.
    pub fn values(&self) -> Vec<Tensor> {
        match &self.kind {
            StepKind::Upload { value, .. } | StepKind::LoadRows { value, .. } | StepKind::Download { value, .. } => {
                vec![*value]
            }
            StepKind::Hook { value, .. } => value.iter().copied().collect(),
            StepKind::Call(call) => call
                .bindings
                .iter()
                .filter_map(|(c, _)| match c {
                    Content::Value(t) => Some(*t),
                    Content::Weight { .. } | Content::State(_) | Content::Folded(_) => None,
                })
                .collect(),
        }
    }

    /// The segments that the step reads.
    pub fn need(&self) -> Need {
        let mut need = Need { pass: Some(self.pass), ..Default::default() };
        if let StepKind::Call(call) = &self.kind {
            for (content, _) in &call.bindings {
                let Content::Weight { segment, .. } = content else { continue };
                match self.visit {
                    Some((s, visit)) if s == *segment => need.by_hand = Some((s, visit)),
                    _ if !need.automatic.contains(segment) => need.automatic.push(*segment),
                    _ => {}
                }
            }
        }
        need
    }
}

/// What each step needs. A by-hand visit holds its segment from its first use to its last, through steps of the visit
/// that read something else: what the user holds gives way to nothing.
pub(crate) fn needs(steps: &[Step]) -> Vec<Need> {
    let mut needs: Vec<Need> = steps.iter().map(Step::need).collect();
    let mut spans: HashMap<u32, (usize, usize)> = HashMap::new();
    for (t, need) in needs.iter().enumerate() {
        if let Some((_, visit)) = need.by_hand {
            spans.entry(visit).or_insert((t, t)).1 = t;
        }
    }
    for (t, (step, need)) in steps.iter().zip(&mut needs).enumerate() {
        if let Some((segment, visit)) = step.visit
            && need.by_hand.is_none()
            && spans.get(&visit).is_some_and(|(first, last)| (*first..=*last).contains(&t))
        {
            need.by_hand = Some((segment, visit));
        }
    }
    needs
}

/// The nodes of a program that its outputs, updates and roots depend on.
pub(crate) fn live(program: &Program) -> Vec<bool> {
    let graph = &program.graph;
    let mut live = vec![false; graph.nodes().len()];
    for t in program.outputs.iter().map(|(_, t)| t).chain(graph.updates()).chain(&program.roots) {
        live[t.index()] = true;
    }
    for i in (0..live.len()).rev() {
        if live[i] {
            for t in &graph.nodes()[i].inputs {
                live[t.index()] = true;
            }
        }
    }
    live
}

/// The steps of a program, in order.
pub(crate) fn steps(program: &Program, segments: SegmentIndex<'_>, caps: &Caps) -> Result<Vec<Step>> {
    let graph = &program.graph;
    let live = live(program);
    let inputs: Vec<Tensor> =
        (0..graph.nodes().len() as u32).map(Tensor).filter(|t| matches!(graph.node(*t).op, Op::Input { .. })).collect();
    let mut uploaded = vec![false; inputs.len()];
    let (mut steps, mut updates) = (Vec::new(), Vec::new());
    let upload = |t: Tensor, pass: Pass, uploaded: &mut Vec<bool>, steps: &mut Vec<Step>| {
        let (root, _) = graph.storage(t);
        if let Some(i) = inputs.iter().position(|x| *x == root)
            && !std::mem::replace(&mut uploaded[i], true)
            && graph.node(root).shape.elements() > 0
        {
            steps.push(Step {
                kind: StepKind::Upload { input: i as u32, value: root },
                pass,
                visit: None,
                update: false,
            });
        }
    };
    for (i, node) in graph.nodes().iter().enumerate() {
        if !live[i] {
            continue;
        }
        let visit = node.visit.map(|v| (segments(graph.visits()[v as usize].segment.id), v));
        if let Op::Hook { name, when, .. } = &node.op {
            let value = (*when == HookWhen::Value).then(|| graph.storage(node.inputs[0]).0);
            if let Some(t) = value {
                upload(t, node.pass, &mut uploaded, &mut steps);
            }
            steps.push(Step {
                kind: StepKind::Hook { name: name.clone(), when: *when, value },
                pass: node.pass,
                visit,
                update: false,
            });
            continue;
        }
        if let Op::LoadRows { weight } = &node.op {
            let input = inputs.iter().position(|x| *x == node.inputs[0]).unwrap_or(usize::MAX) as u32;
            if node.shape.elements() > 0 {
                let kind = StepKind::LoadRows { weight: *weight, input, value: Tensor(i as u32) };
                steps.push(Step { kind, pass: node.pass, visit: None, update: false });
            }
            continue;
        }
        let calls = kernels::lower(graph, Tensor(i as u32), segments, caps)?;
        let calls: Vec<Call> = calls.into_iter().flat_map(|c| cut(c, caps.work_per_submission)).collect();
        let update = graph.updates().contains(&Tensor(i as u32));
        if !calls.is_empty() {
            for t in &node.inputs {
                upload(*t, node.pass, &mut uploaded, &mut steps);
            }
        }
        let step = |c| Step { kind: StepKind::Call(c), pass: node.pass, visit, update };
        if update { updates.extend(calls.into_iter().map(step)) } else { steps.extend(calls.into_iter().map(step)) }
    }
    for (o, (_, t)) in program.outputs.iter().enumerate() {
        let (root, _) = graph.storage(*t);
        upload(root, graph.node(root).pass, &mut uploaded, &mut steps);
        if graph.node(root).shape.elements() > 0 {
            let kind = StepKind::Download { output: o as u32, value: root };
            steps.push(Step { kind, pass: graph.node(root).pass, visit: None, update: false });
        }
    }
    steps.extend(updates);
    Ok(steps)
}

/// Cuts a dispatch that would take longer than a submission may into ranges of its workgroups. Every kernel maps a
/// group's number to its piece of the output, so the bits are the same.
fn cut(call: Call, work_per_submission: u64) -> Vec<Call> {
    let parts = call.work.div_ceil(work_per_submission.max(1)).clamp(1, call.groups.max(1));
    if parts == 1 {
        return vec![call];
    }
    let size = call.groups.div_ceil(parts);
    let mut cuts = Vec::new();
    let mut first = 0;
    while first < call.groups {
        let end = call.groups.min(first + size);
        let mut part = call.clone();
        // Every parameter block begins with the first group and the end of the range.
        part.params[..4].copy_from_slice(&(first as u32).to_le_bytes());
        part.params[4..8].copy_from_slice(&(end as u32).to_le_bytes());
        (part.groups, part.work) = (end - first, call.work * (end - first) / call.groups);
        cuts.push(part);
        first = end;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, Unary};

    fn none(_: crate::weights::SegmentId) -> u32 {
        0
    }

    #[test]
    fn dead_code_and_unused_inputs_become_no_step() {
        let mut g = Graph::new();
        let x = g.input("x", [4]).unwrap();
        let unused = g.input("unused", [4]).unwrap();
        let _dead = g.unary(Unary::Exp, unused).unwrap();
        let y = g.unary(Unary::Tanh, x).unwrap();
        let p = g.outputs(&[("y", y)]).unwrap();
        let steps = steps(&p, &none, &Caps::webgpu_defaults()).unwrap();
        assert_eq!(steps.len(), 3, "{steps:?}");
        assert!(matches!(steps[0].kind, StepKind::Upload { input: 0, .. }));
    }

    #[test]
    fn a_product_over_nothing_is_zero() {
        let mut g = Graph::new();
        let a = g.input("a", [2, 0]).unwrap();
        let b = g.input("b", [0, 3]).unwrap();
        let y = g.matmul(a, b, None).unwrap();
        let p = g.outputs(&[("y", y)]).unwrap();
        let steps = steps(&p, &none, &Caps::webgpu_defaults()).unwrap();
        assert!(matches!(&steps[0].kind, StepKind::Call(c) if c.kernel.shader.name == "fill"));
    }
}
