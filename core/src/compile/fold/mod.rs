//! Constant folding that never holds a second copy of the model.
//!
//! What depends on weights and literals alone is computed once, before the first step, and what it consumed is not
//! kept. There is no evaluator: the fold is a program like any other, run as a prologue by the same stream, one fold
//! after the other through one source slot. So the memory of compiling is planned, verified and measured like that
//! of a step.
//!
//! Only *exact* folds are made here: the same kernels on the same operands, so no bit of any result changes.
//! Whether a fold is made is decided by storage identity, never by name:
//!
//! * its weights are resident; what streams, streams as stored;
//! * a copy in another layout is made only of a weight that nothing else uses: kernels read any layout;
//! * a result may be larger than what it frees by no more than 1 MiB.

mod report;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

pub use report::{CompileReport, Stage};

use super::plan::Category;
use crate::error::Result;
use crate::graph::{Graph, Node, Op, Program, Region, Tensor, Unary, View, WeightPart};
use crate::weights::{Catalog, Segment, SegmentEntry, SegmentId, WeightId};

/// What a fold may hold beyond what it frees.
pub(crate) const GROWTH: u64 = 1 << 20;

/// A constant that is computed once.
#[derive(Clone, Debug)]
pub(crate) struct Fold {
    /// What it is, for people.
    pub name: String,
    /// Identity of what it computes from which bytes, the same for equal folds of any program.
    pub key: String,
    /// Bytes of the result, in whole words.
    pub bytes: u64,
    /// One place where it stands.
    at: (usize, Tensor),
    /// All values that it replaces.
    occurrences: Vec<(usize, Tensor)>,
    /// The weights that it reads.
    sources: BTreeSet<Part>,
    source_bytes: u64,
    /// Whether it only copies a weight into another layout.
    layout: bool,
}

type Part = (WeightId, u32);

impl Fold {
    /// Bytes of the weights that it reads.
    pub fn source_bytes(&self) -> u64 {
        self.source_bytes
    }
}

/// The folds of a set of programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folding {
    pub folds: Vec<Fold>,
    /// Constants that are computed in every step, and why.
    pub skipped: Vec<(String, String)>,
    /// Folded weights that stay on the device all the same, and why.
    pub retained: Vec<(String, String)>,
    /// Bytes of weights that are not kept because folds consumed them.
    pub freed_bytes: u64,
    /// Bytes of folds whose weights are kept as well.
    pub duplicated_bytes: u64,
}

/// Names equal constants by equal numbers, across programs.
#[derive(Default)]
struct Interner {
    known: HashMap<String, u32>,
    keys: Vec<String>,
}

impl Interner {
    fn id(&mut self, key: String) -> u32 {
        *self.known.entry(key.clone()).or_insert_with(|| {
            self.keys.push(key);
            self.keys.len() as u32 - 1
        })
    }
}

/// How a constant is used by what is not constant.
struct Uses {
    /// The distinct views, by number, and the places of each.
    views: BTreeMap<u32, Vec<(usize, Tensor)>>,
    base: (usize, Tensor),
    base_places: Vec<(usize, Tensor)>,
    raw: bool,
}

