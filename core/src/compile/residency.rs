//! When segments are in device memory: planned from the known sequence of uses, not cached.
//!
//! Some segments are *pinned*: they keep a slot of their own size for the whole set. All others go through one or
//! two streaming slots, each as large as the largest of them, by Belady's rule: what is used furthest in the future
//! gives way, ties by position. On a palindrome of L equal segments with C slots in all this costs exactly
//! 2·(L − C) loads a step, whichever segments are pinned; two streaming slots let a load run while the segment
//! before it computes.

use std::collections::BTreeSet;

use crate::event::Pass;

/// One step's need of segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Need {
    /// Automatic segments read by the step.
    pub automatic: Vec<u32>,
    /// A by-hand segment read by the step, with its visit.
    pub by_hand: Option<(u32, u32)>,
    /// Pass of the step.
    pub pass: Option<Pass>,
}

/// Where segments may be: pinned ones, and the number of streaming slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Residence {
    pub pinned: BTreeSet<u32>,
    pub streaming: u32,
}

/// A slot for weights: a pinned segment's, or a streaming one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WeightSlot {
    Pinned(u32),
    Streaming(u32),
}

/// A load: at any time from boundary `from` (before that step) until step `by`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub segment: u32,
    pub slot: WeightSlot,
    pub from: usize,
    pub by: usize,
    pub pass: Pass,
}

/// An eviction, at a boundary (before that step).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evict {
    pub segment: u32,
    pub slot: WeightSlot,
    pub at: usize,
    pub pass: Pass,
}

/// Loads and evictions of a plan, and where each step finds its segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub loads: Vec<Load>,
    pub evicts: Vec<Evict>,
    /// Per step: (segment, slot) of each segment that it reads.
    pub found: Vec<Vec<(u32, WeightSlot)>>,
}

/// Content of each streaming slot at home.
pub(crate) type Home = Vec<Option<u32>>;

/// The first automatic segments of the sequence that are not pinned, one for each streaming slot.
pub(crate) fn home(needs: &[Need], residence: &Residence) -> Home {
    let mut home: Home = Vec::new();
    for segment in needs.iter().flat_map(|n| &n.automatic) {
        if home.len() < residence.streaming as usize
            && !residence.pinned.contains(segment)
            && !home.contains(&Some(*segment))
        {
            home.push(Some(*segment));
        }
    }
    home.resize(residence.streaming as usize, None);
    home
}

struct SlotState {
    content: Option<u32>,
    visit: Option<u32>,
    /// Boundary from which the slot is free of its last content.
    free_since: usize,
    last_use: usize,
    used: bool,
    pass: Pass,
}

impl SlotState {
    fn used_at(&mut self, t: usize, pass: Pass) {
        (self.last_use, self.used, self.pass) = (t, true, pass);
    }
}

