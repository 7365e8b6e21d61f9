//! What to compute: pure data that knows neither memory nor GPU.
//!
//! Nodes stand in the order in which they run. A node gives one value, named by [`Tensor`]; its operands come
//! before it, so there are no cycles to check. Building is checked: a shape that does not fit is an error where
//! the node is made, never later.

mod arithmetic;
mod autodiff;
mod derivative;
mod op;
mod shape;
mod versions;
mod views;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

pub(crate) use autodiff::Sinks;
pub use op::{Binary, Fold, Node, Op, Region, StateSpec, Unary, WeightPart};
pub use shape::{MAX_RANK, Shape, View};

use crate::compile::Category;
use crate::error::{Error, Result};
use crate::event::Pass;
use crate::nn::NnOp;
use crate::weights::{Catalog, DType, Segment};

/// A value in a graph. Cheap to copy; meaningless in another graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tensor(pub(crate) u32);

impl Tensor {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The moment at which a hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HookWhen {
    /// All earlier actions are submitted, no later one (loads apart) is recorded.
    Submitted,
    /// All earlier actions are seen done.
    Done,
    /// As `Done`, and the hook receives the tensor's bytes.
    Value,
}

/// A by-hand visit: the segment is loaded before the visit's first use and evicted after its last.
#[derive(Clone, Debug)]
pub(crate) struct Visit {
    pub segment: Segment,
}

/// What a custom function's backward is given.
#[derive(Clone, Copy, Debug)]
pub struct CustomGrad<'a> {
    /// The operands.
    pub inputs: &'a [Tensor],
    /// The result.
    pub output: Tensor,
    /// The gradient of the result.
    pub grad: Tensor,
    /// For each operand, whether its gradient is asked for.
    pub needed: &'a [bool],
}

/// Builds the gradients of a custom function's operands, one entry each.
pub type CustomVjp = Arc<dyn Fn(&mut Graph, CustomGrad<'_>) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Custom(pub CustomVjp);

impl std::fmt::Debug for Custom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("custom vjp")
    }
}

/// A computation being built.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    /// Where each node's value lies: the node whose storage it is, and how. Known when the node is made.
    places: Vec<(Tensor, View)>,
    segments: HashMap<u32, Segment>,
    visits: Vec<Visit>,
    open_visit: Option<u32>,
    /// The nodes of each block, which stand together.
    blocks: Vec<Range<usize>>,
    open_block: Option<u32>,
    customs: Vec<Custom>,
    /// Nodes that write state, in order: they run last.
    updates: Vec<Tensor>,
    weights: HashMap<(u32, Arc<str>), Tensor>,
    dtypes: HashMap<u32, DType>,
    in_backward: bool,
}

/// The weights of a segment inside [`Graph::with`], by name.
pub struct Weights {
    names: Vec<(Arc<str>, Tensor)>,
    segment: Arc<str>,
}

impl Weights {
    /// The weight of that name.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.names.iter().find(|(n, _)| &**n == name).map(|(_, t)| *t).ok_or_else(|| Error::NotFound {
            what: "weight",
            name: name.to_string(),
            hint: Some(format!(
                "segment `{}` has {}",
                self.segment,
                self.names.iter().map(|(n, _)| format!("`{n}`")).collect::<Vec<_>>().join(", ")
            )),
        })
    }
}

/// A graph with its outputs, ready to be compiled.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name, for people.
    pub name: Arc<str>,
    pub(crate) graph: Graph,
    pub(crate) outputs: Vec<(Arc<str>, Tensor)>,
    /// The same program with the values of its blocks kept instead of computed again: more memory, same bits.
    pub(crate) kept: Option<Box<Program>>,
    /// Values that are computed although no output needs them.
    pub(crate) roots: Vec<Tensor>,
}

impl Program {
    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Names and values of the outputs, in order.
    pub fn outputs(&self) -> &[(Arc<str>, Tensor)] {
        &self.outputs
    }

