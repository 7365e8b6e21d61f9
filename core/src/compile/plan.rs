//! Plans: flat lists of actions, with everything's place. Pure data.
//!
//! A plan can be printed, compared, simulated and verified without a GPU. The engine's only decisions are here;
//! the stream that runs a plan decides nothing.

use std::fmt;
use std::sync::Arc;

use ebbtide_shaders::Shader;
use serde::Serialize;

use crate::caps::{ALIGN, MAX_WEIGHT_BUFFER};
use crate::error::{Bytes, Error, Result};
use crate::event::Pass;
use crate::graph::{HookWhen, Tensor};
use crate::weights::{Catalog, Segment, WeightId};

/// What device bytes are used for. A slot belongs to one category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the design names them
pub enum Category {
    Weights,
    Folded,
    Activations,
    Gradients,
    Kv,
    Workspace,
    Adapters,
    Optimizer,
    Upload,
    Readback,
    Uniforms,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 11] = [
        Category::Weights,
        Category::Folded,
        Category::Activations,
        Category::Gradients,
        Category::Kv,
        Category::Workspace,
        Category::Adapters,
        Category::Optimizer,
        Category::Upload,
        Category::Readback,
        Category::Uniforms,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Folded => "folded",
            Category::Activations => "activations",
            Category::Gradients => "gradients",
            Category::Kv => "kv",
            Category::Workspace => "workspace",
            Category::Adapters => "adapters",
            Category::Optimizer => "optimizer",
            Category::Upload => "upload",
            Category::Readback => "readback",
            Category::Uniforms => "uniforms",
        }
    }
}

/// Bytes by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakdown([u64; 11]);

impl Breakdown {
    /// Adds bytes to a category.
    pub fn add(&mut self, category: Category, bytes: u64) {
        self.0[category as usize] += bytes;
    }

    /// Takes bytes from a category.
    pub fn sub(&mut self, category: Category, bytes: u64) {
        self.0[category as usize] = self.0[category as usize].saturating_sub(bytes);
    }

    /// Bytes of a category.
    pub fn get(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Sum over all categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Categories that hold something.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|c| (c, self.get(c))).filter(|(_, b)| *b > 0)
    }
}

impl Serialize for Breakdown {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.iter().map(|(c, b)| (c.name(), b)))
    }
}

/// A slot of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct SlotId(pub u32);

impl SlotId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A place in device memory: a row of buffers, made once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Slot {
    /// What its bytes count as.
    pub category: Category,
    /// Bytes of each buffer.
    pub buffers: Vec<u64>,
    /// Made by `Alloc` and destroyed by `Free` instead of living as long as the set (`keep_free: 0`).
    pub dynamic: bool,
}

impl Slot {
    /// Bytes of all its buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }
}

/// A ring of equal chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ring {
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Number of chunks.
    pub chunks: u32,
}

impl Ring {
    /// Bytes of the ring.
    pub fn bytes(&self) -> u64 {
        self.chunk * u64::from(self.chunks)
    }
}

/// All device memory of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotTable {
    /// The slots.
    pub slots: Vec<Slot>,
    /// Host to device.
    pub upload: Ring,
    /// Device to host.
    pub readback: Ring,
    /// Bytes of the one uniform buffer.
    pub uniforms: u64,
}

/// Where a part of a segment lies in a slot that holds the segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The weight.
    #[serde(skip)]
    pub weight: WeightId,
    /// Its piece.
    pub piece: u32,
    /// Which buffer of the slot.
    pub buffer: u32,
    /// First byte there.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// How a segment lies in a slot.
#[derive(Clone, Debug, Serialize)]
pub struct SegmentLayout {
    /// The segment's name.
    pub name: Arc<str>,
    /// Its identity in the catalog.
    #[serde(skip)]
    pub segment: Segment,
    /// Its parts, in file order.
    pub places: Vec<Place>,
    /// Bytes used of each buffer, a multiple of 4.
    pub buffers: Vec<u64>,
    /// Weight bytes, without padding.
    pub bytes: u64,
}