/// Finds the folds. `resident` says whether a weight stays in device memory in all programs, `growth`
/// how much larger than what it frees a result may be.
pub(crate) fn analyse(
    programs: &[&Program],
    lives: &[Vec<bool>],
    catalog: &Catalog,
    resident: &dyn Fn(WeightId) -> bool,
    growth: u64,
) -> Folding {
    let mut interner = Interner::default();
    // Number of each constant node: (program, node) → number.
    let mut number: Vec<Vec<Option<u32>>> = Vec::new();
    for (program, live) in programs.iter().zip(lives) {
        // Storage that anything not constant writes into holds no constant, at whatever point of its history.
        let mut written: BTreeSet<Tensor> = BTreeSet::new();
        number.push(loop {
            let ids = number_constants(program, live, &written, &mut interner, catalog);
            let graph = &program.graph;
            let writers = (0..ids.len() as u32)
                .map(Tensor)
                .filter(|t| live[t.index()] && ids[t.index()].is_none() && graph.node(*t).into.is_some());
            let found: BTreeSet<Tensor> = writers.map(|t| graph.storage(t).0).collect();
            if found.is_subset(&written) {
                break ids;
            }
            written.extend(found);
        });
    }

    // Constants that something else reads, by the value under the views.
    let mut uses: BTreeMap<u32, Uses> = BTreeMap::new();
    for (p, program) in programs.iter().enumerate() {
        let graph = &program.graph;
        let mut used = |t: Tensor| {
            let (Some(view_id), base) = (number[p][t.index()], base_of(graph, t)) else { return };
            let Some(base_id) = number[p][base.index()] else { return };
            let entry = uses.entry(base_id).or_insert_with(|| Uses {
                views: BTreeMap::new(),
                base: (p, base),
                base_places: Vec::new(),
                raw: false,
            });
            if !entry.base_places.contains(&(p, base)) {
                entry.base_places.push((p, base));
            }
            let (_, view) = graph.storage(t);
            entry.raw |=
                view.offset == 0 && view.is_dense(&graph.node(t).shape) && graph.bytes_of(t) == graph.bytes_of(base);
            let places = entry.views.entry(view_id).or_default();
            if !places.contains(&(p, t)) {
                places.push((p, t));
            }
        };
        for (i, node) in graph.nodes().iter().enumerate() {
            if lives[p][i] && number[p][i].is_none() {
                node.inputs.iter().for_each(|t| used(*t));
            }
        }
        program.outputs.iter().for_each(|(_, t)| used(*t));
    }

    let mut folding = Folding::default();
    let mut candidates: Vec<Fold> = Vec::new();
    // Weights that are read as they are, at least once.
    let mut raw: BTreeSet<Part> = BTreeSet::new();
    for (base_id, uses) in &uses {
        let (p, base) = uses.base;
        let graph = &programs[p].graph;
        let sources = sources_of(graph, base);
        let weight = matches!(graph.node(base).op, Op::Weight { .. });
        let one_view = if uses.views.len() == 1 && !uses.raw { uses.views.values().next() } else { None };
        let (at, occurrences) = match one_view {
            Some(places) => (places[0], places.clone()),
            None if weight => {
                if uses.views.len() > 1 {
                    let name = name_of(graph, base, catalog);
                    folding.skipped.push((name, "the weight has other uses; kernels read its layout".into()));
                }
                raw.extend(sources);
                continue;
            }
            None => (uses.base, uses.base_places.clone()),
        };
        if matches!(graph.node(base).op, Op::Fill(_) | Op::Empty) {
            continue; // a repeated literal is cheaper made than kept, and storage without content is no constant
        }
        let name = name_of(graph, at.1, catalog);
        let weights: BTreeSet<WeightId> = sources.iter().map(|(w, _)| *w).collect();
        let whole = weights.len() == sources.len();
        let here = sources.iter().all(|(w, _)| resident(*w));
        if !whole || !here {
            let reason = if here { "the weight is stored in pieces" } else { "its weights stream as stored" };
            folding.skipped.push((name, reason.into()));
            raw.extend(sources);
            continue;
        }
        let key = interner.keys[number[at.0][at.1.index()].unwrap_or(*base_id) as usize].clone();
        let bytes = graph.bytes_of(at.1);
        let source_bytes = sources.iter().map(|(w, piece)| bytes_of_part(catalog, *w, *piece)).sum();
        candidates.push(Fold { name, key, bytes, at, occurrences, sources, source_bytes, layout: weight });
    }

    // Weights of folds that are not made are read as they are, which may end other folds: until nothing changes.
    loop {
        let mut users: BTreeMap<Part, usize> = BTreeMap::new();
        for part in candidates.iter().flat_map(|f| &f.sources) {
            *users.entry(*part).or_default() += 1;
        }
        let freed = |f: &Fold| -> u64 {
            let part_bytes = |(w, piece): &Part| bytes_of_part(catalog, *w, *piece);
            f.sources.iter().filter(|p| !raw.contains(p)).map(|p| part_bytes(p) / users[p] as u64).sum()
        };
        let refused = candidates.iter().position(|f| {
            let shared = f.sources.iter().any(|p| raw.contains(p) || users[p] > 1);
            f.layout && shared || f.bytes > freed(f) + growth
        });
        let Some(i) = refused else { break };
        let fold = candidates.remove(i);
        let reason = if fold.layout {
            "the weight has other uses; kernels read its layout"
        } else {
            "the result would be larger than what it frees"
        };
        folding.skipped.push((fold.name, reason.into()));
        raw.extend(fold.sources);
    }
    let mut consumed = BTreeSet::new();
    for fold in &candidates {
        for part in &fold.sources {
            if !raw.contains(part) {
                consumed.insert(*part);
            } else {
                folding
                    .retained
                    .push((catalog.weight(part.0).name().to_string(), "another use reads it as stored".into()));
            }
        }
        if fold.sources.iter().any(|p| raw.contains(p)) {
            folding.duplicated_bytes += fold.bytes;
        }
    }
    folding.freed_bytes = consumed.iter().map(|(w, piece)| bytes_of_part(catalog, *w, *piece)).sum();
    folding.folds = candidates;
    folding
}

