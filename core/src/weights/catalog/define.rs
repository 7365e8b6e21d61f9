//! Segments of the caller's choice in place of the files': transformer blocks, pieces of a head.

use crate::error::{Error, Result};
use crate::weights::catalog::{Catalog, WeightId};
use crate::weights::dtype::FileDType;
use crate::weights::segment::{Segment, SegmentEntry, SegmentId};
use std::collections::HashSet;
use std::sync::Arc;

impl Catalog {
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
                return Err(Error::Invalid { what: format!("segment `{name}`"), reason });
            }
            entries.push(self.entry(Arc::from(*short), *weight, *piece));
        }
        // Several pieces of one weight go by one name; anything else by one name is a mistake.
        let mut distinct: Vec<(&str, WeightId)> = pieces.iter().map(|(short, weight, _)| (*short, *weight)).collect();
        distinct.dedup();
        let mut seen = HashSet::new();
        if let Some(twice) = entries.iter().find(|e| !seen.insert((e.weight, e.piece))) {
            let reason = format!("piece {} of `{}` is given twice", twice.piece, twice.name);
            return Err(Error::Invalid { what: format!("segment `{name}`"), reason });
        }
        self.define(name, entries, distinct.iter().map(|(short, _)| *short))
    }

    fn check_weight(&self, segment: &str, short: &str, weight: WeightId) -> Result<()> {
        match self.get(weight) {
            Some(_) => Ok(()),
            None => Err(Error::Invalid {
                what: format!("segment `{segment}`"),
                reason: format!("`{short}` is weight {}, but the catalog has {} weights", weight.0, self.weights.len()),
            }),
        }
    }

    fn define<'a>(
        &mut self,
        name: &str,
        entries: Vec<SegmentEntry>,
        mut short_names: impl Iterator<Item = &'a str>,
    ) -> Result<Segment> {
        let refuse = |reason: String| Error::Invalid { what: format!("segment `{name}`"), reason };
        let mut seen = HashSet::new();
        if let Some(twice) = short_names.find(|short| !seen.insert(*short)) {
            return Err(refuse(format!("the name `{twice}` is given twice")));
        }
        let taken: HashSet<(WeightId, u32)> = entries.iter().map(|e| (e.weight, e.piece)).collect();
        let mut shrunk = Vec::new();
        for id in &self.defaults {
            let old = &self.segments[id.0 as usize];
            let rest = old.entries.iter().filter(|e| !taken.contains(&(e.weight, e.piece))).cloned();
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

    pub(super) fn all_pieces(&self, name: &Arc<str>, weight: WeightId) -> Vec<SegmentEntry> {
        let count = self.weights.get(weight.0 as usize).map_or(0, |w| w.pieces.len()) as u32;
        (0..count).map(|piece| self.entry(Arc::clone(name), weight, piece)).collect()
    }

    pub(crate) fn entry(&self, name: Arc<str>, id: WeightId, piece: u32) -> SegmentEntry {
        let weight = self.weight(id);
        let shape = match weight.pieces.get(piece as usize) {
            Some(part) if weight.pieces.len() > 1 => {
                vec![part.rows.end - part.rows.start, weight.shape.last().copied().unwrap_or(1)]
            }
            _ => weight.shape.clone(),
        };
        SegmentEntry { name, weight: id, piece, dtype: weight.dtype, shape }
    }

    pub(super) fn push_segment(
        &mut self,
        name: Arc<str>,
        entries: Vec<SegmentEntry>,
        left_out: Arc<[(Arc<str>, FileDType)]>,
    ) -> SegmentId {
        let id = SegmentId(self.segments.len() as u32);
        self.segments.push(Segment { id, name: Arc::clone(&name), entries: entries.into(), left_out });
        self.current.insert(name, id);
        id
    }
}
