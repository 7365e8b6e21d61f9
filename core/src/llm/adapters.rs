//! LoRA adapters of a model: where they sit, their first values, and their files in PEFT's format.
//!
//! An adapter that another program wrote means what it means there or is refused: a field that changes the result and is
//! not understood (DoRA, ranks by pattern, saved modules …) is an error that names it, never ignored. Files are replaced
//! whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use serde_json::{Value, json};

use super::hub::read_small;
use super::models::{Layer, Model};
use crate::error::{Error, Result};
use crate::graph::Shape;
use crate::nn::{Param, Params};
use crate::rt::file::{make_folder, save_atomically};
use crate::stream::Session;
use crate::weights::safetensors::{TensorSpec, write};
use crate::weights::{Catalog, DType, Source};

/// Name of the configuration in an adapter's folder.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// Name of the weights in an adapter's folder.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Largest configuration of an adapter that is read.
const CONFIG_CAP: u64 = 1 << 20;
const ALL_LINEAR: &str = "all-linear";

/// Which linear layers get an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All of every block; not the head.
    AllLinear,
    /// Those whose path ends with one of these names: `q_proj`, `c_attn`, `mlp.c_proj`.
    Named(Vec<String>),
}

impl Targets {
    /// From a list as users write it: `q_proj,v_proj`, or `all-linear`.
    pub fn parse(text: &str) -> Result<Targets> {
        let names: Vec<String> = text.split(',').map(|n| n.trim().to_string()).filter(|n| !n.is_empty()).collect();
        match names.as_slice() {
            [] => Err(invalid("target modules", "there are none")),
            [one] if one == ALL_LINEAR => Ok(Targets::AllLinear),
            _ => Ok(Targets::Named(names)),
        }
    }
}

/// What an adapter is to be.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraSpec {
    /// Rank of the product.
    pub rank: u64,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Whether the scale is alpha / √rank instead of alpha / rank.
    pub rslora: bool,
    /// Share of the adapter's operand that training sets to zero.
    pub dropout: f32,
    /// Seed of dropout.
    pub seed: u32,
    /// Which layers.
    pub targets: Targets,
    /// Which blocks; all where it is `None`.
    pub blocks: Option<Range<usize>>,
}

impl Default for LoraSpec {
    fn default() -> LoraSpec {
        let targets = Targets::Named(vec!["q_proj".into(), "v_proj".into()]);
        LoraSpec { rank: 8, alpha: 16.0, rslora: false, dropout: 0.0, seed: 0, targets, blocks: None }
    }
}

impl LoraSpec {
    /// Factor of the adapter's part.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }

    fn check(&self) -> Result<()> {
        if self.rank == 0 || self.rank > 4096 {
            return Err(invalid("rank", "1 to 4096 are possible"));
        }
        if !self.alpha.is_finite() {
            return Err(invalid("alpha", "must be a finite number"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(invalid("dropout", "must be at least 0 and below 1"));
        }
        Ok(())
    }
}

/// An adapter's place: a linear layer of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The block.
    pub block: usize,
    /// The layer's path in the block.
    pub path: &'static str,
    /// The layer's path in the whole model, as the reference library knows it.
    pub module: String,
    /// Number of A among the parameters.
    pub a: usize,
    /// Number of B among the parameters.
    pub b: usize,
    /// A number of the layer that does not depend on which others have adapters: its dropout's own.
    pub(crate) number: u32,
}

/// The values of an adapter, one list a parameter in the order of [`Adapter::params`].
pub type Values = Vec<Vec<f32>>;

/// An adapter of a model: its places and parameters, without values.
#[derive(Clone, Debug)]
pub struct Adapter {
    spec: LoraSpec,
    sites: Vec<Site>,
    params: Params,
    conv: bool,
}

impl Adapter {
    /// The adapter of that description. Errors: [`Error::Invalid`] for a target that no layer of the chosen blocks
    /// answers to, for the head or an embedding as a target, and for numbers out of range.
    pub fn new(model: &Model, spec: LoraSpec) -> Result<Adapter> {
        spec.check()?;
        let blocks = spec.blocks.clone().unwrap_or(0..model.blocks());
        if blocks.is_empty() || blocks.end > model.blocks() {
            let reason = format!("{blocks:?} is not a range of the model's {} blocks", model.blocks());
            return Err(invalid("layers of the adapter", &reason));
        }
        let mut matched = BTreeSet::new();
        let (mut sites, mut params, mut conv) = (Vec::new(), Params::new(), false);
        for block in blocks {
            for (i, module) in model.linears().enumerate() {
                let path = model.module_path(block, module);
                let hit = match &spec.targets {
                    Targets::AllLinear => true,
                    Targets::Named(names) => {
                        let hits: Vec<&String> = names.iter().filter(|n| answers(&path, n)).collect();
                        matched.extend(hits.iter().map(|n| n.as_str()));
                        !hits.is_empty()
                    }
                };
                let Layer::Linear { input, output, conv: stored_in_out, .. } = module.layer else {
                    continue;
                };
                if !hit {
                    continue;
                }
                conv |= stored_in_out;
                let a = params.add(&format!("{path}.lora_A.weight"), Shape::new(&[spec.rank, input])?)?;
                let b = params.add(&format!("{path}.lora_B.weight"), Shape::new(&[output, spec.rank])?)?;
                let number = (block * 64 + i) as u32;
                sites.push(Site { block, path: module.path, module: path, a, b, number });
            }
        }
        if let Targets::Named(names) = &spec.targets
            && let Some(name) = names.iter().find(|n| !matched.contains(n.as_str()))
        {
            return Err(no_target(model, name));
        }
        Ok(Adapter { spec, sites, params, conv })
    }

    /// The description.
    pub fn spec(&self) -> &LoraSpec {
        &self.spec
    }

    /// Where it sits, by block.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// Its parameters: A and B of each site, under the names of PEFT's files without the prefix.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Numbers that are trained.
    pub fn trainable(&self) -> u64 {
        self.params.arrays().iter().sum()
    }

    pub(crate) fn site(&self, block: usize, path: &str) -> Option<&Site> {
        let first = self.sites.partition_point(|s| s.block < block); // they stand in the order of blocks
        self.sites[first..].iter().take_while(|s| s.block == block).find(|s| s.path == path)
    }

    /// First values: A uniform between ± 1 / √in (PEFT's Kaiming initialisation with a = √5), B zero. Each number is a
    /// function of the seed, its parameter's name and its index, so that it does not depend on what else is trained.
    pub fn initial(&self, seed: u64) -> Values {
        let values = |p: &Param| {
            let n = p.shape.elements();
            if !p.name.ends_with(".lora_A.weight") {
                return vec![0.0; n as usize];
            }
            let bound = 1.0 / (p.shape.dims()[1] as f64).sqrt();
            let name = p.name.bytes().fold(mix(seed), |h, b| mix(h ^ u64::from(b)));
            let uniform = |i: u64| (mix(name ^ mix(i)) >> 11) as f64 / (1u64 << 53) as f64;
            (0..n).map(|i| ((2.0 * uniform(i) - 1.0) * bound) as f32).collect()
        };
        self.params.iter().map(values).collect()
    }

    /// Sets a session's adapter; the base stays where it is. Optimizer moments stay too: a session that trains another
    /// adapter begins with [`Adapter::forget_moments`].
    pub async fn install(&self, session: &mut Session, values: &[Vec<f32>]) -> Result<()> {
        let mut arrays: Vec<Vec<f32>> = self.params.arrays().iter().map(|n| vec![0.0; *n as usize]).collect();
        self.check_values(values)?;
        for (p, v) in self.params.iter().zip(values) {
            arrays[p.array][p.offset as usize..][..v.len()].copy_from_slice(v);
        }
        for (i, array) in arrays.iter().enumerate() {
            session.write_state(&Params::values_name(i), bytemuck::cast_slice(array)).await?;
        }
        Ok(())
    }

    /// Takes the adapter out: the model computes what the base alone would.
    pub async fn remove(&self, session: &mut Session) -> Result<()> {
        let zero: Values = self.params.iter().map(|p| vec![0.0; p.shape.elements() as usize]).collect();
        self.install(session, &zero).await
    }

