//! What weights a model has: names, shapes, byte ranges, segments. It holds no weight bytes.
//!
//! A weight's identity is *(source, byte range)* and never its name: a file reached by two links is one source, and a
//! range under two names is one weight, so nothing is loaded or counted twice. Equal bytes at two ranges are two.
//! Everything is checked when the catalog is opened; what it lists can be read, unless the files change later, which
//! every read notices.

mod define;
mod open;

use crate::error::{Bytes, Error, Result};
use crate::weights::dtype::{DType, FileDType};
use crate::weights::fingerprint::Fingerprint;
use crate::weights::piece::Piece;
use crate::weights::safetensors::Header;
use crate::weights::segment::{Segment, SegmentEntry, SegmentId, hint};
use crate::weights::source::Source;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
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
        self.names.iter().filter(|(_, hits)| hits.iter().any(|h| h.weight.is_some())).map(|(name, _)| &**name)
    }

    /// The weight of this name.
    ///
    /// Errors: [`Error::NotFound`]; [`Error::Invalid`] if files without an index have different tensors of this name;
    /// [`Error::Format`] if its type cannot be a weight.
    pub fn find(&self, name: &str) -> Result<WeightId> {
        let hits = self.names.get(name).map(Vec::as_slice).unwrap_or_default();
        let Some(first) = hits.first() else {
            return Err(Error::NotFound { what: "weight", name: name.into(), hint: Some(self.name_hint(name)) });
        };
        if hits.iter().any(|h| h.weight != first.weight || self.files[h.file].source != self.files[first.file].source) {
            let files: Vec<String> = hits.iter().map(|h| format!("`{}`", self.files[h.file].stem)).collect();
            let reason = format!("the files {} each have one; ask the segment of one of them for it", files.join(", "));
            return Err(Error::Invalid { what: format!("weight `{name}`"), reason });
        }
        first.weight.ok_or_else(|| self.unusable(self.files[first.file].source, name, first.dtype))
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
        let near: Vec<&str> = self.names().filter(|n| n.rsplit('.').next() == Some(last)).take(7).collect();
        if near.is_empty() { hint("the catalog", self.names()) } else { hint("the catalog", near.into_iter()) }
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
        self.segments.iter().filter(|s| self.current.get(&s.name) == Some(&s.id))
    }

    /// Bytes of a segment that lie in files: what one load of it reads.
    pub fn segment_bytes(&self, segment: &Segment) -> u64 {
        segment.entries.iter().filter_map(|e| self.piece(e)).map(|p| p.range.end - p.range.start).sum()
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
            let reason = format!("bytes {} to {} of {} were asked for", range.start, range.end, Bytes(weight.bytes()));
            return Err(Error::Invalid { what: what(), reason });
        }
        let need = range.end - range.start;
        let limit = Error::Limit { what: what(), need, have: cap };
        let Some(length) = usize::try_from(need).ok().filter(|_| need <= cap) else {
            return Err(limit);
        };
        let mut bytes = vec![0; length];
        self.sources[weight.source].fill(weight.range.start + range.start, &mut bytes).await?;
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
            hash = hash.number(self.sources[file.source].len()).number(file.header.fingerprint);
        }
        hash.value()
    }
}