impl SegmentLayout {
    /// Lays a segment's parts behind one another at multiples of [`ALIGN`], none across two buffers.
    /// Parts that `used` denies are left out: nothing reads them.
    pub(crate) fn new(
        segment: &Segment,
        catalog: &Catalog,
        used: &dyn Fn(WeightId, u32) -> bool,
    ) -> Result<SegmentLayout> {
        let mut parts: Vec<(usize, std::ops::Range<u64>, WeightId, u32)> = Vec::new();
        for entry in segment.entries.iter() {
            let weight = catalog.weight(entry.weight);
            let piece = weight.pieces.get(entry.piece as usize).ok_or_else(|| Error::NotFound {
                what: "weight piece",
                name: format!("{} [{}]", entry.name, entry.piece),
                hint: None,
            })?;
            let key = (weight.source, piece.range.clone(), entry.weight, entry.piece);
            if piece.range.start < piece.range.end && used(entry.weight, entry.piece) && !parts.contains(&key) {
                parts.push(key);
            }
        }
        parts.sort_by_key(|(source, range, ..)| (*source, range.start));
        let (mut places, mut buffers, mut bytes) = (Vec::new(), Vec::<u64>::new(), 0);
        for (_, range, weight, piece) in parts {
            let size = range.end - range.start;
            let padded = size.next_multiple_of(4);
            let start = buffers.last().map_or(0, |used| used.next_multiple_of(ALIGN));
            let start = if buffers.is_empty() || start + padded > MAX_WEIGHT_BUFFER {
                buffers.push(0);
                0
            } else {
                start
            };
            let last = buffers.len() - 1;
            buffers[last] = start + padded;
            bytes += size;
            places.push(Place { weight, piece, buffer: last as u32, offset: start, bytes: size });
        }
        Ok(SegmentLayout { name: segment.name.clone(), segment: segment.clone(), places, buffers, bytes })
    }

    /// Device bytes, with padding.
    pub fn device_bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }

    pub(crate) fn place(&self, weight: WeightId, piece: u32) -> Option<&Place> {
        self.places.iter().find(|p| p.weight == weight && p.piece == piece)
    }
}

/// What a binding must find in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// A part of a segment (index into [`PlanSet::segments`](super::PlanSet)).
    Weight {
        /// The segment.
        segment: u32,
        /// The weight.
        weight: WeightId,
        /// Its piece.
        piece: u32,
    },
    /// A value of the program's graph.
    Value(Tensor),
    /// A state array (index into [`PlanSet::states`](super::PlanSet)).
    State(u32),
    /// A folded constant (index into [`PlanSet::folds`](super::PlanSet)).
    Folded(u32),
}

/// One storage binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// What is read or written.
    pub content: Content,
    /// The slot.
    pub slot: SlotId,
    /// The buffer of the slot.
    pub buffer: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes, a multiple of 4.
    pub size: u64,
    /// Whether the kernel writes it.
    pub write: bool,
}

/// A pipeline: a shader with its constants.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The shader.
    pub shader: &'static Shader,
    /// Values of its overrides, in the shader's order.
    pub overrides: [u32; 6],
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Kernel) -> bool {
        self.shader.name == other.shader.name && self.overrides == other.overrides
    }
}

impl Eq for Kernel {}