/// The number of each constant node of a program.
fn number_constants(
    program: &Program,
    live: &[bool],
    written: &BTreeSet<Tensor>,
    interner: &mut Interner,
    catalog: &Catalog,
) -> Vec<Option<u32>> {
    let graph = &program.graph;
    let mut ids: Vec<Option<u32>> = Vec::with_capacity(live.len());
    for (node, live) in graph.nodes().iter().zip(live) {
        let t = Tensor(ids.len() as u32);
        let inputs: Option<Vec<u32>> = node.inputs.iter().map(|i| ids[i.index()]).collect();
        let owns = node.into.is_some() || matches!(node.op, Op::Empty);
        let constant = *live && is_constant(&node.op) && !(owns && written.contains(&graph.storage(t).0));
        ids.push(match inputs {
            Some(inputs) if constant => Some(interner.id(key(graph, t, node, &inputs, catalog))),
            _ => None,
        });
    }
    ids
}

/// Ops whose value depends on their operands alone.
fn is_constant(op: &Op) -> bool {
    match op {
        Op::Weight { .. }
        | Op::Fill(_)
        | Op::Empty
        | Op::View(_)
        | Op::MatMul { .. }
        | Op::Unary(_)
        | Op::Binary(_) => true,
        Op::Scale(_) | Op::FillFrom { .. } | Op::Reduce { .. } | Op::Cast | Op::Select | Op::Place => true,
        Op::Input { .. } | Op::LoadRows { .. } | Op::State(_) | Op::Folded(_) | Op::Hook { .. } => false,
        // A fused operation may be random or write state; its operands fold all the same.
        Op::Extra | Op::Custom(_) | Op::Nn(_) => false,
    }
}

/// The value under the views of `t`.
fn base_of(graph: &Graph, t: Tensor) -> Tensor {
    let mut t = t;
    while let Op::View(_) = graph.node(t).op {
        t = graph.node(t).inputs[0];
    }
    t
}

fn key(graph: &Graph, t: Tensor, node: &Node, inputs: &[u32], catalog: &Catalog) -> String {
    let op = match &node.op {
        // The bytes are the identity, not the segment that brings them nor the name.
        Op::Weight { parts, .. } => {
            let part = |p: &WeightPart| {
                let w = catalog.weight(p.weight);
                format!("{:?} {:?} {}", catalog.sources()[w.source].identity(), w.range, p.piece)
            };
            parts.iter().map(part).collect::<Vec<_>>().join("+")
        }
        // Each is storage of its own.
        Op::Empty => format!("empty {}", t.0),
        op => format!("{op:?}"),
    };
    format!("{op}|{:?}|{:?}|{:?}|{inputs:?}", node.shape, graph.dtype(t), node.into)
}

fn cone(graph: &Graph, t: Tensor) -> BTreeSet<Tensor> {
    let (mut seen, mut todo) = (BTreeSet::new(), vec![t]);
    while let Some(t) = todo.pop() {
        if seen.insert(t) {
            todo.extend(&graph.node(t).inputs);
        }
    }
    seen
}

fn sources_of(graph: &Graph, t: Tensor) -> BTreeSet<Part> {
    let parts = cone(graph, t).into_iter().flat_map(|t| match &graph.node(t).op {
        Op::Weight { parts, .. } => parts.to_vec(),
        _ => vec![],
    });
    parts.map(|p| (p.weight, p.piece)).collect()
}

fn bytes_of_part(catalog: &Catalog, weight: WeightId, piece: u32) -> u64 {
    catalog.get(weight).and_then(|w| w.pieces.get(piece as usize)).map_or(0, |p| p.range.end - p.range.start)
}

