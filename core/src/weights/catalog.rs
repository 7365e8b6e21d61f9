//! What weights a model has: names, shapes, byte ranges, segments. It holds no weight bytes.
//!
//! A weight's identity is *(source, byte range)* and never its name: a file reached by two links is one source, and a
//! range under two names is one weight, so nothing is loaded or counted twice. Equal bytes at two ranges are two.
//! Everything is checked when the catalog is opened; what it lists can be read, unless the files change later, which
//! every read notices.

use crate::error::{Bytes, Error, Result};
use crate::rt::file;
use crate::weights::dtype::{DType, FileDType};
use crate::weights::fingerprint::Fingerprint;
use crate::weights::index::{INDEX_FILE, Index};
use crate::weights::piece::{Piece, cut};
use crate::weights::safetensors::Header;
use crate::weights::segment::{Segment, SegmentEntry, SegmentId, hint};
use crate::weights::source::{Identity, Source};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The most bytes that [`Catalog::read`] and its like return unless told otherwise: 64 MiB.
pub const READ_CAP: u64 = 64 << 20;

/// Names a weight within its catalog: an identity of bytes, not of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct WeightId(pub u32);

/// A weight: where it is and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its names, in the order in which they were met; at least one.
    pub names: Vec<Arc<str>>,
    /// The element type, on disk and on the device.
    pub dtype: DType,
    /// The shape, outermost dimension first; empty for a scalar. It may contain 0.
    pub shape: Vec<u64>,
    /// Index of the source in [`Catalog::sources`].
    pub source: usize,
    /// Its bytes, counted from the start of the source.
    pub range: Range<u64>,
    /// Its pieces in order, together exactly `range`; at least one.
    pub pieces: Vec<Piece>,
}

impl Weight {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The first of its names.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", |n| n)
    }
}

/// A file of the catalog and what its header says, tensors that cannot be weights included.
#[derive(Clone, Debug)]
pub struct CatalogFile {
    /// The name of its default segment.
    pub stem: Arc<str>,
    /// Index of its source in [`Catalog::sources`]; two links to one file have the same.
    pub source: usize,
    /// Its header.
    pub header: Arc<Header>,
}

/// One tensor that goes by a name.
#[derive(Clone, Copy, Debug)]
struct Hit {
    file: usize,
    /// `None` for a type that cannot be a weight.
    weight: Option<WeightId>,
    dtype: FileDType,
}

/// What weights there are. Cheap enough to clone; clones share sources.
#[derive(Clone, Debug)]
pub struct Catalog {
    sources: Vec<Source>,
    files: Vec<CatalogFile>,
    weights: Vec<Weight>,
    names: BTreeMap<Arc<str>, Vec<Hit>>,
    /// Only ever grows, so that ids stay true; `current` says which still stand.
    segments: Vec<Segment>,
    current: BTreeMap<Arc<str>, SegmentId>,
    /// The segments that were made from files and not by the caller.
    defaults: HashSet<SegmentId>,
}

