//! Which values share a slot.
//!
//! Greedy by size: values are placed largest first, each in the first slot whose other values are never alive at
//! the same time, so a slot is as large as its first value and the rest fit. Two values of one step never share,
//! since WebGPU forbids a buffer as read and written in one dispatch. Programs of a set never run at once, so only
//! values of the same program stand in each other's way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A value to be placed: alive from step `first` to step `last`, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub program: u32,
    pub first: u32,
    pub last: u32,
    pub bytes: u64,
}

/// A slot with the intervals placed in it: (program, first step) → last step. Within a program they are disjoint.
struct Slot {
    bytes: u64,
    taken: BTreeMap<(u32, u32), u32>,
}

impl Slot {
    /// Whether no interval in it meets `v`. Only the last one that begins at or before `v.last` can.
    fn is_free(&self, v: &Interval) -> bool {
        let before = self.taken.range((v.program, 0)..=(v.program, v.last)).next_back();
        before.is_none_or(|(_, last)| *last < v.first)
    }
}

/// The slot of each interval, and the bytes of each slot.
pub(crate) fn assign(intervals: &[Interval]) -> (Vec<u32>, Vec<u64>) {
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|i| (Reverse(intervals[*i].bytes), intervals[*i].program, intervals[*i].first, *i));
    let mut slots: Vec<Slot> = Vec::new();
    let mut place = vec![0; intervals.len()];
    let mut placed = 0;
    let alike = |a: &usize, b: &usize| {
        (intervals[*a].bytes, intervals[*a].program) == (intervals[*b].bytes, intervals[*b].program)
    };
    for group in order.chunk_by(alike) {
        // Asking every slot for every interval costs slots times intervals; walking along time costs what is placed.
        if group.len().saturating_mul(slots.len()) > placed {
            let mut sweep = Sweep::new(&slots, intervals[group[0]].program, group.len());
            for i in group {
                place[*i] = sweep.put(&intervals[*i], &mut slots);
            }
        } else {
            for i in group {
                let found = slots.iter().position(|s| s.is_free(&intervals[*i]));
                place[*i] = put(&intervals[*i], found, &mut slots);
            }
        }
        placed += group.len();
    }
    (place, slots.into_iter().map(|s| s.bytes).collect())
}

/// Puts `v` into the slot found, or into a new one.
fn put(v: &Interval, found: Option<usize>, slots: &mut Vec<Slot>) -> u32 {
    let slot = found.unwrap_or_else(|| {
        slots.push(Slot { bytes: v.bytes, taken: BTreeMap::new() });
        slots.len() - 1
    });
    slots[slot].taken.insert((v.program, v.first), v.last);
    slot as u32
}

/// First fit for intervals of a program in the order in which they begin.
struct Sweep {
    /// What was placed before, backwards in time.
    coming: Vec<Use>,
    /// Slots in use: (last step, slot, beginning of the slot's next use).
    busy: BinaryHeap<Reverse<(u32, u32, u64)>>,
    room: Room,
}

/// A use of a slot; `next` is when the one after it begins.
struct Use {
    first: u32,
    last: u32,
    slot: u32,
    next: u64,
}

impl Sweep {
    /// For up to `count` intervals.
    fn new(slots: &[Slot], program: u32, count: usize) -> Sweep {
        let mut room = Room::new(slots.len() + count);
        let mut coming = Vec::new();
        for (slot, taken) in slots.iter().enumerate() {
            let mut next = u64::MAX;
            for ((_, first), last) in taken.taken.range((program, 0)..=(program, u32::MAX)).rev() {
                coming.push(Use { first: *first, last: *last, slot: slot as u32, next });
                next = u64::from(*first);
            }
            room.set(slot, next);
        }
        coming.sort_unstable_by_key(|u| Reverse((u.first, u.slot)));
        Sweep { coming, busy: BinaryHeap::new(), room }
    }