    /// Sets the optimizer's moments to zero.
    pub async fn forget_moments(&self, session: &mut Session) -> Result<()> {
        for (i, n) in self.params.arrays().iter().enumerate() {
            for name in Params::moment_names(i) {
                session.write_state(&name, &vec![0; 4 * *n as usize]).await?;
            }
        }
        Ok(())
    }

    /// The values that a session holds now.
    pub async fn values(&self, session: &mut Session) -> Result<Values> {
        self.read_arrays(session, Params::values_name).await
    }

    /// State arrays of the adapter's layout (values, moments, gradients), cut into parameters.
    pub async fn read_arrays(&self, session: &mut Session, name: impl Fn(usize) -> String) -> Result<Values> {
        let mut arrays = Vec::new();
        for i in 0..self.params.arrays().len() {
            arrays.push(floats(DType::F32, &session.read_state(&name(i)).await?));
        }
        let cut = |p: &Param| arrays[p.array][p.offset as usize..][..p.shape.elements() as usize].to_vec();
        Ok(self.params.iter().map(cut).collect())
    }

    fn check_values(&self, values: &[Vec<f32>]) -> Result<()> {
        let fits = values.len() == self.params.iter().count()
            && self.params.iter().zip(values).all(|(p, v)| p.shape.elements() == v.len() as u64);
        if fits { Ok(()) } else { Err(invalid("adapter values", "they are of another adapter")) }
    }

    /// The text of `adapter_config.json`. `base` is the name or path of the model.
    pub fn config_json(&self, base: &str) -> String {
        let targets = match &self.spec.targets {
            Targets::AllLinear => {
                let names: BTreeSet<&str> =
                    self.sites.iter().map(|s| s.path.rsplit('.').next().unwrap_or(s.path)).collect();
                json!(names)
            }
            Targets::Named(names) => json!(names),
        };
        let blocks: Option<Vec<usize>> = self.spec.blocks.clone().map(Iterator::collect);
        let alpha = if self.spec.alpha.fract() == 0.0 && self.spec.alpha.abs() < 1e15 {
            json!(self.spec.alpha as i64)
        } else {
            json!(self.spec.alpha)
        };
        let config = json!({
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": self.conv,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_to_transform": blocks,
            "lora_alpha": alpha,
            "lora_dropout": self.spec.dropout,
            "peft_type": "LORA",
            "r": self.spec.rank,
            "target_modules": targets,
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": self.spec.rslora,
        });
        format!("{config:#}\n")
    }

    /// The bytes of `adapter_model.safetensors`.
    pub fn weights_file(&self, values: &[Vec<f32>]) -> Result<Vec<u8>> {
        self.check_values(values)?;
        let named = self.params.iter().zip(values);
        let tensors: Vec<(TensorSpec, &[u8])> = named
            .map(|(p, v)| (TensorSpec::new(file_name(&p.name), DType::F32, p.shape.dims()), bytemuck::cast_slice(v)))
            .collect();
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        write(Vec::new(), WEIGHTS_FILE, &tensors, &metadata)
    }

    /// Writes a folder that PEFT opens. Each file is replaced whole; the weights come first, as a folder without a
    /// configuration is no adapter.
    pub fn save(&self, folder: &Path, values: &[Vec<f32>], base: &str) -> Result<()> {
        let bytes = self.weights_file(values)?;
        make_folder(folder)?;
        let put = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            save_atomically(&path, |out| out.write_all(bytes).map_err(|e| io(&path, &e)))
        };
        put(WEIGHTS_FILE, &bytes)?;
        put(CONFIG_FILE, self.config_json(base).as_bytes())
    }

    /// Opens a folder in PEFT's format.
    pub async fn open(folder: &Path, model: &Model) -> Result<(Adapter, Values)> {
        let (file, text, catalog) = open_files(folder).await?;
        Adapter::read(&file, &text, &catalog, model).await
    }

