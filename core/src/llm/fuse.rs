//! An adapter merged into a model: a new folder of safetensors, written a few rows at a time, on the host alone.
//!
//! Nothing grows with the model: a megabyte of a tensor is read, changed and written before the next. A tied model whose
//! head or embedding is adapted becomes an untied one, with both tensors and a configuration that says so: merging into the
//! one tensor would change the other part of the model as well. The folder appears whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use super::adapters::{self, Adapter, LoraSpec, Targets, Values, answers, floats};
use super::hub::{optional_file, read_small};
use super::models::{HEAD, Layer, Model};
use crate::error::{Error, Result};
use crate::rt::file::{NewFile, io_error, save_folder_atomically};
use crate::stream::Cancel;
use crate::weights::index::INDEX_FILE;
use crate::weights::safetensors::{TensorInfo, TensorSpec, Writer, format_error};
use crate::weights::{Catalog, DType, FileDType, Source, WeightId};

/// The most bytes of a tensor, as f32, that are in host memory at once, a row at least.
const STEP: u64 = 1 << 20;
/// Files of a model's folder that a merged model needs as well, where they are.
const COMPANIONS: [&str; 12] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];
/// The most bytes of such a file.
const MAX_COMPANION: u64 = 256 << 20;
const MAX_CONFIG: u64 = 1 << 20;

/// Two small matrices whose product is added to a large one, row by row, whichever way that one is stored.
#[derive(Clone, Debug)]
struct Patch {
    /// `[rows of the large one, rank]`.
    left: Vec<f32>,
    /// `[rank, its columns]`.
    right: Vec<f32>,
    rank: usize,
    scale: f32,
}

impl Patch {
    /// Of A `[rank, in]` and B `[out, rank]`. `by_input`: the large one is `[in, out]`, as tables and Conv1D are.
    fn new(spec: &LoraSpec, a: Vec<f32>, b: Vec<f32>, by_input: bool) -> Patch {
        let (rank, scale) = (spec.rank as usize, spec.scale());
        let (left, right) = if by_input { (transposed(&a, a.len() / rank), transposed(&b, rank)) } else { (b, a) };
        Patch { left, right, rank, scale }
    }

    /// Adds rows of the product, from `first` on, to `values` of so many columns.
    fn add(&self, first: usize, columns: usize, values: &mut [f32]) {
        let mut delta = vec![0.0f32; columns];
        for (out, left) in values.chunks_exact_mut(columns).zip(self.left[first * self.rank..].chunks_exact(self.rank))
        {
            delta.fill(0.0);
            for (l, right) in left.iter().zip(self.right.chunks_exact(columns)) {
                for (d, r) in delta.iter_mut().zip(right) {
                    *d += l * r;
                }
            }
            for (w, d) in out.iter_mut().zip(&delta) {
                *w += self.scale * d;
            }
        }
    }
}

/// `[n, columns]` as `[columns, n]`.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let n = values.len().checked_div(columns).unwrap_or(0);
    (0..columns).flat_map(|k| (0..n).map(move |i| values[i * columns + k])).collect()
}

/// What is to be merged: an adapter of the blocks, and of the head and the table of tokens, which only merging knows.
#[derive(Clone, Debug)]
pub struct Fusion {
    patches: BTreeMap<WeightId, Patch>,
    head: Option<Patch>,
    embedding: Option<Patch>,
}

impl Fusion {
    /// An adapter of the blocks.
    pub fn new(model: &Model, adapter: &Adapter, values: &Values) -> Result<Fusion> {
        let mut fusion = Fusion { patches: BTreeMap::new(), head: None, embedding: None };
        let spec = adapter.spec();
        for site in adapter.sites() {
            let by_input = matches!(model.module(site.path)?.layer, Layer::Linear { conv: true, .. });
            let (Some(a), Some(b)) = (values.get(site.a), values.get(site.b)) else {
                return Err(Error::Invalid { what: "adapter values".into(), reason: "they are another's".into() });
            };
            let patch = Patch::new(spec, a.clone(), b.clone(), by_input);
            fusion.patches.insert(model.block_weight(site.block, &format!("{}.weight", site.path))?, patch);
        }
        Ok(fusion)
    }