/// Plans the loads of one program. `kept` is the home that it begins and ends in; without one it begins and ends
/// with nothing resident.
pub(crate) fn schedule(needs: &[Need], residence: &Residence, kept: Option<&Home>) -> Schedule {
    let steps = needs.len();
    let mut out = Schedule { found: vec![Vec::new(); steps], ..Default::default() };
    // Next uses of each automatic segment, last first, so that the next one is popped.
    let mut uses: std::collections::BTreeMap<u32, Vec<usize>> = Default::default();
    for (t, need) in needs.iter().enumerate().rev() {
        for s in &need.automatic {
            uses.entry(*s).or_default().push(t);
        }
    }
    let mut last_of_visit: std::collections::BTreeMap<u32, usize> = Default::default();
    for (t, need) in needs.iter().enumerate() {
        if let Some((_, visit)) = need.by_hand {
            last_of_visit.insert(visit, t);
        }
    }
    let empty =
        |content| SlotState { content, visit: None, free_since: 0, last_use: 0, used: false, pass: Pass::Forward };
    let mut slots: Vec<SlotState> = match kept {
        Some(home) => home.iter().map(|c| empty(*c)).collect(),
        None => (0..residence.streaming).map(|_| empty(None)).collect(),
    };
    // Pinned segments are always there in a kept set; otherwise they come with their first use.
    let mut pinned: std::collections::BTreeMap<u32, (usize, Pass)> = Default::default();
    if kept.is_some() {
        pinned.extend(residence.pinned.iter().map(|s| (*s, (0, Pass::Forward))));
    }

    for (t, need) in needs.iter().enumerate() {
        let pass = need.pass.unwrap_or(Pass::Forward);
        for s in &need.automatic {
            if let Some(list) = uses.get_mut(s) {
                list.pop();
            }
        }
        for s in need.automatic.iter().copied() {
            if residence.pinned.contains(&s) {
                let slot = WeightSlot::Pinned(s);
                if !pinned.contains_key(&s) {
                    out.loads.push(Load { segment: s, slot, from: 0, by: t, pass });
                }
                pinned.insert(s, (t, pass));
                out.found[t].push((s, slot));
                continue;
            }
            let k = match slots.iter().position(|x| x.content == Some(s) && x.visit.is_none()) {
                Some(k) => k,
                None => {
                    let k = victim(&slots, s, need, &uses, kept, steps);
                    let from = vacate(&mut slots[k], k, &mut out);
                    out.loads.push(Load { segment: s, slot: WeightSlot::Streaming(k as u32), from, by: t, pass });
                    slots[k].content = Some(s);
                    k
                }
            };
            slots[k].used_at(t, pass);
            out.found[t].push((s, WeightSlot::Streaming(k as u32)));
        }
        if let Some((s, visit)) = need.by_hand {
            let k = match slots.iter().position(|x| x.content == Some(s) && x.visit == Some(visit)) {
                Some(k) => k,
                None => {
                    let k = victim(&slots, s, need, &uses, kept, steps);
                    vacate(&mut slots[k], k, &mut out);
                    // By hand means here: the window opens where the user asked for it.
                    out.loads.push(Load { segment: s, slot: WeightSlot::Streaming(k as u32), from: t, by: t, pass });
                    slots[k].content = Some(s);
                    slots[k].visit = Some(visit);
                    k
                }
            };
            slots[k].used_at(t, pass);
            out.found[t].push((s, WeightSlot::Streaming(k as u32)));
            if last_of_visit.get(&visit) == Some(&t) {
                vacate(&mut slots[k], k, &mut out);
            }
        }
        // A set that keeps nothing releases a segment just after its last use.
        if kept.is_none() {
            for (k, slot) in slots.iter_mut().enumerate() {
                if let Some(s) = slot.content
                    && slot.visit.is_none()
                    && uses.get(&s).is_none_or(|list| list.is_empty())
                {
                    vacate(slot, k, &mut out);
                }
            }
            let done: Vec<u32> =
                pinned.keys().copied().filter(|s| uses.get(s).is_none_or(|list| list.is_empty())).collect();
            for s in done {
                if let Some((last, pass)) = pinned.remove(&s) {
                    out.evicts.push(Evict { segment: s, slot: WeightSlot::Pinned(s), at: last + 1, pass });
                }
            }
        }
    }
    if let Some(home) = kept {
        for (k, want) in home.iter().enumerate() {
            if let Some(s) = want
                && slots[k].content != Some(*s)
            {
                let from = vacate(&mut slots[k], k, &mut out);
                out.loads.push(Load {
                    segment: *s,
                    slot: WeightSlot::Streaming(k as u32),
                    from,
                    by: steps,
                    pass: Pass::Forward,
                });
                slots[k].content = Some(*s);
            }
        }
    }
    out
}