fn name_of(graph: &Graph, t: Tensor, catalog: &Catalog) -> String {
    let base = graph.node(base_of(graph, t));
    let what = match &base.op {
        Op::Weight { .. } => "layout".to_string(),
        op => format!("{op:?}").split([' ', '(', '{']).next().unwrap_or("constant").to_lowercase(),
    };
    let of: Vec<&str> = sources_of(graph, t).iter().map(|(w, _)| catalog.weight(*w).name()).collect();
    format!("{what} of {}", if of.is_empty() { "literals".into() } else { of.join(", ") })
}

impl Folding {
    /// The programs with folded values in place of what computes them.
    pub fn rewrite(&self, programs: &[&Program]) -> Vec<Program> {
        let mut folded: Vec<Vec<(Tensor, u32)>> = vec![Vec::new(); programs.len()];
        for (i, fold) in self.folds.iter().enumerate() {
            fold.occurrences.iter().for_each(|(p, t)| folded[*p].push((*t, i as u32)));
        }
        let rewrite = |(program, folded): (&&Program, Vec<(Tensor, u32)>)| {
            let mut program = (*program).clone();
            program.graph.become_folded(&folded);
            program
        };
        programs.iter().zip(folded).map(rewrite).collect()
    }

    /// The program that computes the folds, one after the other, each from a segment of its own.
    pub fn program(&self, programs: &[&Program], catalog: &Catalog) -> Result<Program> {
        let mut out = Graph::new();
        let mut results = Vec::new();
        for (i, fold) in self.folds.iter().enumerate() {
            let from = &programs[fold.at.0].graph;
            let segment = source_segment(i as u32, fold, catalog);
            let shape = from.node(fold.at.1).shape;
            let dtype = from.dtype(fold.at.1);
            let target = out.folded(i as u32, shape, dtype);
            let base = base_of(from, fold.at.1);
            let mut copied: HashMap<Tensor, Tensor> = HashMap::new();
            let cone = cone(from, fold.at.1);
            for t in cone.iter().copied() {
                let node = from.node(t);
                let new = match &node.op {
                    Op::Weight { parts, .. } => out.weight(&segment, &part_name(parts[0].weight))?,
                    // The storage that a chain of writes begins with is the fold's own.
                    Op::Empty if base == fold.at.1 && from.storage(base).0 == t => target,
                    // A function followed by a cast alone is one kernel: it rounds once either way.
                    Op::Cast if fuses(from, &cone, node.inputs[0]) && copied.contains_key(&node.inputs[0]) => {
                        let x = copied[&node.inputs[0]];
                        out.set_dtype(x, from.dtype(t));
                        x
                    }
                    _ => out.copy_node(from, t, &copied),
                };
                copied.insert(t, new);
            }
            let last = copied.get(&fold.at.1).copied().unwrap_or(target);
            let whole = Region { shape, view: View::dense(&shape), carry: false };
            let direct = base == fold.at.1 && !fold.layout;
            results.push(match (direct, out.node(last).into.is_some()) {
                (true, true) => last,
                (true, false) => out.redirect(last, target, whole),
                (false, _) => out.push_into(Op::Unary(Unary::Copy), vec![last], target, whole)?,
            });
        }
        let mut program = out.outputs(&[])?.named("fold");
        program.roots = results;
        Ok(program)
    }
}

/// Whether `x` is an elementwise value that one node of the cone uses.
fn fuses(graph: &Graph, cone: &BTreeSet<Tensor>, x: Tensor) -> bool {
    let elementwise = matches!(graph.node(x).op, Op::Unary(_) | Op::Binary(_) | Op::Scale(_) | Op::Select | Op::Cast);
    elementwise && cone.iter().filter(|t| graph.node(**t).inputs.contains(&x)).count() == 1
}

fn part_name(weight: WeightId) -> String {
    format!("w{}", weight.0)
}

fn source_segment(index: u32, fold: &Fold, catalog: &Catalog) -> Segment {
    let entries: Vec<SegmentEntry> =
        fold.sources.iter().map(|(id, piece)| catalog.entry(Arc::from(part_name(*id)), *id, *piece)).collect();
    Segment {
        // Counted down from the end, where no catalog's own segments are.
        id: SegmentId(u32::MAX - 1 - index),
        name: Arc::from(format!("fold {index}: {}", fold.name)),
        entries: entries.into(),
        left_out: Arc::new([]),
    }
}

/// What folded values count as.
pub(crate) const CATEGORY: Category = Category::Folded;
