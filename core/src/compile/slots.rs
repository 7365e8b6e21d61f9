//! Which values share a slot.
//!
//! Greedy by size: values are placed largest first, each in the first slot whose other values are never alive at
//! the same time, so a slot is as large as its first value and the rest fit. Two values of one step never share,
//! since WebGPU forbids a buffer as read and written in one dispatch. Programs of a set never run at once, so only
//! values of the same program stand in each other's way.

/// A value to be placed: alive from step `first` to step `last`, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub program: u32,
    pub first: u32,
    pub last: u32,
    pub bytes: u64,
}

/// When a slot is in use: (program, first step) → last step.
type Taken = std::collections::BTreeMap<(u32, u32), u32>;

/// The slot of each interval, and the bytes of each slot.
pub(crate) fn assign(intervals: &[Interval]) -> (Vec<u32>, Vec<u64>) {
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(intervals[*i].bytes), intervals[*i].program, intervals[*i].first, *i));
    let mut slots: Vec<(u64, Taken)> = Vec::new();
    let mut place = vec![0; intervals.len()];
    for i in order {
        let v = intervals[i];
        // Within a slot, intervals of a program are disjoint: only the last one that begins at or before `v.last`
        // can overlap it.
        let free = |taken: &Taken| {
            taken.range((v.program, 0)..=(v.program, v.last)).next_back().is_none_or(|(_, last)| *last < v.first)
        };
        let found = slots.iter().position(|(_, taken)| free(taken)).unwrap_or_else(|| {
            slots.push((v.bytes, Default::default()));
            slots.len() - 1
        });
        slots[found].1.insert((v.program, v.first), v.last);
        place[i] = found as u32;
    }
    (place, slots.into_iter().map(|(bytes, _)| bytes).collect())
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
}