    /// Gives the program a name.
    pub fn named(mut self, name: &str) -> Program {
        self.name = name.into();
        self
    }
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// A value given by the caller at each run: f32, dense, row-major, of this shape.
    pub fn input(&mut self, name: &str, shape: impl AsRef<[u64]>) -> Result<Tensor> {
        if self.nodes.iter().any(|n| matches!(&n.op, Op::Input { name: other } if &**other == name)) {
            return Err(Error::Invalid { what: format!("input `{name}`"), reason: "the name is taken".into() });
        }
        let shape = Shape::new(shape.as_ref())?;
        Ok(self.push(Op::Input { name: name.into() }, vec![], shape))
    }

    /// As [`Graph::input`], of 32-bit integers: token ids, labels, positions.
    pub fn input_i32(&mut self, name: &str, shape: impl AsRef<[u64]>) -> Result<Tensor> {
        let x = self.input(name, shape)?;
        self.dtypes.insert(x.0, DType::I32);
        Ok(x)
    }

    /// Persistent f32 storage, shared by all programs that use the name; zero when a session begins.
    pub fn state(&mut self, name: &str, shape: Shape, category: Category) -> Tensor {
        self.push(Op::State(Arc::new(StateSpec { name: name.into(), category, scratch: false })), vec![], shape)
    }

    /// As [`Graph::state`], but written as the plan goes (gradients, caches) and undefined after a failed run.
    pub fn scratch(&mut self, name: &str, shape: Shape, category: Category) -> Tensor {
        self.push(Op::State(Arc::new(StateSpec { name: name.into(), category, scratch: true })), vec![], shape)
    }

    /// Marks what `build` adds as one block, whose values may be computed again in the backward pass instead of kept.
    /// Only `x` and the block's other operands from outside are kept. Blocks do not nest.
    pub fn block<T>(&mut self, build: impl FnOnce(&mut Graph) -> Result<T>) -> Result<T> {
        if self.open_block.is_some() {
            return Err(Error::Invalid { what: "block".into(), reason: "blocks do not nest".into() });
        }
        let first = self.nodes.len();
        self.open_block = Some(self.blocks.len() as u32);
        self.blocks.push(first..first);
        let result = build(self);
        self.open_block = None;
        if let Some(block) = self.blocks.last_mut() {
            block.end = self.nodes.len();
        }
        result
    }

