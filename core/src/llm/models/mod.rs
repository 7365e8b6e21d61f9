//! Models: what their files must hold, how that is cut into segments, and how a block computes.
//!
//! A family is a small file that lists its modules and wires them with the shared layers of [`layers`]. Everything else is
//! the same for all: every tensor is checked against the configuration before anything runs, nothing in a file is ignored
//! unless the family names it, a block is a segment, the head is one segment a piece, and embedding rows come from the file.

mod gpt2;
mod layers;
mod llama;

use std::collections::BTreeSet;
use std::ops::Range;

use super::config::{Family as Kind, ModelConfig};
use crate::error::{Error, Result};
use crate::graph::{Graph, Tensor};
use crate::nn::VOCABULARY_CHUNK;
use crate::weights::{Catalog, Segment, WeightId};

pub(crate) use layers::{DropoutInputs, Forward};

/// What a module of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    /// A linear layer, stored `[output, input]`, or `[input, output]` where `conv` is set (GPT-2's Conv1D).
    Linear { input: u64, output: u64, bias: bool, conv: bool },
    /// The gain, perhaps with a bias, of a norm over so many features.
    Norm { width: u64, bias: bool },
}

/// A module of a block: its path there and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    pub path: &'static str,
    pub layer: Layer,
}

impl Module {
    fn linear(path: &'static str, input: u64, output: u64, bias: bool) -> Module {
        Module { path, layer: Layer::Linear { input, output, bias, conv: false } }
    }

    fn conv(path: &'static str, input: u64, output: u64) -> Module {
        Module { path, layer: Layer::Linear { input, output, bias: true, conv: true } }
    }

    fn norm(path: &'static str, width: u64, bias: bool) -> Module {
        Module { path, layer: Layer::Norm { width, bias } }
    }

    /// Names (within the block) and shapes of its tensors.
    fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let (weight, vector, bias) = match self.layer {
            Layer::Linear { input, output, bias, conv: false } => (vec![output, input], output, bias),
            Layer::Linear { input, output, bias, conv: true } => (vec![input, output], output, bias),
            Layer::Norm { width, bias } => (vec![width], width, bias),
        };
        let mut all = vec![(format!("{}.weight", self.path), weight)];
        if bias {
            all.push((format!("{}.bias", self.path), vec![vector]));
        }
        all
    }

    /// The last part of its path: what adapters call it.
    pub fn name(&self) -> &'static str {
        self.path.rsplit('.').next().unwrap_or(self.path)
    }
}

/// Where a family keeps its tensors.
pub(crate) struct Names {
    /// What the paths of all but the head begin with.
    pub prefix: &'static str,
    /// Whether files may leave the prefix out.
    pub bare: bool,
    /// The list of blocks.
    pub blocks: &'static str,
    /// The table of tokens.
    pub tokens: &'static str,
    /// The table of positions, where there is one.
    pub positions: Option<&'static str>,
    /// The norm before the head, and whether it has a bias.
    pub norm: (&'static str, bool),
    /// Endings of tensors that hold nothing: masks and tables that are computed.
    pub ignored: &'static [&'static str],
}

/// A family of models: the only thing that a new one must bring.
pub(crate) trait Family: Send + Sync {
    /// Where its tensors are.
    fn names(&self) -> Names;
    /// The modules of a block, in the order in which they are loaded.
    fn modules(&self, config: &ModelConfig) -> Vec<Module>;
    /// One block: hidden states `[b · t, hidden]` to the next.
    fn block(&self, g: &mut Graph, f: &Forward<'_>, block: usize, h: Tensor) -> Result<Tensor>;
    /// Whether positions turn queries and keys.
    fn rotary(&self) -> bool {
        self.names().positions.is_none()
    }
}

fn family(kind: Kind) -> &'static dyn Family {
    match kind {
        Kind::Gpt2 => &gpt2::Gpt2,
        _ => &llama::Llama,
    }
}

/// A model over its files: the catalog cut into segments, all shapes checked.
#[derive(Clone)]
pub struct Model {
    config: ModelConfig,
    catalog: Catalog,
    family: &'static dyn Family,
    modules: Vec<Module>,
    embed: Segment,
    positions: Option<Segment>,
    blocks: Vec<Segment>,
    head: Vec<Segment>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("blocks", &self.blocks.len())
            .finish_non_exhaustive()
    }
}