impl std::hash::Hash for Kernel {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.shader.name.hash(state);
        self.overrides.hash(state);
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Source bytes into a slot: any time after this action's place in the list and before action `by`.
    Load {
        /// The segment (index into the set's).
        segment: u32,
        /// The slot.
        slot: SlotId,
        /// The first action that may need it.
        by: u32,
        /// The pass that asked for it.
        pass: Pass,
    },
    /// The slot may be given to others.
    Evict {
        /// The segment.
        segment: u32,
        /// The slot.
        slot: SlotId,
        /// The pass of its last use.
        pass: Pass,
    },
    /// One kernel.
    Dispatch {
        /// The pipeline.
        kernel: Kernel,
        /// Its storage bindings, in the shader's order.
        bindings: Arc<[Binding]>,
        /// Offset of its parameters in the uniform buffer.
        params: u32,
        /// Workgroups in x and y.
        grid: [u32; 2],
        /// Multiply-adds, an estimate.
        work: u64,
    },
    /// An input of the caller into its slot, through the ring.
    Upload {
        /// Index of the input in the program's inputs.
        input: u32,
        /// Where it goes.
        to: Binding,
    },
    /// The rows of an embedding that this batch needs, from the file into a slot, through the ring.
    LoadRows {
        /// The weight.
        weight: WeightId,
        /// Index of the input that holds the ids.
        input: u32,
        /// Where the rows go.
        to: Binding,
    },
    /// An output, through the ring.
    Download {
        /// Index of the output in the program's outputs.
        output: u32,
        /// Where it is.
        from: Binding,
    },
    /// Makes a dynamic slot.
    Alloc {
        /// The slot.
        slot: SlotId,
    },
    /// Destroys a dynamic slot and waits until that is seen.
    Free {
        /// The slot.
        slot: SlotId,
    },
    /// Calls the user.
    Hook {
        /// Its name.
        name: Arc<str>,
        /// The moment.
        when: HookWhen,
        /// The pass.
        pass: Pass,
        /// The value, for [`HookWhen::Value`].
        value: Option<Binding>,
    },
}

/// A named value that crosses between caller and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: Arc<str>,
    /// Its bytes.
    pub bytes: u64,
    /// Its shape.
    pub shape: crate::graph::Shape,
}

/// A folded constant of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoldPort {
    /// What it is.
    pub name: String,
    /// Identity of what it computes from which bytes.
    #[serde(skip)]
    pub key: String,
    /// The slot; small folds share one.
    pub slot: SlotId,
    /// First byte in the slot.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A state array of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatePort {
    /// Its name.
    pub name: Arc<str>,
    /// Its bytes, f32.
    pub bytes: u64,
    /// The slot that it alone uses.
    pub slot: SlotId,
    /// Undefined at home.
    pub scratch: bool,
}

/// One program's actions.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The program's name.
    pub name: Arc<str>,
    /// The actions, in order.
    pub actions: Vec<Action>,
    /// The inputs.
    pub inputs: Vec<Port>,
    /// The outputs.
    pub outputs: Vec<Port>,
    /// Index of the first update: from here on state is written, and nothing can fail but the device.
    pub updates_from: u32,
    /// Indices of `Load`, `Upload` and `LoadRows` actions in the order in which their bytes go through the ring.
    pub fills: Vec<u32>,
}

impl Plan {
    /// A plan that does nothing.
    pub(crate) fn nothing(name: &str) -> Plan {
        Plan { name: name.into(), actions: vec![], inputs: vec![], outputs: vec![], updates_from: 0, fills: vec![] }
    }

    /// The slots that an action touches.
    fn slots_of(action: &Action) -> Vec<SlotId> {
        match action {
            Action::Load { slot, .. } | Action::Evict { slot, .. } | Action::Alloc { slot } | Action::Free { slot } => {
                vec![*slot]
            }
            Action::Dispatch { bindings, .. } => bindings.iter().map(|b| b.slot).collect(),
            Action::Upload { to, .. } | Action::LoadRows { to, .. } => vec![to.slot],
            Action::Download { from, .. } => vec![from.slot],
            Action::Hook { value, .. } => value.iter().map(|b| b.slot).collect(),
        }
    }

