//! From programs and a budget to verified plans.
//!
//! ```text
//! programs ─► steps (kernels, live nodes only) ─► slots ─► residency within the budget ─► plans ─► verify
//! ```
//!
//! Everything here is pure. Acceptance is monotone: the floor is the sum of one defined slot table, a budget is
//! refused if and only if it is below that number, and above it the planner only adds.

mod actions;
mod assemble;
mod budget;
mod fold;
mod forecast;
mod lowering;
mod occupancy;
mod plan;
mod residency;
mod rings;
mod slots;
mod steps;
mod verify;
mod weights;

use std::collections::BTreeSet;

pub use budget::Budget;
pub use fold::{CompileReport, Stage};
pub use forecast::Forecast;
pub use occupancy::Occupied;
pub use plan::{
    Action, Binding, Breakdown, Category, Content, FoldPort, Kernel, Place, Plan, Port, Ring, SegmentLayout, Slot,
    SlotId, SlotTable, StatePort,
};
pub use verify::{verify, verify_prologue};

use serde::Serialize;

use crate::caps::Caps;
use crate::error::{Bytes, Error, Result};
use crate::graph::Program;
use crate::weights::Catalog;
use lowering::Lowering;
use residency::Residence;
use rings::{FLOOR_READBACK, grow};
use weights::WeightsShape;

/// Whether the values of marked blocks are kept for the backward pass or computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Kept where the budget holds everything with them, else computed again.
    #[default]
    Auto,
    /// Computed again.
    On,
    /// Kept; the floor is higher.
    Off,
}

/// How programs are lowered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// What becomes of the values of marked blocks. The results have the same bits.
    pub recompute: Recompute,
    /// The set runs one plan once: nothing is resident before or after it.
    pub once: bool,
    /// Compute constants in every step instead of once.
    pub no_fold: bool,
    /// `keep_free: 0`: weight slots are made before each load and really destroyed after each eviction.
    pub keep_free_0: bool,
}

/// Plans compiled together over one slot table.
#[derive(Clone, Debug)]
pub struct PlanSet {
    /// The plans, one a program, in the order given.
    pub plans: Vec<Plan>,
    /// From nothing to home: runs when a session begins, and after a step that failed.
    pub to_home: Plan,
    /// All device memory.
    pub table: SlotTable,
    /// The segments, with their layout.
    pub segments: Vec<SegmentLayout>,
    /// The state arrays.
    pub states: Vec<StatePort>,
    /// The folded constants.
    pub folds: Vec<FoldPort>,
    /// Computes the folded constants; runs once, before the other slots are made.
    pub prologue: Plan,
    /// What compiling does to the constants.
    pub report: CompileReport,
    /// Content of the uniform buffer.
    pub uniforms: Vec<u8>,
    /// Content of weight slots at home: (slot, segment).
    pub home: Vec<(SlotId, u32)>,
    /// Planned peak by category: the sum of the table (with `keep_free: 0`, its greatest value).
    pub planned: Breakdown,
    /// The bytes that may be used.
    pub budget: u64,
    /// The least budget that can be kept.
    pub floor: u64,
    /// What sets the floor.
    pub floor_set_by: String,
    /// The bytes with everything resident.
    pub all: u64,
    /// Weight bytes touched.
    pub weight_bytes: u64,
    /// The [`Catalog::fingerprint`] of the catalog it was compiled with.
    pub catalog: u64,
    /// Weight bytes held by resident segments.
    pub resident_bytes: u64,
    /// Whether block values are computed again in the backward pass.
    pub recomputes: bool,
    /// The options it was compiled with.
    pub options: Options,
}

impl PlanSet {
    /// Planned peak in bytes.
    pub fn planned_peak(&self) -> u64 {
        self.planned.total()
    }

    /// Weight bytes that one run of a plan copies to the device.
    pub fn streamed_bytes(&self, plan: usize) -> u64 {
        let loads = self.plans.get(plan).map(|p| p.actions.as_slice()).unwrap_or_default();
        loads
            .iter()
            .map(|a| match a {
                Action::Load { segment, .. } => self.segments[*segment as usize].bytes,
                _ => 0,
            })
            .sum()
    }
}

/// Compiles programs for a budget. Pure: no GPU, no weight byte is read. Refuses a budget below the floor.
pub fn compile(programs: &[Program], catalog: &Catalog, caps: &Caps, budget: Budget) -> Result<PlanSet> {
    compile_with(programs, catalog, caps, budget, Options::default())
}