/// Name of the segments of blocks: `block.07`.
pub fn block_name(block: usize) -> String {
    format!("block.{block:02}")
}

impl Model {
    /// Checks a catalog against a configuration and cuts it into segments. No weight byte is read.
    ///
    /// Errors: [`Error::Format`] naming the tensor that is missing, not known, of another shape, or there although the
    /// configuration says that the head is the embedding.
    pub fn new(config: ModelConfig, mut catalog: Catalog) -> Result<Model> {
        let family = family(config.family);
        let names = family.names();
        let modules = family.modules(&config);
        let has = |name: &str| catalog.names().any(|n| n == name);
        let tokens = format!("{}{}.weight", names.prefix, names.tokens);
        let bare = names.bare && !has(&tokens);
        let prefix = if bare { "" } else { names.prefix };
        let mut files = Files { catalog: &catalog, used: BTreeSet::new() };

        let table = vec![config.vocabulary, config.hidden];
        let tokens = files.tensor(&format!("{prefix}{}.weight", names.tokens), &table)?;
        let positions = match names.positions {
            Some(path) => {
                Some(files.tensor(&format!("{prefix}{path}.weight"), &[config.max_positions, config.hidden])?)
            }
            None => None,
        };
        let mut blocks = Vec::new();
        for block in 0..config.layers {
            let mut entries = Vec::new();
            for module in &modules {
                for (short, shape) in module.tensors() {
                    let id = files.tensor(&format!("{prefix}{}.{block}.{short}", names.blocks), &shape)?;
                    entries.push((short, id));
                }
            }
            blocks.push(entries);
        }
        let (norm, bias) = names.norm;
        let mut end = vec![("norm.weight", files.tensor(&format!("{prefix}{norm}.weight"), &[config.hidden])?)];
        if bias {
            end.push(("norm.bias", files.tensor(&format!("{prefix}{norm}.bias"), &[config.hidden])?));
        }
        let head = if config.tied { tokens } else { files.tensor(HEAD, &table)? };
        files.nothing_else(&config, &names)?;

        let block_names: Vec<String> = (0..blocks.len()).map(block_name).collect();
        let mut specs: Vec<(&str, Vec<(&str, WeightId)>)> = Vec::with_capacity(blocks.len());
        for (name, entries) in block_names.iter().zip(&blocks) {
            specs.push((name, entries.iter().map(|(short, id)| (short.as_str(), *id)).collect()));
        }
        let embed = catalog.define_segment("embed", &[("tokens", tokens)])?;
        let positions = positions.map(|p| catalog.define_segment("positions", &[("positions", p)])).transpose()?;
        let blocks = catalog.define_segments(&specs)?;
        let head = head_segments(&mut catalog, &end, head)?;
        Ok(Model { config, catalog, family, modules, embed, positions, blocks, head })
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The catalog, with the model's segments.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The segments that a step streams, in the order of the forward pass: blocks, then pieces of the head.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.blocks.iter().chain(&self.head)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Names of the linear layers of a block that an adapter may be put on.
    pub fn linear_layers(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for module in self.linears() {
            if !names.contains(&module.name()) {
                names.push(module.name());
            }
        }
        names
    }

    /// The path of a block's module as the reference library knows it, whatever the file's names leave out.
    pub(crate) fn module_path(&self, block: usize, module: &Module) -> String {
        let names = self.family.names();
        format!("{}{}.{block}.{}", names.prefix, names.blocks, module.path)
    }

    /// The file's name of a block's tensor, and its weight: for what rewrites files.
    pub fn block_weight(&self, block: usize, short: &str) -> Result<WeightId> {
        self.blocks.get(block).ok_or_else(|| no_block(block, self.blocks.len()))?.weight(short)
    }

    /// The table of tokens.
    pub fn embedding(&self) -> Result<WeightId> {
        self.embed.weight("tokens")
    }

    /// The head's weight: where the model is tied, the table of tokens.
    pub fn head(&self) -> Result<WeightId> {
        self.head.first().ok_or_else(|| no_block(0, 0))?.weight("head")
    }

    /// The path of the table of tokens as the reference library knows it.
    pub(crate) fn embedding_path(&self) -> String {
        let names = self.family.names();
        format!("{}{}", names.prefix, names.tokens)
    }

    pub(crate) fn linears(&self) -> impl Iterator<Item = &Module> {
        self.modules.iter().filter(|m| matches!(m.layer, Layer::Linear { .. }))
    }

    pub(crate) fn module(&self, path: &str) -> Result<&Module> {
        self.modules.iter().find(|m| m.path == path).ok_or_else(|| Error::NotFound {
            what: "module",
            name: path.into(),
            hint: Some(format!("a block has {:?}", self.modules.iter().map(|m| m.path).collect::<Vec<_>>())),
        })
    }

    pub(crate) fn family(&self) -> &'static dyn Family {
        self.family
    }
}