    /// The adapter of a folder in PEFT's format.
    pub async fn open(folder: &Path, model: &Model) -> Result<Fusion> {
        let (file, text, catalog) = adapters::open_files(folder).await?;
        let spec = adapters::read_config(&file, &text)?;
        let table = model.embedding_path();
        let outer = |path: &str| match &spec.targets {
            Targets::Named(names) => names.iter().any(|n| answers(path, n)),
            Targets::AllLinear => false,
        };
        let (with_head, with_table) = (outer("lm_head"), outer(&table));
        if !with_head && !with_table {
            let (adapter, values) = Adapter::read(&file, &text, &catalog, model).await?;
            return Fusion::new(model, &adapter, &values);
        }
        check_tying(&file, &text)?;
        let inner: Vec<String> = match &spec.targets {
            Targets::Named(names) => {
                let taken = |n: &&String| !answers("lm_head", n) && !answers(&table, n);
                names.iter().filter(taken).cloned().collect()
            }
            Targets::AllLinear => Vec::new(),
        };
        let mut known = BTreeSet::new();
        let mut fusion = Fusion { patches: BTreeMap::new(), head: None, embedding: None };
        if !inner.is_empty() {
            let adapter = Adapter::new(model, LoraSpec { targets: Targets::Named(inner), ..spec.clone() })?;
            fusion = Fusion::new(model, &adapter, &adapter.read_values(&catalog).await?)?;
            known = adapter.file_names();
        }
        let shape = [model.config().vocabulary, model.config().hidden];
        for (wanted, path, names, id) in [
            (with_head, "lm_head", ["lora_A.weight", "lora_B.weight"], model.head()?),
            (with_table, table.as_str(), ["lora_embedding_A", "lora_embedding_B"], model.embedding()?),
        ] {
            let name = |end: &str| adapters::file_name(&format!("{path}.{end}"));
            // PEFT saves the tables themselves next to an adapter of one: they must be the model's own.
            for base in [name("base_layer.weight"), name("weight")] {
                if catalog.names().any(|n| n == base) {
                    same_table(&catalog, catalog.find(&base)?, model.catalog(), id).await?;
                    known.insert(base);
                }
            }
            if !wanted {
                continue;
            }
            let by_input = path != "lm_head";
            let (input, output) = if by_input { (shape[0], shape[1]) } else { (shape[1], shape[0]) };
            let a = adapters::read_matrix(&catalog, &name(names[0]), &[spec.rank, input]).await?;
            let b = adapters::read_matrix(&catalog, &name(names[1]), &[output, spec.rank]).await?;
            known.extend(names.map(name));
            let patch = Some(Patch::new(&spec, a, b, by_input));
            if by_input { fusion.embedding = patch } else { fusion.head = patch }
        }
        adapters::nothing_else(&catalog, &known)?;
        Ok(fusion)
    }

    /// Whether a tied model becomes an untied one.
    pub fn unties(&self, model: &Model) -> bool {
        model.config().tied && (self.head.is_some() || self.embedding.is_some())
    }
}

/// PEFT can tie the adapters of head and embedding to one another, which is another model.
fn check_tying(file: &str, text: &str) -> Result<()> {
    let config: Value = serde_json::from_str(text).unwrap_or_default();
    match config.get("ensure_weight_tying") {
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(_) => Err(Error::Invalid {
            what: format!("{file}: `ensure_weight_tying`"),
            reason: "adapters of head and embedding that are tied to one another are not supported".into(),
        }),
    }
}

/// Refuses a stored table that is not the model's: an adapter over other tables is not one of this model.
async fn same_table(theirs: &Catalog, stored: WeightId, ours: &Catalog, table: WeightId) -> Result<()> {
    let (a, b) = (theirs.weight(stored), ours.weight(table));
    let other = || {
        let reason = "it is another table than the model's, so the adapter belongs to another model".into();
        let file = theirs.sources()[a.source].name().into();
        Err(Error::Format { file, tensor: Some(a.name().into()), reason })
    };
    if a.shape != b.shape || !a.dtype.is_float() {
        return other();
    }
    let (elements, step) = (a.bytes() / a.dtype.size(), STEP / 4);
    let mut at = 0;
    while at < elements {
        let end = elements.min(at + step);
        let part = |w: &crate::weights::Weight| at * w.dtype.size()..end * w.dtype.size();
        let (x, y) = (theirs.read_capped(stored, part(a), STEP).await?, ours.read_capped(table, part(b), STEP).await?);
        // Stored wider than the model's, it is the model's all the same.
        if floats(a.dtype, &x) != floats(b.dtype, &y) {
            return other();
        }
        at = end;
    }
    Ok(())
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FuseReport {
    /// Tensors that were changed.
    pub merged: usize,
    /// Tensors in all.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Names of the files, in order.
    pub files: Vec<String>,
    /// Whether the head and the embedding were one and are two now.
    pub untied: bool,
}

/// One tensor of the output.
struct Part<'a> {
    spec: TensorSpec,
    source: &'a Source,
    tensor: &'a TensorInfo,
    patch: Option<&'a Patch>,
}

