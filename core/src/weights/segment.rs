//! Segments: named sets of weights that are loaded and evicted together.

use crate::error::{Error, Result};
use crate::weights::catalog::WeightId;
use crate::weights::dtype::{DType, FileDType};
use std::sync::Arc;

/// Names a segment within its catalog. An id keeps naming the same content, also after the segment was redefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct SegmentId(pub u32);

/// One piece of one weight of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SegmentEntry {
    /// The weight's name within the segment; all its pieces have the same.
    pub name: Arc<str>,
    /// The weight.
    pub weight: WeightId,
    /// The index of the piece in the weight's `pieces`.
    pub piece: u32,
    /// The element type.
    pub dtype: DType,
    /// The shape of this piece: the weight's own where it has one piece, else [rows, columns].
    pub shape: Vec<u64>,
}

/// A named set of weights (or pieces of them) that are loaded and evicted together. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its number in the catalog.
    pub id: SegmentId,
    /// Its name: the file's stem, or what the caller chose.
    pub name: Arc<str>,
    /// What is loaded, in this order. A weight of size zero is listed and occupies no bytes.
    pub entries: Arc<[SegmentEntry]>,
    /// Tensors of the file whose type cannot be a weight, with that type: they are listed but never loaded.
    pub left_out: Arc<[(Arc<str>, FileDType)]>,
}

impl Segment {
    /// The weight with this name in the segment.
    ///
    /// Errors: [`Error::NotFound`]; [`Error::Invalid`] if it is one of `left_out`.
    pub fn weight(&self, name: &str) -> Result<WeightId> {
        if let Some(entry) = self.entries.iter().find(|e| &*e.name == name) {
            return Ok(entry.weight);
        }
        if let Some((_, dtype)) = self.left_out.iter().find(|(n, _)| &**n == name) {
            let reason = format!("its type {dtype} cannot be a weight; known are {}", DType::list());
            return Err(Error::Invalid { what: format!("weight `{name}` of segment `{}`", self.name), reason });
        }
        let hint = hint(&format!("segment `{}`", self.name), self.names());
        Err(Error::NotFound { what: "weight", name: name.into(), hint: Some(hint) })
    }

    /// The names of its weights, in order, each once.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let mut last: Option<&SegmentEntry> = None;
        self.entries.iter().filter_map(move |entry| {
            let again = last.is_some_and(|l| l.weight == entry.weight && l.name == entry.name);
            last = Some(entry);
            (!again).then_some(&*entry.name)
        })
    }
}

/// "`where` has a, b and 5 more".
pub(crate) fn hint<'a>(place: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    let shown: Vec<String> = names.iter().take(6).map(|n| format!("`{n}`")).collect();
    match names.len() {
        0 => format!("{place} has none"),
        n if n > shown.len() => format!("{place} has {} and {} more", shown.join(", "), n - shown.len()),
        _ => format!("{place} has {}", shown.join(", ")),
    }
}