    /// Makes slots just before their first action: temporary ones until just after their last, kept ones for good.
    pub(crate) fn make_slots(&mut self, temporary: &dyn Fn(SlotId) -> bool, kept: &dyn Fn(SlotId) -> bool) {
        let mut spans: std::collections::BTreeMap<SlotId, (usize, usize)> = Default::default();
        for (i, action) in self.actions.iter().enumerate() {
            for slot in Plan::slots_of(action) {
                spans.entry(slot).or_insert((i, i)).1 = i;
            }
        }
        let (mut first, mut last) = (vec![Vec::new(); self.actions.len()], vec![Vec::new(); self.actions.len()]);
        for (slot, (from, to)) in &spans {
            if temporary(*slot) || kept(*slot) {
                first[*from].push(*slot);
            }
            if temporary(*slot) {
                last[*to].push(*slot);
            }
        }
        let (mut actions, mut moved) = (Vec::new(), vec![0u32; self.actions.len() + 1]);
        for (i, action) in std::mem::take(&mut self.actions).into_iter().enumerate() {
            actions.extend(first[i].iter().map(|slot| Action::Alloc { slot: *slot }));
            moved[i] = actions.len() as u32;
            actions.push(action);
            actions.extend(last[i].iter().map(|slot| Action::Free { slot: *slot }));
        }
        if let Some(end) = moved.last_mut() {
            *end = actions.len() as u32;
        }
        for action in &mut actions {
            if let Action::Load { by, .. } = action {
                *by = moved[*by as usize];
            }
        }
        (self.updates_from, self.actions) = (actions.len() as u32, actions);
    }

    /// Number of loads.
    pub fn loads(&self) -> usize {
        self.actions.iter().filter(|a| matches!(a, Action::Load { .. })).count()
    }

    /// Multiply-adds of its dispatches, an estimate.
    pub fn work(&self) -> u64 {
        let work = |a: &Action| if let Action::Dispatch { work, .. } = a { *work } else { 0 };
        self.actions.iter().map(work).fold(0, u64::saturating_add)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan `{}`: {} actions", self.name, self.actions.len())?;
        for (i, action) in self.actions.iter().enumerate() {
            match action {
                Action::Load { segment, slot, by, .. } => writeln!(f, "{i:6} load #{segment} -> s{} by {by}", slot.0)?,
                Action::Evict { segment, slot, .. } => writeln!(f, "{i:6} evict #{segment} from s{}", slot.0)?,
                Action::Dispatch { kernel, bindings, grid, .. } => {
                    write!(f, "{i:6} {}", kernel.shader.name)?;
                    for b in bindings.iter() {
                        write!(f, " {}s{}.{}+{}", if b.write { ">" } else { "" }, b.slot.0, b.buffer, b.offset)?;
                    }
                    writeln!(f, " {}x{}", grid[0], grid[1])?;
                }
                Action::Upload { input, to } => {
                    writeln!(f, "{i:6} upload {} -> s{}", self.inputs[*input as usize].name, to.slot.0)?
                }
                Action::LoadRows { input, to, .. } => {
                    writeln!(f, "{i:6} load rows of {} -> s{}", self.inputs[*input as usize].name, to.slot.0)?;
                }
                Action::Download { output, from } => {
                    writeln!(f, "{i:6} download {} <- s{}", self.outputs[*output as usize].name, from.slot.0)?;
                }
                Action::Alloc { slot } => writeln!(f, "{i:6} alloc s{}", slot.0)?,
                Action::Free { slot } => writeln!(f, "{i:6} free s{}", slot.0)?,
                Action::Hook { name, when, .. } => writeln!(f, "{i:6} hook {name} {when:?}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, slot) in self.slots.iter().enumerate() {
            writeln!(f, "s{i}: {} {}", slot.category.name(), Bytes(slot.bytes()))?;
        }
        writeln!(
            f,
            "upload {} x {}, readback {} x {}",
            self.upload.chunks,
            Bytes(self.upload.chunk),
            self.readback.chunks,
            Bytes(self.readback.chunk)
        )?;
        writeln!(f, "uniforms {}", Bytes(self.uniforms))
    }
}