/// Writes the merged model to `out`, which must not be there. `folder` is the model's own, from which configuration and
/// tokenizer are copied. `dtype` is that of all floating-point tensors; without it each keeps its own. `progress` is told
/// the bytes written so far and in all.
///
/// Errors: [`Error::Invalid`] if there is anything at `out`; [`Error::Format`] naming the tensor if a number does not fit
/// in its type; [`Error::Cancelled`]; [`Error::Io`]. None leaves anything behind.
pub async fn fuse(
    model: &Model,
    folder: &Path,
    fusion: &Fusion,
    out: &Path,
    dtype: Option<DType>,
    cancel: &Cancel,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<FuseReport> {
    if dtype.is_some_and(|d| !d.is_float()) {
        return Err(Error::Invalid { what: "--dtype".into(), reason: "F32, F16 or BF16 are possible".into() });
    }
    let untied = fusion.unties(model);
    let files = layout(model, fusion, dtype, untied)?;
    let size = |p: &Part| p.spec.shape.iter().product::<u64>() * element(&p.spec.dtype, p.tensor);
    let total: u64 = files.iter().flatten().map(size).sum();
    let mut report = FuseReport { bytes: total, untied, ..FuseReport::default() };
    save_folder_atomically(out, async |place| {
        let mut done = 0;
        let mut index = BTreeMap::new();
        for (i, parts) in files.iter().enumerate() {
            let name = match files.len() {
                1 => "model.safetensors".to_string(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let path = place.join(&name);
            let specs: Vec<TensorSpec> = parts.iter().map(|p| p.spec.clone()).collect();
            let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
            let mut writer = Writer::new(NewFile::create(&path)?, &path.display().to_string(), &specs, &metadata)?;
            for at in writer.order().to_vec() {
                let part = &parts[at];
                index.insert(part.spec.name.clone(), name.clone());
                report.tensors += 1;
                report.merged += usize::from(part.patch.is_some());
                write_part(part, &mut writer, cancel, &mut |bytes| {
                    done += bytes;
                    progress(done, total);
                })
                .await?;
            }
            writer.finish()?.finish()?;
            report.files.push(name);
        }
        if files.len() > 1 {
            let text = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": index });
            put(place, INDEX_FILE, format!("{text:#}\n").as_bytes())?;
        }
        put(place, "config.json", &config(folder, dtype, untied).await?)?;
        for name in COMPANIONS {
            if let Some(source) = optional_file(folder, name)? {
                put(place, name, &read_small(&source, MAX_COMPANION).await?)?;
            }
        }
        Ok(())
    })
    .await?;
    Ok(report)
}

/// The tensors of each file of the output: the input's files, one for one, and the head's own tensor where there is a new
/// one.
fn layout<'a>(model: &'a Model, fusion: &'a Fusion, dtype: Option<DType>, untied: bool) -> Result<Vec<Vec<Part<'a>>>> {
    let catalog = model.catalog();
    let (table, head) = (model.embedding()?, model.head()?);
    let id_of = |source: usize, t: &TensorInfo| {
        let same = |w: &crate::weights::Weight| w.source == source && w.range == t.range && !t.range.is_empty();
        catalog.weights().iter().position(same).map(|i| WeightId(i as u32))
    };
    let mut files = Vec::new();
    for file in catalog.files() {
        let mut parts = Vec::new();
        for tensor in &file.header.tensors {
            let id = id_of(file.source, tensor);
            let patch = match id {
                Some(id) if id == table => match untied || table != head {
                    true => fusion.embedding.as_ref(),
                    false => None,
                },
                Some(id) if id == head => fusion.head.as_ref(),
                Some(id) => fusion.patches.get(&id),
                None => None,
            };
            let kind = match (dtype, tensor.dtype) {
                (Some(wanted), FileDType::Weight(stored)) if stored.is_float() => FileDType::Weight(wanted),
                (_, stored) => stored,
            };
            let part = |name: &str, patch| Part {
                spec: TensorSpec::new(name, kind, tensor.shape.clone()),
                source: &catalog.sources()[file.source],
                tensor,
                patch,
            };
            if untied && id == Some(table) {
                parts.push(part(HEAD, fusion.head.as_ref()));
            }
            parts.push(part(&tensor.name, patch));
        }
        files.push(parts);
    }
    Ok(files)
}

/// Bytes an element; for types that are copied as they are, of the stored tensor.
fn element(dtype: &FileDType, tensor: &TensorInfo) -> u64 {
    match dtype {
        FileDType::Weight(d) => d.size(),
        FileDType::Other(_) => {
            let elements: u64 = tensor.shape.iter().product();
            (tensor.range.end - tensor.range.start).checked_div(elements).unwrap_or(0)
        }
    }
}

/// Reads, changes and writes one tensor, some rows at a time.
async fn write_part<W: Write>(
    part: &Part<'_>,
    writer: &mut Writer<W>,
    cancel: &Cancel,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let bytes = part.tensor.range.end - part.tensor.range.start;
    let (stored, wanted) = (part.tensor.dtype, part.spec.dtype);
    let floats_both = match (stored, wanted) {
        (FileDType::Weight(a), FileDType::Weight(b)) if a.is_float() => Some((a, b)),
        _ => None,
    };
    // A vector is one row; what is only copied goes by bytes.
    let width = part.spec.shape.last().copied().filter(|_| part.spec.shape.len() > 1);
    let row = match (floats_both, width) {
        (Some((dtype, _)), Some(width)) if part.patch.is_some() => width * dtype.size(),
        (Some((dtype, _)), _) => dtype.size(),
        (None, _) => 1,
    };
    let rows_at_once = (STEP / 2 / row.max(1)).max(1);
    let rows = bytes.checked_div(row).unwrap_or(0);
    let mut buffer = Vec::new();
    let mut at = 0;
    while at < rows {
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let end = rows.min(at + rows_at_once);
        buffer.resize(((end - at) * row) as usize, 0);
        part.source.fill(part.tensor.range.start + at * row, &mut buffer).await?;
        let written = match floats_both {
            Some((from, to)) if part.patch.is_some() || from != to => {
                let mut values = floats(from, &buffer);
                if let (Some(patch), Some(width)) = (part.patch, width) {
                    patch.add(at as usize, width as usize, &mut values);
                }
                narrowed(part, to, &values)?
            }
            _ => buffer.clone(),
        };
        writer.data(&written)?;
        progress(written.len() as u64);
        at = end;
    }
    Ok(())
}

/// Numbers in their type on disk. One that becomes infinite is an error: the model would answer with nothing but that.
fn narrowed(part: &Part<'_>, dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(values.len() * dtype.size() as usize);
    let fits = |v: f32| match dtype {
        DType::F16 => half::f16::from_f32(v).is_finite(),
        DType::BF16 => half::bf16::from_f32(v).is_finite(),
        _ => true,
    };
    if let Some(v) = values.iter().find(|v| v.is_finite() && !fits(**v)) {
        let reason = format!("{v:e} does not fit in {dtype}; choose another --dtype");
        return Err(format_error(part.source.name(), Some(&part.spec.name), reason));
    }
    match dtype {
        DType::F16 => values.iter().for_each(|v| out.extend(half::f16::from_f32(*v).to_le_bytes())),
        DType::BF16 => values.iter().for_each(|v| out.extend(half::bf16::from_f32(*v).to_le_bytes())),
        _ => values.iter().for_each(|v| out.extend(v.to_le_bytes())),
    }
    Ok(out)
}

fn put(place: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = place.join(name);
    let mut file = NewFile::create(&path)?;
    file.write_all(bytes).map_err(|e| io_error(&path, e))?;
    file.finish()
}

/// The model's configuration; as it stands, unless the merged model is another kind.
async fn config(folder: &Path, dtype: Option<DType>, untied: bool) -> Result<Vec<u8>> {
    let source = Source::open(folder.join("config.json"))?;
    let text = read_small(&source, MAX_CONFIG).await?;
    if dtype.is_none() && !untied {
        return Ok(text);
    }
    let mut value: Value =
        serde_json::from_slice(&text).map_err(|e| format_error(source.name(), None, format!("not JSON: {e}")))?;
    if let Some(fields) = value.as_object_mut() {
        if untied {
            fields.insert("tie_word_embeddings".into(), false.into());
        }
        let name = match dtype {
            Some(DType::F32) => Some("float32"),
            Some(DType::F16) => Some("float16"),
            Some(DType::BF16) => Some("bfloat16"),
            _ => None,
        };
        for field in ["dtype", "torch_dtype"] {
            if let (Some(name), Some(there)) = (name, fields.get_mut(field)) {
                *there = name.into();
            }
        }
    }
    Ok(format!("{value:#}\n").into_bytes())
}