    fn put(&mut self, v: &Interval, slots: &mut Vec<Slot>) -> u32 {
        loop {
            let begins = self.coming.last().map(|u| u.first).filter(|first| *first <= v.first);
            match self.busy.peek().copied() {
                Some(Reverse((last, slot, next))) if last < begins.unwrap_or(v.first) => {
                    self.busy.pop();
                    self.room.set(slot as usize, next);
                }
                _ => match self.coming.pop_if(|_| begins.is_some()) {
                    Some(u) => self.begin(u),
                    None => break,
                },
            }
        }
        let found = self.room.first_beyond(u64::from(v.last)).filter(|s| *s < slots.len());
        let next = found.map_or(u64::MAX, |s| self.room.get(s));
        let slot = put(v, found, slots);
        self.begin(Use { first: v.first, last: v.last, slot, next });
        slot
    }

    fn begin(&mut self, u: Use) {
        self.room.set(u.slot as usize, 0);
        self.busy.push(Reverse((u.last, u.slot, u.next)));
    }
}

/// Until when each slot is free (0: in use); finds the first that is free for long enough. A binary tree of greatest
/// values, its leaves last.
struct Room(Vec<u64>);

impl Room {
    fn new(slots: usize) -> Room {
        Room(vec![0; 2 * slots.next_power_of_two()])
    }

    fn get(&self, slot: usize) -> u64 {
        self.0[self.0.len() / 2 + slot]
    }

    fn set(&mut self, slot: usize, until: u64) {
        let mut at = self.0.len() / 2 + slot;
        self.0[at] = until;
        while at > 1 {
            at /= 2;
            self.0[at] = self.0[2 * at].max(self.0[2 * at + 1]);
        }
    }

    fn first_beyond(&self, step: u64) -> Option<usize> {
        if self.0[1] <= step {
            return None;
        }
        let mut at = 1;
        while at < self.0.len() / 2 {
            at = 2 * at + usize::from(self.0[2 * at] <= step);
        }
        Some(at - self.0.len() / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(first: u32, last: u32, bytes: u64) -> Interval {
        Interval { program: 0, first, last, bytes }
    }

    #[test]
    fn values_that_meet_in_a_step_never_share() {
        let (place, slots) = assign(&[v(0, 1, 8), v(1, 2, 8), v(2, 3, 8)]);
        assert_ne!(place[0], place[1]);
        assert_ne!(place[1], place[2]);
        assert_eq!(slots.iter().sum::<u64>(), 16);
    }

    #[test]
    fn programs_share_freely_and_small_values_fit_large_slots() {
        let other = Interval { program: 1, ..v(0, 9, 100) };
        let (_, slots) = assign(&[v(0, 9, 64), other]);
        assert_eq!(slots, [100]);
    }

    proptest::proptest! {
        #[test]
        fn it_is_first_fit(seeds in proptest::collection::vec((0u32..2, 0u32..60, 0u32..20, 1u64..5), 0..120)) {
            let intervals: Vec<Interval> = seeds
                .iter()
                .map(|(program, first, length, bytes)| Interval {
                    program: *program,
                    first: *first,
                    last: first + length,
                    bytes: *bytes,
                })
                .collect();
            let mut order: Vec<usize> = (0..intervals.len()).collect();
            order.sort_by_key(|i| (Reverse(intervals[*i].bytes), intervals[*i].program, intervals[*i].first, *i));
            let (mut slots, mut place): (Vec<Vec<usize>>, _) = (Vec::new(), vec![0; intervals.len()]);
            let meets = |a: &Interval, b: &Interval| a.program == b.program && a.first <= b.last && b.first <= a.last;
            for i in order {
                let fits = |slot: &Vec<usize>| !slot.iter().any(|j| meets(&intervals[i], &intervals[*j]));
                let found = slots.iter().position(fits).unwrap_or_else(|| {
                    slots.push(vec![]);
                    slots.len() - 1
                });
                slots[found].push(i);
                place[i] = found as u32;
            }
            let bytes: Vec<u64> = slots.iter().map(|s| intervals[s[0]].bytes).collect();
            proptest::prop_assert_eq!(assign(&intervals), (place, bytes));
        }
    }
}