    /// As [`Adapter::open`], of a configuration's text and a catalog of the weights. `file` names the text in errors.
    pub async fn read(file: &str, text: &str, catalog: &Catalog, model: &Model) -> Result<(Adapter, Values)> {
        let adapter = Adapter::new(model, read_config(file, text)?)?;
        let values = adapter.read_values(catalog).await?;
        nothing_else(catalog, &adapter.file_names())?;
        Ok((adapter, values))
    }

    /// Its parameters in a catalog.
    pub(crate) async fn read_values(&self, catalog: &Catalog) -> Result<Values> {
        let mut values = Values::new();
        for p in self.params.iter() {
            values.push(read_matrix(catalog, &file_name(&p.name), p.shape.dims()).await?);
        }
        Ok(values)
    }

    /// The names of its parameters in PEFT's files.
    pub(crate) fn file_names(&self) -> BTreeSet<String> {
        self.params.iter().map(|p| file_name(&p.name)).collect()
    }
}

/// The text of a folder's configuration with its name, and a catalog of its weights.
pub(crate) async fn open_files(folder: &Path) -> Result<(String, String, Catalog)> {
    let path = folder.join(CONFIG_FILE);
    let source = Source::open(&path)?;
    let bytes = read_small(&source, CONFIG_CAP).await?;
    let text = String::from_utf8(bytes).map_err(|_| Error::Format {
        file: path.display().to_string(),
        tensor: None,
        reason: "it is not UTF-8 text".into(),
    })?;
    Ok((path.display().to_string(), text, Catalog::open(folder.join(WEIGHTS_FILE)).await?))
}

/// A tensor of that name, which must be of floats in that shape.
pub(crate) async fn read_matrix(catalog: &Catalog, name: &str, shape: &[u64]) -> Result<Vec<f32>> {
    let id = catalog.find(name)?;
    let weight = catalog.weight(id);
    if weight.shape != shape || !weight.dtype.is_float() {
        let reason = format!("{} of {:?}, but the adapter has floats of {shape:?}", weight.dtype, weight.shape);
        let file = catalog.sources()[weight.source].name().into();
        return Err(Error::Format { file, tensor: Some(name.into()), reason });
    }
    Ok(floats(weight.dtype, &catalog.read(id).await?))
}

/// Refuses tensors that the configuration does not speak of.
pub(crate) fn nothing_else(catalog: &Catalog, known: &BTreeSet<String>) -> Result<()> {
    let tensors = catalog.files().iter().flat_map(|f| f.header.tensors.iter().map(move |t| (f.source, &t.name)));
    for (source, name) in tensors {
        if !known.contains(&**name) {
            let reason = format!("{CONFIG_FILE} does not say what this tensor is for");
            let file = catalog.sources()[source].name().into();
            return Err(Error::Format { file, tensor: Some(name.to_string()), reason });
        }
    }
    Ok(())
}

/// Whether a path is what a target names, by PEFT's rule: the whole, or the end after a dot.
pub(crate) fn answers(path: &str, target: &str) -> bool {
    path.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn no_target(model: &Model, name: &str) -> Error {
    let there = model.linear_layers().join(", ");
    let reason = match name {
        "lm_head" | "embed_tokens" | "wte" | "wpe" => format!(
            "the head and the embeddings stream in pieces and are not adapted (`ebbtide fuse` merges such an adapter into a model); \
             linear layers of a block are: {there}"
        ),
        _ => format!("no linear layer of the chosen blocks has this name; there are {there}, or {ALL_LINEAR}"),
    };
    Error::Invalid { what: format!("target module `{name}`"), reason }
}

/// The name in PEFT's files.
pub(crate) fn file_name(param: &str) -> String {
    format!("base_model.model.{param}")
}

/// Fields of `adapter_config.json` that do not change what an adapter computes on this model. Everything else that is
/// not read below must be absent, null, false or empty.
const HARMLESS: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    // PEFT itself corrects this by the kind of the layer.
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "eva_config",
    "corda_config",
];

