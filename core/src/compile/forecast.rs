//! What a plan set promises before anything runs: one struct for the command line, its JSON, the page and the events.

use serde::Serialize;

use super::{Breakdown, PlanSet};

/// The forecast of a run at a budget. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Version of these fields.
    pub format: u32,
    /// The bytes that may be used.
    pub budget_bytes: u64,
    /// The least budget that can be kept.
    pub floor_bytes: u64,
    /// The segment or action that sets the floor.
    pub floor_set_by: String,
    /// Device memory at its most, which is the sum of the slot table.
    pub peak_bytes: u64,
    /// The peak by category.
    pub peak_by_category: Breakdown,
    /// Weight bytes touched.
    pub weight_bytes: u64,
    /// Weight bytes that stay.
    pub resident_weights: u64,
    /// Segments loaded in an optimizer step of the longest rows.
    pub loads_per_step: u64,
    /// Weight bytes read in such a step.
    pub bytes_per_step: u64,
    /// Multiply-adds of such a step, an estimate.
    pub work_per_step: u64,
    /// Micro-batches that go through a segment together.
    pub micro_batches_at_once: u64,
    /// Whether block values are computed again in the backward pass.
    pub recomputes: bool,
}

impl PlanSet {
    /// The forecast of a step that runs the first plan so many times.
    pub fn forecast(&self, runs: u64, micro_batches_at_once: u64) -> Forecast {
        Forecast {
            format: 1,
            budget_bytes: self.budget,
            floor_bytes: self.floor,
            floor_set_by: self.floor_set_by.clone(),
            peak_bytes: self.planned_peak(),
            peak_by_category: self.planned,
            weight_bytes: self.weight_bytes,
            resident_weights: self.resident_bytes,
            loads_per_step: runs * self.plans.first().map_or(0, |p| p.loads() as u64),
            bytes_per_step: runs * self.streamed_bytes(0),
            work_per_step: runs * self.plans.first().map_or(0, super::Plan::work),
            micro_batches_at_once,
            recomputes: self.recomputes,
        }
    }
}
