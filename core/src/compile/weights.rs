//! What the weights ask of the slot table, and which of them stay within a budget.
//!
//! Acceptance is monotone: the floor is one slot for each segment that a step reads, and whatever the budget has above
//! it only adds slots. So more memory never means more loads.

use std::collections::BTreeSet;

use super::plan::Ring;
use super::residency::{Need, Residence};
use super::rings::MAX_CHUNK;

/// What the weights ask of the slot table.
pub(super) struct WeightsShape {
    /// Per automatic segment, in order of first use: (segment, buffers, uses).
    pub(super) automatic: Vec<(u32, Vec<u64>, usize)>,
    /// Buffers of every segment.
    pub(super) layouts: Vec<Vec<u64>>,
    /// Segments used by hand.
    pub(super) by_hand: BTreeSet<u32>,
    /// Most segments that one step reads.
    pub(super) at_once: u32,
    /// Weight bytes touched.
    pub(super) touched: u64,
    /// Per program, per step.
    pub(super) needs: Vec<Vec<Need>>,
}

/// Elementwise largest: the buffers of a slot that each of these segments fits in.
pub(super) fn envelope<'a>(layouts: impl Iterator<Item = &'a Vec<u64>>) -> Vec<u64> {
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
    pub(super) fn largest(&self) -> Vec<u64> {
        envelope(self.used().map(|s| &self.layouts[s as usize]))
    }

    pub(super) fn used(&self) -> impl Iterator<Item = u32> + '_ {
        self.automatic.iter().map(|(s, ..)| *s).chain(self.by_hand.iter().copied())
    }

    pub(super) fn floor_slots(&self) -> u64 {
        u64::from(self.at_once) * self.largest().iter().sum::<u64>()
    }

    /// With everything resident: each automatic segment in a slot of its own, and the by-hand ones' slots.
    pub(super) fn all_slots(&self) -> u64 {
        let own: u64 = self.automatic.iter().flat_map(|(_, b, _)| b).sum();
        let by_hand: u64 = envelope(self.by_hand.iter().map(|s| &self.layouts[*s as usize])).iter().sum();
        (own + by_hand).max(self.floor_slots())
    }

    /// Chunk of the upload ring at the floor: a 64th of the largest segment, in whole 4 KiB.
    pub(super) fn floor_ring(&self) -> Ring {
        let largest: u64 = self.largest().iter().sum();
        Ring { chunk: (largest / 64).next_multiple_of(4 << 10).clamp(4 << 10, MAX_CHUNK), chunks: 1 }
    }

    /// The best residence within so many bytes of weight slots, which are at least the floor's.
    pub(super) fn reside(&self, bytes: u64) -> Residence {
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

    pub(super) fn streaming_buffers(&self, residence: &Residence) -> Vec<u64> {
        // A segment that is used by hand as well streams even where it is pinned.
        let streams = |s: &u32| !residence.pinned.contains(s) || self.by_hand.contains(s);
        envelope(self.used().filter(streams).map(|s| &self.layouts[s as usize]))
    }

    pub(super) fn slot_bytes(&self, residence: &Residence) -> u64 {
        let pinned: u64 = residence.pinned.iter().flat_map(|s| &self.layouts[*s as usize]).sum();
        pinned + u64::from(residence.streaming) * self.streaming_buffers(residence).iter().sum::<u64>()
    }
}