    /// A function with a backward of its own: `forward` builds the value from `inputs`, `vjp` the gradients of
    /// `inputs`. Whatever `forward` builds is not differentiated through.
    pub fn custom(
        &mut self,
        inputs: &[Tensor],
        forward: impl FnOnce(&mut Graph, &[Tensor]) -> Result<Tensor>,
        vjp: impl Fn(&mut Graph, CustomGrad<'_>) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let value = forward(self, inputs)?;
        let shape = self.shape(value)?;
        self.customs.push(Custom(Arc::new(vjp)));
        let mut all = vec![value];
        all.extend(inputs);
        Ok(self.push(Op::Custom(self.customs.len() as u32 - 1), all, shape))
    }

    /// Rows of a weight by ids (an [`Graph::input_i32`]); read from the file in every run, whatever the budget.
    pub fn load_rows(&mut self, segment: &Segment, name: &str, ids: Tensor) -> Result<Tensor> {
        let entries: Vec<_> = segment.entries.iter().filter(|e| &*e.name == name).collect();
        let Some(first) = entries.first() else {
            return Err(missing_weight(segment, name));
        };
        if !matches!(self.node(ids).op, Op::Input { .. }) || self.dtype(ids) != DType::I32 {
            return Err(Error::Invalid { what: "load_rows".into(), reason: "the ids must be an integer input".into() });
        }
        let columns = first.shape.last().copied().unwrap_or(1);
        let shape = Shape::new(&[self.shape(ids)?.elements(), columns])?;
        let tensor = self.push(Op::LoadRows { weight: first.weight }, vec![ids], shape);
        self.dtypes.insert(tensor.0, first.dtype);
        Ok(tensor)
    }

    /// A node of a fused operation, with shapes of its value and of its further results.
    pub(crate) fn nn(
        &mut self,
        op: NnOp,
        inputs: Vec<Tensor>,
        shape: Shape,
        extras: &[Shape],
    ) -> (Tensor, Vec<Tensor>) {
        let tensor = self.push(Op::Nn(op), inputs, shape);
        let extras: Vec<Tensor> = extras.iter().map(|s| self.push(Op::Extra, vec![tensor], *s)).collect();
        self.nodes[tensor.index()].extras = extras.clone();
        (tensor, extras)
    }

    /// Adds a node that writes state. Updates run after everything else, in the order in which they are added.
    pub(crate) fn update(&mut self, op: NnOp, inputs: Vec<Tensor>) -> Tensor {
        let tensor = self.push(Op::Nn(op), inputs, Shape::scalar());
        self.updates.push(tensor);
        tensor
    }

    pub(crate) fn updates(&self) -> &[Tensor] {
        &self.updates
    }

    /// A frozen weight of a segment, as stored. All its row pieces in the segment make one tensor. The engine
    /// decides when its segment is loaded; see [`Graph::with`] to decide by hand.
    pub fn weight(&mut self, segment: &Segment, name: &str) -> Result<Tensor> {
        let key = (self.open_visit.map_or(u32::MAX, |v| v), Arc::<str>::from(format!("{}\0{name}", segment.id.0)));
        if let Some(tensor) = self.weights.get(&key) {
            return Ok(*tensor);
        }
        let entries: Vec<_> = segment.entries.iter().filter(|e| &*e.name == name).collect();
        let Some(first) = entries.first() else {
            return Err(missing_weight(segment, name));
        };
        let (dtype, mut dims) = (first.dtype, first.shape.clone());
        let mut rows = 0;
        let mut parts = Vec::with_capacity(entries.len());
        for entry in &entries {
            if entry.dtype != dtype || entry.shape.get(1..) != dims.get(1..) {
                return Err(Error::Shape { op: "weight", reason: format!("the pieces of `{name}` do not fit") });
            }
            let n = entry.shape.first().copied().unwrap_or(1);
            parts.push(WeightPart { weight: entry.weight, piece: entry.piece, first_row: rows, rows: n });
            rows += n;
        }
        if let Some(d) = dims.first_mut() {
            *d = rows;
        }
        let shape = Shape::new(&dims)?;
        self.segments.insert(segment.id.0, segment.clone());
        let tensor = self.push(Op::Weight { parts: parts.into(), segment: segment.id }, vec![], shape);
        self.dtypes.insert(tensor.0, dtype);
        self.weights.insert(key, tensor);
        Ok(tensor)
    }

    /// Streams a segment by hand: it is loaded just before the first node built here that reads it and evicted
    /// just after the last; in the backward pass the same happens around their gradients, in reverse. Obeyed at
    /// every budget. Visits do not nest.
    pub fn with<T>(&mut self, segment: &Segment, build: impl FnOnce(&mut Graph, &Weights) -> Result<T>) -> Result<T> {
        if self.open_visit.is_some() {
            return Err(Error::Invalid {
                what: format!("segment `{}`", segment.name),
                reason: "visits do not nest".into(),
            });
        }
        self.open_visit = Some(self.visits.len() as u32);
        self.visits.push(Visit { segment: segment.clone() });
        let result = self.weights_of(segment).and_then(|weights| build(self, &weights));
        self.open_visit = None;
        result
    }

    /// All weights of a segment, by name, without deciding when it is loaded.
    pub fn weights_of(&mut self, segment: &Segment) -> Result<Weights> {
        let mut names: Vec<(Arc<str>, Tensor)> = Vec::new();
        for entry in segment.entries.iter() {
            if !names.iter().any(|(n, _)| *n == entry.name) {
                let tensor = self.weight(segment, &entry.name)?;
                names.push((entry.name.clone(), tensor));
            }
        }
        Ok(Weights { names, segment: segment.name.clone() })
    }

    /// Calls the user's hook `name` at this place of the stream; gives `x` unchanged. With `mirrored` the
    /// backward pass calls it as well, where the gradient of `x` is known.
    pub fn hook(&mut self, x: Tensor, name: &str, when: HookWhen, mirrored: bool) -> Result<Tensor> {
        let shape = self.shape(x)?;
        let x = if when == HookWhen::Value { self.computed(x)? } else { x };
        Ok(self.push(Op::Hook { name: name.into(), when, mirrored }, vec![x], shape))
    }

    /// The shape of a value.
    pub fn shape(&self, x: Tensor) -> Result<Shape> {
        self.nodes.get(x.index()).map(|n| n.shape).ok_or(Error::NotFound {
            what: "tensor",
            name: x.0.to_string(),
            hint: Some("it belongs to another graph".into()),
        })
    }

    /// The dtype of a value: a weight's own, f32 for everything computed, and for what is not of this graph.
    pub fn dtype(&self, x: Tensor) -> DType {
        if x.index() >= self.nodes.len() {
            return DType::F32;
        }
        let (root, _) = self.storage(x);
        self.dtypes.get(&root.0).copied().unwrap_or(DType::F32)
    }

    /// A program that computes these values. Errors: a name given twice, a value of another graph.
    pub fn outputs(self, outputs: &[(&str, Tensor)]) -> Result<Program> {
        let mut named = Vec::with_capacity(outputs.len());
        let mut names = HashSet::with_capacity(outputs.len());
        let mut graph = self;
        for (name, tensor) in outputs {
            graph.shape(*tensor)?;
            if !names.insert(*name) {
                return Err(Error::Invalid { what: format!("output `{name}`"), reason: "the name is taken".into() });
            }
            named.push((Arc::from(*name), graph.computed(*tensor)?));
        }
        graph.check_versions(named.iter().map(|(_, t)| *t))?;
        Ok(Program { name: "program".into(), graph, outputs: named, kept: None, roots: Vec::new() })
    }

    /// A program that computes `loss` (one element) and its gradients with respect to `wrt`, as the outputs
    /// `loss`, `grad.0`, `grad.1` …
    pub fn value_and_grad(self, loss: Tensor, wrt: &[Tensor]) -> Result<Program> {
        self.both_ways(|mut g, recompute| {
            let grads = g.gradients(loss, wrt, recompute, None)?;
            let names: Vec<String> = (0..grads.len()).map(|i| format!("grad.{i}")).collect();
            let mut outputs = vec![("loss", loss)];
            outputs.extend(names.iter().map(String::as_str).zip(grads));
            Ok(g.outputs(&outputs)?.named("step"))
        })
    }

    /// Builds a program from this graph twice where it has blocks: recomputing their values, and keeping them.
    pub(crate) fn both_ways(self, build: impl Fn(Graph, bool) -> Result<Program>) -> Result<Program> {
        if self.blocks.is_empty() {
            return build(self, false);
        }
        let kept = build(self.clone(), false)?;
        let mut program = build(self, true)?;
        program.kept = Some(Box::new(kept));
        Ok(program)
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// A constant computed before the first step.
    pub(crate) fn folded(&mut self, index: u32, shape: Shape, dtype: DType) -> Tensor {
        let t = self.push(Op::Folded(index), vec![], shape);
        self.dtypes.insert(t.0, dtype);
        t
    }

    /// Puts folded constants in place of what computes them, each named by its index.
    pub(crate) fn become_folded(&mut self, folded: &[(Tensor, u32)]) {
        let dtypes: Vec<DType> = folded.iter().map(|(t, _)| self.dtype(*t)).collect();
        for ((t, index), dtype) in folded.iter().zip(dtypes) {
            let node = &mut self.nodes[t.index()];
            (node.op, node.into) = (Op::Folded(*index), None);
            node.inputs.clear();
            self.dtypes.insert(t.0, dtype);
        }
        let first = folded.iter().map(|(t, _)| t.index()).min().unwrap_or(self.nodes.len());
        self.settle(first..self.nodes.len());
    }

    /// Adds a node of another graph, its operands as `copied` says.
    pub(crate) fn copy_node(&mut self, from: &Graph, t: Tensor, copied: &HashMap<Tensor, Tensor>) -> Tensor {
        let node = from.node(t);
        let inputs = node.inputs.iter().map(|i| copied.get(i).copied().unwrap_or(*i)).collect();
        let new = self.push_with(node.op.clone(), inputs, node.shape, node.into.clone());
        if let Some(dtype) = from.dtypes.get(&t.0) {
            self.dtypes.insert(new.0, *dtype);
        }
        new
    }

    /// Sets the dtype that a node's value is stored in.
    pub(crate) fn set_dtype(&mut self, t: Tensor, dtype: DType) {
        self.dtypes.insert(t.0, dtype);
    }

    /// Makes a node write into a region of another tensor instead of into storage of its own.
    pub(crate) fn redirect(&mut self, t: Tensor, into: Tensor, region: Region) -> Tensor {
        let node = &mut self.nodes[t.index()];
        node.inputs.push(into);
        node.into = Some(region);
        self.settle(t.index()..self.nodes.len());
        t
    }

    /// Bytes of a value's elements in its dtype, in whole words.
    pub(crate) fn bytes_of(&self, x: Tensor) -> u64 {
        (self.node(x).shape.elements() * self.dtype(x).size()).next_multiple_of(4)
    }

    /// Bytes of a value's own storage, in whole words.
    pub(crate) fn bytes(&self, x: Tensor) -> u64 {
        let dtype = self.dtypes.get(&x.0).copied().unwrap_or(DType::F32);
        (self.node(x).shape.elements() * dtype.size()).next_multiple_of(4)
    }

    pub(crate) fn node(&self, x: Tensor) -> &Node {
        &self.nodes[x.index()]
    }

    /// Fails unless all segments are the catalog's own: ids of another one name other weights, or none.
    pub(crate) fn check_catalog(&self, catalog: &Catalog) -> Result<()> {
        let stranger = self.segments.values().find(|s| catalog.segment_by_id(s.id) != Some(s));
        stranger.map_or(Ok(()), |s| {
            Err(Error::Invalid {
                what: format!("segment `{}`", s.name),
                reason: "the program was built with another catalog than the one it is compiled with".into(),
            })
        })
    }

    pub(crate) fn visits(&self) -> &[Visit] {
        &self.visits
    }

    pub(crate) fn segment(&self, id: crate::weights::SegmentId) -> Option<&Segment> {
        self.segments.get(&id.0)
    }

    fn push(&mut self, op: Op, inputs: Vec<Tensor>, shape: Shape) -> Tensor {
        self.push_with(op, inputs, shape, None)
    }

    fn push_with(&mut self, op: Op, inputs: Vec<Tensor>, shape: Shape, into: Option<Region>) -> Tensor {
        let pass = if self.in_backward { Pass::Backward } else { Pass::Forward };
        let (visit, block) = (self.open_visit, self.open_block);
        self.push_node(Node { op, inputs, shape, pass, visit, block, into, extras: Vec::new() })
    }

    fn push_node(&mut self, node: Node) -> Tensor {
        let i = self.nodes.len();
        self.nodes.push(node);
        self.settle(i..i + 1);
        Tensor(i as u32)
    }

    /// Finds out where the values of these nodes lie; operands come first, so their places are known.
    fn settle(&mut self, nodes: Range<usize>) {
        for i in nodes {
            let place = self.place_of(i);
            match self.places.get_mut(i) {
                Some(known) => *known = place,
                None => self.places.push(place),
            }
        }
    }
}

fn missing_weight(segment: &Segment, name: &str) -> Error {
    Error::NotFound {
        what: "weight",
        name: name.into(),
        hint: Some(format!("segment `{}` does not hold it", segment.name)),
    }
}