/// The streaming slot that gives way to segment `incoming`: an empty one, else the one whose content is used furthest
/// in the future. Among equals the slot that `incoming` has at home, so that going home costs no load of its own; then
/// the one that was used longest ago, since a load may begin there earliest.
fn victim(
    slots: &[SlotState],
    incoming: u32,
    need: &Need,
    uses: &std::collections::BTreeMap<u32, Vec<usize>>,
    kept: Option<&Home>,
    steps: usize,
) -> usize {
    let home_of = |k: usize, s: u32| kept.is_some_and(|home| home.get(k) == Some(&Some(s)));
    let next = |k: usize| -> usize {
        let Some(s) = slots[k].content else { return usize::MAX };
        let needed_now = match slots[k].visit {
            Some(_) => slots[k].visit == need.by_hand.map(|b| b.1),
            None => need.automatic.contains(&s),
        };
        if needed_now {
            return 0;
        }
        let next = uses.get(&s).and_then(|list| list.last().copied());
        next.unwrap_or(if home_of(k, s) { steps } else { steps + 1 })
    };
    let since = |k: usize| if slots[k].used { slots[k].last_use + 1 } else { slots[k].free_since };
    let key = |k: usize| (next(k), home_of(k, incoming), std::cmp::Reverse(since(k)), std::cmp::Reverse(k));
    (0..slots.len()).max_by_key(|k| key(*k)).unwrap_or(0)
}

/// Ends a slot's content; returns the boundary from which the slot may be filled.
fn vacate(slot: &mut SlotState, k: usize, out: &mut Schedule) -> usize {
    if let Some(segment) = slot.content.take() {
        // Content kept from home and not used yet is given up at the start.
        slot.free_since = if slot.used { slot.last_use + 1 } else { 0 };
        let at = slot.free_since;
        out.evicts.push(Evict { segment, slot: WeightSlot::Streaming(k as u32), at, pass: slot.pass });
        (slot.visit, slot.used) = (None, false);
    }
    slot.free_since
}

#[cfg(test)]
mod tests {
    use super::*;

    fn palindrome(layers: u32) -> Vec<Need> {
        let forward = (0..layers).map(|s| (s, Pass::Forward));
        let backward = (0..layers).rev().map(|s| (s, Pass::Backward));
        forward.chain(backward).map(|(s, pass)| Need { automatic: vec![s], by_hand: None, pass: Some(pass) }).collect()
    }

    #[test]
    fn a_palindrome_costs_two_loads_for_each_segment_that_does_not_fit() {
        for layers in 2..=13u32 {
            let needs = palindrome(layers);
            for c in 1..layers {
                let streaming = c.min(2);
                let residence = Residence { pinned: (0..c - streaming).collect(), streaming };
                let home = home(&needs, &residence);
                let plan = schedule(&needs, &residence, Some(&home));
                assert_eq!(plan.loads.len() as u32, 2 * (layers - c), "{layers} layers, room for {c}");
            }
        }
    }

    #[test]
    fn with_two_streaming_slots_every_load_has_a_step_to_run_in() {
        for layers in 3..=13 {
            let needs = palindrome(layers);
            let residence = Residence { pinned: BTreeSet::new(), streaming: 2 };
            let home = home(&needs, &residence);
            let plan = schedule(&needs, &residence, Some(&home));
            assert!(plan.loads.iter().all(|l| l.by > l.from), "{layers} layers: {:?}", plan.loads);
        }
    }

    #[test]
    fn a_cycle_pins_all_but_one_and_loads_the_rest() {
        let needs: Vec<Need> =
            (0..8).map(|s| Need { automatic: vec![s], by_hand: None, pass: Some(Pass::Forward) }).collect();
        let residence = Residence { pinned: (0..3).collect(), streaming: 1 };
        let home = home(&needs, &residence);
        assert_eq!(schedule(&needs, &residence, Some(&home)).loads.len(), 8 - 4 + 1);
    }

    #[test]
    fn by_hand_means_loaded_at_the_visit_and_released_after_it() {
        let mut needs = Vec::new();
        for visit in 0..4 {
            needs.push(Need { automatic: vec![], by_hand: Some((visit % 2, visit)), pass: Some(Pass::Forward) });
        }
        let plan = schedule(&needs, &Residence { pinned: BTreeSet::new(), streaming: 2 }, None);
        assert_eq!((plan.loads.len(), plan.evicts.len()), (4, 4));
        assert!(plan.loads.iter().all(|l| l.from == l.by));
        assert!(plan.evicts.iter().enumerate().all(|(i, e)| e.at == i + 1));
    }
}