/// As [`compile`], with options.
pub fn compile_with(
    programs: &[Program],
    catalog: &Catalog,
    caps: &Caps,
    budget: Budget,
    options: Options,
) -> Result<PlanSet> {
    if programs.is_empty() {
        return Err(Error::Invalid { what: "programs".into(), reason: "there are none to compile".into() });
    }
    programs.iter().try_for_each(|p| p.graph.check_catalog(catalog))?;
    let kept: Vec<&Program> = programs.iter().map(|p| p.kept.as_deref().unwrap_or(p)).collect();
    let again: Vec<&Program> = programs.iter().collect();
    let has_blocks = programs.iter().any(|p| p.kept.is_some());
    let (first, second) = match options.recompute {
        Recompute::Off => (kept, None),
        Recompute::On => (again, None),
        Recompute::Auto => (again, has_blocks.then_some(kept)),
    };
    let lean = Candidate::new(first, catalog, caps)?;
    let rich = second.map(|p| Candidate::new(p, catalog, caps)).transpose()?;
    // The floor is the lean one's; everything resident means everything, kept values too.
    let all = rich.as_ref().map_or(lean.all, |r| r.all.max(lean.all));
    let bytes = budget.resolve(lean.floor, lean.base, lean.shape.touched, all);
    if bytes < lean.floor {
        let set_by = lean.lowering.floor_set_by(&lean.shape);
        return Err(Error::BudgetBelowFloor { asked: Bytes(bytes), floor: Bytes(lean.floor), set_by });
    }
    // Of the lowering that sets it, whichever is taken.
    let (floor, set_by) = (lean.floor, lean.lowering.floor_set_by(&lean.shape));
    let recomputes = has_blocks && options.recompute != Recompute::Off && rich.as_ref().is_none_or(|r| bytes < r.all);
    let chosen = match rich {
        Some(rich) if !recomputes => rich,
        _ => lean,
    };
    let Candidate { mut lowering, shape, base, .. } = chosen;
    let residence = shape.reside(bytes - base);
    let known = catalog.fingerprint();
    // Everything resident includes what compiling needs.
    let unlimited = budget == Budget::All;
    let limits = Limits {
        budget: bytes,
        floor,
        all,
        base,
        touched: shape.touched,
        set_by,
        recomputes,
        unlimited,
        catalog: known,
    };
    let mut folded_set = None;
    let mut reasons = fold::Folding::default();
    for growth in [fold::GROWTH, 0] {
        if folded_set.is_none() && !(options.once || options.keep_free_0 || options.no_fold) {
            let folding = find_folds(&lowering, &shape, &residence, catalog, growth);
            folded_set = folded(&lowering, &folding, &residence, catalog, caps, &limits, options)?;
            reasons = folding;
        }
    }
    let set = match folded_set {
        Some(set) => set,
        None => {
            let mut set = lowering.finish(&shape, residence, limits, options)?;
            set.report.skipped = reasons.skipped;
            let unmade =
                reasons.folds.into_iter().map(|f| (f.name, "the budget does not hold it while compiling".into()));
            set.report.skipped.extend(unmade);
            set
        }
    };
    verify_prologue(&set, caps)?;
    for (i, plan) in set.plans.iter().chain([&set.to_home]).enumerate() {
        let home_at_entry = i < set.plans.len();
        verify(plan, &set, caps, home_at_entry)?;
    }
    Ok(set)
}

/// One way to lower the programs, with the sums that decide about budgets.
struct Candidate<'a> {
    lowering: Lowering<'a>,
    shape: WeightsShape,
    base: u64,
    floor: u64,
    all: u64,
}

impl<'a> Candidate<'a> {
    fn new(programs: Vec<&'a Program>, catalog: &Catalog, caps: &Caps) -> Result<Candidate<'a>> {
        let lowering = Lowering::new(programs, catalog, caps)?;
        let shape = lowering.weights_shape();
        let base = lowering.base_bytes(shape.floor_ring());
        let floor = base + shape.floor_slots();
        let (mut upload, mut readback, mut room) = (shape.floor_ring(), FLOOR_READBACK, u64::MAX);
        grow(&mut upload, &mut room, shape.largest().iter().sum());
        grow(&mut readback, &mut room, lowering.largest_output());
        let all = base + shape.all_slots() + (u64::MAX - room);
        Ok(Candidate { lowering, shape, base, floor, all })
    }
}

/// The constants that may be computed once: those of weights that stay.
fn find_folds(
    lowering: &Lowering<'_>,
    shape: &WeightsShape,
    residence: &Residence,
    catalog: &Catalog,
    growth: u64,
) -> fold::Folding {
    let resident = |id: crate::weights::WeightId| {
        shape.used().all(|s| {
            residence.pinned.contains(&s) && !shape.by_hand.contains(&s)
                || lowering.segments[s as usize].places.iter().all(|p| p.weight != id)
        })
    };
    let lives: Vec<Vec<bool>> = lowering.programs.iter().map(|p| steps::live(p)).collect();
    fold::analyse(&lowering.programs, &lives, catalog, &resident, growth)
}

/// The set with its constants folded, if there are any and the budget holds them.
fn folded(
    lowering: &Lowering<'_>,
    folding: &fold::Folding,
    residence: &Residence,
    catalog: &Catalog,
    caps: &Caps,
    limits: &Limits,
    options: Options,
) -> Result<Option<PlanSet>> {
    if folding.folds.is_empty() {
        return Ok(None);
    }
    let rewritten = folding.rewrite(&lowering.programs);
    let prologue = folding.program(&lowering.programs, catalog)?;
    let mut second = Lowering::with_folds(rewritten.iter().collect(), Some((folding, &prologue)), catalog, caps)?;
    let shape2 = second.weights_shape();
    let pinned: BTreeSet<_> = residence.pinned.iter().map(|s| lowering.segments[*s as usize].segment.id).collect();
    let streaming = if shape2.used().all(|s| pinned.contains(&second.segments[s as usize].segment.id)) {
        residence.streaming.min(shape2.by_hand.len() as u32)
    } else {
        residence.streaming
    };
    let pinned =
        (0..second.segments.len() as u32).filter(|s| pinned.contains(&second.segments[*s as usize].segment.id));
    let used: BTreeSet<u32> = shape2.used().collect();
    let residence2 = Residence { pinned: pinned.filter(|s| used.contains(s)).collect(), streaming };
    let base = second.base_bytes(shape2.floor_ring());
    let unlimited = limits.unlimited;
    let limits = Limits { base, set_by: limits.set_by.clone(), ..*limits };
    let mut set = second.finish(&shape2, residence2, limits, options)?;
    if unlimited {
        set.budget = set.budget.max(set.planned_peak());
        set.all = set.budget;
    }
    Ok((set.planned_peak() <= set.budget).then_some(set))
}

struct Limits {
    catalog: u64,
    unlimited: bool,
    touched: u64,
    recomputes: bool,
    budget: u64,
    floor: u64,
    all: u64,
    base: u64,
    set_by: String,
}