pub(crate) fn read_config(file: &str, text: &str) -> Result<LoraSpec> {
    let refuse =
        |field: &str, reason: &str| Error::Invalid { what: format!("{file}: `{field}`"), reason: reason.into() };
    let value: Value = serde_json::from_str(text).map_err(|e| Error::Format {
        file: file.into(),
        tensor: None,
        reason: format!("it is not JSON: {e}"),
    })?;
    let Value::Object(fields) = value else {
        return Err(Error::Format { file: file.into(), tensor: None, reason: "it is not a JSON object".into() });
    };
    let empty = |v: &Value| match v {
        Value::Null | Value::Bool(false) => true,
        Value::Object(o) => o.is_empty(),
        Value::Array(a) => a.is_empty(),
        _ => false,
    };
    let mut spec = LoraSpec::default();
    let (mut targets, mut rank, mut alpha) = (None, None, None);
    for (name, v) in &fields {
        let number = |what: &str| v.as_f64().ok_or_else(|| refuse(name, what));
        match name.as_str() {
            "peft_type" if v == "LORA" => {}
            "peft_type" => return Err(refuse(name, &format!("{v} is not supported; LORA is"))),
            "task_type" if v == "CAUSAL_LM" || v.is_null() => {}
            "task_type" => return Err(refuse(name, &format!("{v} is not supported; CAUSAL_LM is"))),
            "bias" if v == "none" => {}
            "bias" => {
                return Err(refuse(name, "adapters with trained biases are not supported; \"none\" is"));
            }
            "r" => rank = Some(v.as_u64().ok_or_else(|| refuse(name, "must be a whole number"))?),
            "lora_alpha" => alpha = Some(number("must be a number")?),
            "lora_dropout" => spec.dropout = number("must be a number")? as f32,
            "use_rslora" => spec.rslora = v.as_bool().unwrap_or(false),
            "target_modules" => {
                targets = Some(read_targets(v).ok_or_else(|| {
                    refuse(name, "must be a list of names or \"all-linear\"; patterns are not supported")
                })?)
            }
            "layers_to_transform" if !v.is_null() => {
                spec.blocks = Some(read_blocks(v).ok_or_else(|| refuse(name, "must be layers behind one another"))?);
            }
            // Some ways to begin change the base as well (PiSSA, OLoRA …): its stored weights are then not the ones meant.
            "init_lora_weights" if v.is_string() && v != "gaussian" && v != "orthogonal" && v != "eva" => {
                return Err(refuse(name, &format!("{v} changes the base's weights, which is not supported")));
            }
            "layers_pattern" if !empty(v) => return Err(refuse(name, "is not supported")),
            _ if HARMLESS.contains(&name.as_str()) || empty(v) => {}
            _ => {
                return Err(refuse(name, &format!("{v} may change what the adapter computes and is not supported")));
            }
        }
    }
    let needed = |name: &str| refuse(name, "is missing");
    if !fields.contains_key("peft_type") {
        return Err(needed("peft_type"));
    }
    spec.rank = rank.ok_or_else(|| needed("r"))?;
    spec.alpha = alpha.ok_or_else(|| needed("lora_alpha"))?;
    spec.targets = targets.ok_or_else(|| needed("target_modules"))?;
    Ok(spec)
}

fn read_targets(v: &Value) -> Option<Targets> {
    match v {
        Value::String(s) if s == ALL_LINEAR => Some(Targets::AllLinear),
        Value::Array(names) => {
            let mut names = names.iter().map(|n| n.as_str().map(String::from)).collect::<Option<Vec<_>>>()?;
            names.sort();
            (!names.is_empty()).then_some(Targets::Named(names))
        }
        _ => None,
    }
}

fn read_blocks(v: &Value) -> Option<Range<usize>> {
    let mut list = match v {
        Value::Array(list) => list.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<Vec<_>>>()?,
        other => vec![other.as_u64()? as usize],
    };
    list.sort_unstable();
    let (first, last) = (*list.first()?, *list.last()?);
    (last - first + 1 == list.len()).then_some(first..last + 1)
}

pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::F16 => halves().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => halves().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn invalid(what: &str, reason: &str) -> Error {
    Error::Invalid { what: what.into(), reason: reason.into() }
}

fn io(path: &Path, e: &std::io::Error) -> Error {
    crate::rt::file::io_error(path, e)
}

/// SplitMix64.
fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