impl Catalog {
    /// Opens a model: one `.safetensors` file; a folder with `model.safetensors.index.json` and its shards; an index by
    /// its path; or a folder with `.safetensors` files, taken in the order of their names.
    ///
    /// Each file becomes a segment named by its file stem. Errors: [`Error::Io`], [`Error::Format`] for any file or index
    /// that is not as the format promises, [`Error::NotFound`] for a folder without such files, [`Error::Limit`] for a
    /// tensor with a row above 128 MiB, [`Error::Invalid`] for two files of one stem.
    pub async fn open(path: impl AsRef<Path>) -> Result<Catalog> {
        let path = path.as_ref();
        if file::is_folder(path)? {
            let index = path.join(INDEX_FILE);
            if file::is_file(&index) {
                return Catalog::open_index(path, &index).await;
            }
            let files = file::files_with_extension(path, "safetensors")?;
            if files.is_empty() {
                return Err(Error::NotFound {
                    what: "safetensors file",
                    name: path.display().to_string(),
                    hint: Some(format!(
                        "the folder needs `{INDEX_FILE}` or files ending in `.safetensors`"
                    )),
                });
            }
            let sources = files.iter().map(Source::open).collect::<Result<Vec<Source>>>()?;
            return Catalog::from_sources(sources).await;
        }
        if path
            .file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.ends_with(".safetensors.index.json"))
        {
            let folder = path.parent().unwrap_or(Path::new(""));
            return Catalog::open_index(folder, path).await;
        }
        Catalog::from_sources(vec![Source::open(path)?]).await
    }

    /// A catalog of these files, in this order; one that is given twice counts once.
    ///
    /// Errors: as for [`Catalog::open`].
    pub async fn from_sources(sources: Vec<Source>) -> Result<Catalog> {
        let files = sources.into_iter().map(|source| (source, None)).collect();
        Catalog::build(files, None).await
    }

    /// A catalog of an index and its shards, each under the name that the index gives it.
    ///
    /// Errors: as for [`Catalog::open`]; [`Error::NotFound`] for a shard that is not given.
    pub async fn from_index(index: &Index, mut shards: BTreeMap<String, Source>) -> Result<Catalog> {
        let mut files = Vec::new();
        for name in index.shards() {
            let (name, source) = shards.remove_entry(name).ok_or_else(|| Error::NotFound {
                what: "shard",
                name: name.into(),
                hint: Some("the index names it; fetch it as well".into()),
            })?;
            files.push((source, Some(name)));
        }
        Catalog::build(files, Some(index)).await
    }

    async fn open_index(folder: &Path, index_path: &Path) -> Result<Catalog> {
        let index = Index::read(&Source::open(index_path)?).await?;
        let mut shards = BTreeMap::new();
        for name in index.shards() {
            let path = folder.join(name);
            let source = Source::open(&path).map_err(|e| match e {
                Error::Io { file, reason } => Error::Io {
                    file,
                    reason: format!("{reason}; `{}` names it as a shard", index_path.display()),
                },
                other => other,
            })?;
            shards.insert(name.to_owned(), source);
        }
        Catalog::from_index(&index, shards).await
    }

    async fn build(files: Vec<(Source, Option<String>)>, index: Option<&Index>) -> Result<Catalog> {
        let mut catalog = Catalog {
            sources: Vec::new(),
            files: Vec::new(),
            weights: Vec::new(),
            names: BTreeMap::new(),
            segments: Vec::new(),
            current: BTreeMap::new(),
            defaults: HashSet::new(),
        };
        let mut known: HashMap<Identity, usize> = HashMap::new();
        let mut headers: Vec<Arc<Header>> = Vec::new();
        let mut ids: Vec<Vec<Option<WeightId>>> = Vec::new();
        let mut shard_names: Vec<Option<String>> = Vec::new();
        for (source, shard) in files {
            let stem: Arc<str> = shard.as_deref().map_or_else(|| source.stem(), stem_of_shard).into();
            let index = match known.get(&source.identity()) {
                Some(index) => *index,
                None => {
                    let header = Arc::new(Header::read(&source).await?);
                    known.insert(source.identity(), headers.len());
                    ids.push(catalog.add_weights(&source, &header)?);
                    headers.push(header);
                    catalog.sources.push(source.clone());
                    headers.len() - 1
                }
            };
            if let Some(other) = catalog.files.iter().find(|f| f.stem == stem) {
                if other.source == index {
                    continue;
                }
                let reason = format!(
                    "both `{}` and `{}` would be the segment `{stem}`; rename one",
                    catalog.sources[other.source].name(),
                    source.name()
                );
                return Err(Error::Invalid {
                    what: "files".into(),
                    reason,
                });
            }
            catalog.files.push(CatalogFile {
                stem,
                source: index,
                header: Arc::clone(&headers[index]),
            });
            shard_names.push(shard);
        }
        if let Some(index) = index {
            let by_name = shard_names.iter().zip(&catalog.files);
            let by_name = by_name
                .filter_map(|(name, file)| Some((name.as_deref()?, &*file.header)))
                .collect();
            index.check(&by_name)?;
        }
        for file in 0..catalog.files.len() {
            catalog.add_names_and_segment(file, &ids, |tensor| {
                let home = index.and_then(|i| i.shard(tensor));
                home.is_none() || home == shard_names[file].as_deref()
            });
        }
        Ok(catalog)
    }

    fn add_weights(&mut self, source: &Source, header: &Header) -> Result<Vec<Option<WeightId>>> {
        let mut ids = Vec::with_capacity(header.tensors.len());
        // Only tensors without bytes can share a range within a file; the header's check refuses all others.
        let mut empty: HashMap<(u64, DType, &[u64]), WeightId> = HashMap::new();
        for tensor in &header.tensors {
            let Some(dtype) = tensor.dtype.weight() else {
                ids.push(None);
                continue;
            };
            let key = (tensor.range.start, dtype, tensor.shape.as_slice());
            if tensor.range.is_empty()
                && let Some(id) = empty.get(&key)
            {
                self.weights[id.0 as usize].names.push(Arc::clone(&tensor.name));
                ids.push(Some(*id));
                continue;
            }
            let id = WeightId(u32::try_from(self.weights.len()).map_err(|_| too_many(source.name()))?);
            if tensor.range.is_empty() {
                empty.insert(key, id);
            }
            self.weights.push(Weight {
                names: vec![Arc::clone(&tensor.name)],
                dtype,
                shape: tensor.shape.clone(),
                source: self.sources.len(),
                range: tensor.range.clone(),
                pieces: cut(&tensor.name, &tensor.shape, &tensor.range)?,
            });
            ids.push(Some(id));
        }
        Ok(ids)
    }

    /// Lists the tensors of a file by name, as far as `at_home` says that the name means the one in this file, and makes
    /// the file's segment.
    fn add_names_and_segment(&mut self, file: usize, ids: &[Vec<Option<WeightId>>], at_home: impl Fn(&str) -> bool) {
        let CatalogFile { stem, source, header } = self.files[file].clone();
        let (mut entries, mut left_out) = (Vec::new(), Vec::new());
        for (tensor, weight) in header.tensors.iter().zip(&ids[source]) {
            if at_home(&tensor.name) {
                let hit = Hit {
                    file,
                    weight: *weight,
                    dtype: tensor.dtype,
                };
                self.names.entry(Arc::clone(&tensor.name)).or_default().push(hit);
            }
            match *weight {
                Some(weight) => entries.extend(self.all_pieces(&tensor.name, weight)),
                None => left_out.push((Arc::clone(&tensor.name), tensor.dtype)),
            }
        }
        let id = self.push_segment(stem, entries, left_out.into());
        self.defaults.insert(id);
    }

    fn all_pieces(&self, name: &Arc<str>, weight: WeightId) -> Vec<SegmentEntry> {
        let count = self.weights.get(weight.0 as usize).map_or(0, |w| w.pieces.len()) as u32;
        (0..count)
            .map(|piece| self.entry(Arc::clone(name), weight, piece))
            .collect()
    }

    fn entry(&self, name: Arc<str>, id: WeightId, piece: u32) -> SegmentEntry {
        let weight = self.weight(id);
        let shape = match weight.pieces.get(piece as usize) {
            Some(part) if weight.pieces.len() > 1 => {
                vec![
                    part.rows.end - part.rows.start,
                    weight.shape.last().copied().unwrap_or(1),
                ]
            }
            _ => weight.shape.clone(),
        };
        SegmentEntry {
            name,
            weight: id,
            piece,
            dtype: weight.dtype,
            shape,
        }
    }

    fn push_segment(
        &mut self,
        name: Arc<str>,
        entries: Vec<SegmentEntry>,
        left_out: Arc<[(Arc<str>, FileDType)]>,
    ) -> SegmentId {
        let id = SegmentId(self.segments.len() as u32);
        self.segments.push(Segment {
            id,
            name: Arc::clone(&name),
            entries: entries.into(),
            left_out,
        });
        self.current.insert(name, id);
        id
    }

    /// The sources, by the index in [`Weight::source`]; each file once.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The files with their headers, for listing; tensors of all types.
    pub fn files(&self) -> &[CatalogFile] {
        &self.files
    }

    /// The weights, by the number in their id.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// A weight.
    ///
    /// # Panics
    /// If `id` is of another catalog; [`Catalog::get`] does not.
    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.0 as usize]
    }

    /// A weight, or `None` if `id` is not of this catalog.
    pub fn get(&self, id: WeightId) -> Option<&Weight> {
        self.weights.get(id.0 as usize)
    }

    /// The names of all tensors that can be weights, sorted, each once.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names
            .iter()
            .filter(|(_, hits)| hits.iter().any(|h| h.weight.is_some()))
            .map(|(name, _)| &**name)
    }

    /// The weight of this name.
    ///
    /// Errors: [`Error::NotFound`]; [`Error::Invalid`] if files without an index have different tensors of this name;
    /// [`Error::Format`] if its type cannot be a weight.
    pub fn find(&self, name: &str) -> Result<WeightId> {
        let hits = self.names.get(name).map(Vec::as_slice).unwrap_or_default();
        let Some(first) = hits.first() else {
            return Err(Error::NotFound {
                what: "weight",
                name: name.into(),
                hint: Some(self.name_hint(name)),
            });
        };
        if hits
            .iter()
            .any(|h| h.weight != first.weight || self.files[h.file].source != self.files[first.file].source)
        {
            let files: Vec<String> = hits.iter().map(|h| format!("`{}`", self.files[h.file].stem)).collect();
            let reason = format!(
                "the files {} each have one; ask the segment of one of them for it",
                files.join(", ")
            );
            return Err(Error::Invalid {
                what: format!("weight `{name}`"),
                reason,
            });
        }
        first
            .weight
            .ok_or_else(|| self.unusable(self.files[first.file].source, name, first.dtype))
    }

    fn unusable(&self, source: usize, name: &str, dtype: FileDType) -> Error {
        Error::Format {
            file: self.sources[source].name().into(),
            tensor: Some(name.into()),
            reason: format!("its type {dtype} cannot be a weight; known are {}", DType::list()),
        }
    }

    fn name_hint(&self, name: &str) -> String {
        let last = name.rsplit('.').next().unwrap_or(name);
        let near: Vec<&str> = self
            .names()
            .filter(|n| n.rsplit('.').next() == Some(last))
            .take(7)
            .collect();
        if near.is_empty() {
            hint("the catalog", self.names())
        } else {
            hint("the catalog", near.into_iter())
        }
    }

    /// The segment that stands under this name. Errors: [`Error::NotFound`].
    pub fn segment(&self, name: &str) -> Result<Segment> {
        match self.current.get(name).and_then(|id| self.segment_by_id(*id)) {
            Some(segment) => Ok(segment.clone()),
            None => Err(Error::NotFound {
                what: "segment",
                name: name.into(),
                hint: Some(hint("the catalog", self.current.keys().map(|k| &**k))),
            }),
        }
    }

    /// The segment of this number, also if it has been replaced since.
    pub fn segment_by_id(&self, id: SegmentId) -> Option<&Segment> {
        self.segments.get(id.0 as usize)
    }

    /// The segments that stand, in the order in which they were made.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments
            .iter()
            .filter(|s| self.current.get(&s.name) == Some(&s.id))
    }

    /// Makes a segment of whole weights, each under a name of its own in the segment. They leave the default segments
    /// of their files; a default segment that this empties is gone.
    ///
    /// Errors: [`Error::Invalid`] if the segment's name is taken, a name is given twice, or a weight is not of this catalog.
    pub fn define_segment(&mut self, name: &str, weights: &[(&str, WeightId)]) -> Result<Segment> {
        let mut entries = Vec::new();
        for (short, weight) in weights {
            self.check_weight(name, short, *weight)?;
            entries.extend(self.all_pieces(&Arc::from(*short), *weight));
        }
        self.define(name, entries, weights.iter().map(|(short, _)| *short))
    }

    /// As [`Catalog::define_segment`], of single pieces: `(name in the segment, weight, index of the piece)`.
    pub fn define_segment_of_pieces(&mut self, name: &str, pieces: &[(&str, WeightId, u32)]) -> Result<Segment> {
        let mut entries = Vec::new();
        for (short, weight, piece) in pieces {
            self.check_weight(name, short, *weight)?;
            let count = self.weight(*weight).pieces.len();
            if *piece as usize >= count {
                let reason = format!("piece {piece} of `{short}` was asked for, but the weight has {count}");
                return Err(Error::Invalid {
                    what: format!("segment `{name}`"),
                    reason,
                });
            }
            entries.push(self.entry(Arc::from(*short), *weight, *piece));
        }
        // Several pieces of one weight go by one name; anything else by one name is a mistake.
        let mut distinct: Vec<(&str, WeightId)> = pieces.iter().map(|(short, weight, _)| (*short, *weight)).collect();
        distinct.dedup();
        let mut seen = HashSet::new();
        if let Some(twice) = entries.iter().find(|e| !seen.insert((e.weight, e.piece))) {
            let reason = format!("piece {} of `{}` is given twice", twice.piece, twice.name);
            return Err(Error::Invalid {
                what: format!("segment `{name}`"),
                reason,
            });
        }
        self.define(name, entries, distinct.iter().map(|(short, _)| *short))
    }

    fn check_weight(&self, segment: &str, short: &str, weight: WeightId) -> Result<()> {
        match self.get(weight) {
            Some(_) => Ok(()),
            None => Err(Error::Invalid {
                what: format!("segment `{segment}`"),
                reason: format!(
                    "`{short}` is weight {}, but the catalog has {} weights",
                    weight.0,
                    self.weights.len()
                ),
            }),
        }
    }

    fn define<'a>(
        &mut self,
        name: &str,
        entries: Vec<SegmentEntry>,
        mut short_names: impl Iterator<Item = &'a str>,
    ) -> Result<Segment> {
        let refuse = |reason: String| Error::Invalid {
            what: format!("segment `{name}`"),
            reason,
        };
        let mut seen = HashSet::new();
        if let Some(twice) = short_names.find(|short| !seen.insert(*short)) {
            return Err(refuse(format!("the name `{twice}` is given twice")));
        }
        let taken: HashSet<(WeightId, u32)> = entries.iter().map(|e| (e.weight, e.piece)).collect();
        let mut shrunk = Vec::new();
        for id in &self.defaults {
            let old = &self.segments[id.0 as usize];
            let rest = old
                .entries
                .iter()
                .filter(|e| !taken.contains(&(e.weight, e.piece)))
                .cloned();
            let rest: Vec<SegmentEntry> = rest.collect();
            if rest.len() != old.entries.len() {
                shrunk.push((*id, Arc::clone(&old.name), rest, Arc::clone(&old.left_out)));
            }
        }
        let gone = |id: SegmentId| shrunk.iter().any(|(other, _, rest, _)| *other == id && rest.is_empty());
        if self.current.get(name).is_some_and(|id| !gone(*id)) {
            return Err(refuse("the name is taken".into()));
        }
        // Nothing fails from here on. Sorted, as ids must not depend on the order of a hash set.
        shrunk.sort_by_key(|(id, _, _, _)| *id);
        for (id, file, rest, left_out) in shrunk {
            self.defaults.remove(&id);
            self.current.remove(&file);
            if !rest.is_empty() {
                let id = self.push_segment(file, rest, left_out);
                self.defaults.insert(id);
            }
        }
        let id = self.push_segment(name.into(), entries, Arc::default());
        Ok(self.segments[id.0 as usize].clone())
    }

    /// Bytes of a segment that lie in files: what one load of it reads.
    pub fn segment_bytes(&self, segment: &Segment) -> u64 {
        segment
            .entries
            .iter()
            .filter_map(|e| self.piece(e))
            .map(|p| p.range.end - p.range.start)
            .sum()
    }

    /// The piece that an entry means.
    pub fn piece(&self, entry: &SegmentEntry) -> Option<&Piece> {
        self.get(entry.weight)?.pieces.get(entry.piece as usize)
    }

    /// Reads a whole weight of at most [`READ_CAP`] bytes into host memory, as stored.
    ///
    /// Errors: [`Error::Limit`] above the cap; [`Error::Invalid`] for an id of another catalog; what
    /// [`Source::fill`] returns.
    pub async fn read(&self, id: WeightId) -> Result<Vec<u8>> {
        let bytes = self.known(id)?.bytes();
        self.read_capped(id, 0..bytes, READ_CAP).await
    }

    /// Reads `range` of a weight, in bytes counted from its first, of at most `cap` bytes. Errors: as [`Catalog::read`];
    /// [`Error::Invalid`] for a range that is not within the weight.
    pub async fn read_capped(&self, id: WeightId, range: Range<u64>, cap: u64) -> Result<Vec<u8>> {
        let weight = self.known(id)?;
        let what = || format!("reading weight `{}` into host memory", weight.name());
        if range.start > range.end || range.end > weight.bytes() {
            let reason = format!(
                "bytes {} to {} of {} were asked for",
                range.start,
                range.end,
                Bytes(weight.bytes())
            );
            return Err(Error::Invalid { what: what(), reason });
        }
        let need = range.end - range.start;
        let limit = Error::Limit {
            what: what(),
            need,
            have: cap,
        };
        let Some(length) = usize::try_from(need).ok().filter(|_| need <= cap) else {
            return Err(limit);
        };
        let mut bytes = vec![0; length];
        self.sources[weight.source]
            .fill(weight.range.start + range.start, &mut bytes)
            .await?;
        Ok(bytes)
    }

    fn known(&self, id: WeightId) -> Result<&Weight> {
        self.get(id).ok_or_else(|| Error::Invalid {
            what: format!("weight {}", id.0),
            reason: format!("the catalog has {} weights", self.weights.len()),
        })
    }

    /// A number that tells this model from others: the same for the same files on any machine, whatever folder they are
    /// in. It covers the files' names, sizes and headers, not the weights' bytes, which are never read for it.
    pub fn fingerprint(&self) -> u64 {
        let mut files: Vec<&CatalogFile> = self.files.iter().collect();
        files.sort_by(|a, b| a.stem.cmp(&b.stem));
        let mut hash = Fingerprint::new();
        for file in files {
            hash = hash.number(file.stem.len() as u64).bytes(file.stem.as_bytes());
            hash = hash
                .number(self.sources[file.source].len())
                .number(file.header.fingerprint);
        }
        hash.value()
    }
}

/// The segment of a shard: its path in the index without the extension, as two sub-folders may hold equal file names.
fn stem_of_shard(name: &str) -> &str {
    name.strip_suffix(".safetensors")
        .filter(|stem| !stem.is_empty())
        .unwrap_or(name)
}

fn too_many(file: &str) -> Error {
    Error::Format {
        file: file.into(),
        tensor: None,
        reason: "there are more tensors than can be numbered".into(),
    }
}