fn no_block(block: usize, count: usize) -> Error {
    Error::NotFound { what: "block", name: block.to_string(), hint: Some(format!("the model has {count}")) }
}

pub(crate) const HEAD: &str = "lm_head.weight";

/// The tensors of a catalog that a model has asked for.
struct Files<'a> {
    catalog: &'a Catalog,
    used: BTreeSet<String>,
}

impl Files<'_> {
    fn tensor(&mut self, name: &str, shape: &[u64]) -> Result<WeightId> {
        let id = self.catalog.find(name).map_err(|e| match e {
            Error::NotFound { hint, .. } => Error::Format {
                file: self.place(),
                tensor: Some(name.into()),
                reason: format!(
                    "the configuration asks for a tensor that is not there{}",
                    hint.map(|h| format!("; {h}")).unwrap_or_default()
                ),
            },
            other => other,
        })?;
        let weight = self.catalog.weight(id);
        let refuse = |reason: String| {
            let file = self.catalog.sources()[weight.source].name().into();
            Err(Error::Format { file, tensor: Some(name.into()), reason })
        };
        if weight.shape != shape {
            return refuse(format!("its shape is {:?}, but the configuration asks for {shape:?}", weight.shape));
        }
        if !weight.dtype.is_float() {
            return refuse(format!("its type {} is not a floating-point one", weight.dtype));
        }
        self.used.insert(name.into());
        Ok(id)
    }

    /// Refuses tensors that nothing asked for: whatever they are for would be left out of the computation.
    fn nothing_else(&self, config: &ModelConfig, names: &Names) -> Result<()> {
        let rest = self.catalog.files().iter().flat_map(|f| f.header.tensors.iter().map(move |t| (f.source, &t.name)));
        for (source, name) in rest {
            if self.used.contains(&**name) || names.ignored.iter().any(|end| name.ends_with(end)) {
                continue;
            }
            let reason = if &**name == HEAD && config.tied {
                "the configuration says that the head is the embedding (`tie_word_embeddings`), but the file has a head of \
                 its own: set it to false to use this one, or remove the tensor"
                    .into()
            } else {
                format!("no part of a {:?} model of {} blocks uses this tensor", config.family, config.layers)
            };
            let file = self.catalog.sources()[source].name().into();
            return Err(Error::Format { file, tensor: Some(name.to_string()), reason });
        }
        Ok(())
    }

    fn place(&self) -> String {
        let names: Vec<&str> = self.catalog.sources().iter().map(|s| s.name()).collect();
        match names.as_slice() {
            [] => "the model".into(),
            [one] => (*one).into(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        }
    }
}

/// A segment for each piece of the head; the norm before it comes with the first, as it is used just before.
fn head_segments(catalog: &mut Catalog, end: &[(&'static str, WeightId)], head: WeightId) -> Result<Vec<Segment>> {
    let pieces: Vec<Range<u64>> = catalog.weight(head).pieces.iter().map(|p| p.rows.clone()).collect();
    if let Some(odd) = pieces.iter().rev().skip(1).find(|p| !(p.end - p.start).is_multiple_of(VOCABULARY_CHUNK)) {
        return Err(Error::Limit {
            what: format!(
                "bytes of {VOCABULARY_CHUNK} rows of the head (a piece would be of {} rows)",
                odd.end - odd.start
            ),
            need: VOCABULARY_CHUNK * catalog.weight(head).bytes() / pieces.last().map_or(1, |p| p.end.max(1)),
            have: crate::weights::PIECE_BYTES,
        });
    }
    let mut segments = Vec::new();
    for i in 0..pieces.len() as u32 {
        let norm = end.iter().filter(|_| i == 0).map(|(short, id)| (*short, *id, 0));
        let entries: Vec<(&str, WeightId, u32)> = norm.chain([("head", head, i)]).collect();
        segments.push(catalog.define_segment_of_pieces(&format!("head.{i}"), &entries)?);
    }
    Ok(segments)
}
