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
        let mut defined = self.define_segments(&[(name, weights.to_vec())])?;
        defined.pop().ok_or_else(|| refuse(name, "it was not made".into()))
    }

    /// As [`Catalog::define_segment`], many at once, which for the blocks of a deep model is far cheaper than one after
    /// the other. Either all are made, or none.
    pub fn define_segments(&mut self, segments: &[(&str, Vec<(&str, WeightId)>)]) -> Result<Vec<Segment>> {
        let mut specs = Vec::with_capacity(segments.len());
        for (name, weights) in segments {
            let mut entries = Vec::new();
            for (short, weight) in weights {
                self.check_weight(name, short, *weight)?;
                entries.extend(self.all_pieces(&Arc::from(*short), *weight));
            }
            check_names(name, weights.iter().map(|(short, _)| *short))?;
            specs.push((Arc::from(*name), entries));
        }
        self.define(specs)
    }

    /// As [`Catalog::define_segment`], of single pieces: `(name in the segment, weight, index of the piece)`.
    pub fn define_segment_of_pieces(&mut self, name: &str, pieces: &[(&str, WeightId, u32)]) -> Result<Segment> {
        let mut entries = Vec::new();
        for (short, weight, piece) in pieces {
            self.check_weight(name, short, *weight)?;
            let count = self.weight(*weight).pieces.len();
            if *piece as usize >= count {
                return Err(refuse(
                    name,
                    format!("piece {piece} of `{short}` was asked for, but the weight has {count}"),
                ));
            }
            entries.push(self.entry(Arc::from(*short), *weight, *piece));
        }
        // Several pieces of one weight go by one name; anything else by one name is a mistake.
        let mut distinct: Vec<(&str, WeightId)> = pieces.iter().map(|(short, weight, _)| (*short, *weight)).collect();
        distinct.dedup();
        let mut seen = HashSet::new();
        if let Some(twice) = entries.iter().find(|e| !seen.insert((e.weight, e.piece))) {
            return Err(refuse(name, format!("piece {} of `{}` is given twice", twice.piece, twice.name)));
        }
        check_names(name, distinct.iter().map(|(short, _)| *short))?;
        let mut defined = self.define(vec![(name.into(), entries)])?;
        defined.pop().ok_or_else(|| refuse(name, "it was not made".into()))
    }

    fn check_weight(&self, segment: &str, short: &str, weight: WeightId) -> Result<()> {
        match self.get(weight) {
            Some(_) => Ok(()),
            None => {
                let reason =
                    format!("`{short}` is weight {}, but the catalog has {} weights", weight.0, self.weights.len());
                Err(refuse(segment, reason))
            }
        }
    }

    fn define(&mut self, specs: Vec<(Arc<str>, Vec<SegmentEntry>)>) -> Result<Vec<Segment>> {
        let entries = specs.iter().flat_map(|(_, entries)| entries);
        let taken: HashSet<(WeightId, u32)> = entries.map(|e| (e.weight, e.piece)).collect();
        let mut shrunk = Vec::new();
        for id in &self.defaults {
            let old = &self.segments[id.0 as usize];
            let rest = old.entries.iter().filter(|e| !taken.contains(&(e.weight, e.piece))).cloned();
            let rest: Vec<SegmentEntry> = rest.collect();
            if rest.len() != old.entries.len() {
                shrunk.push((*id, Arc::clone(&old.name), rest, Arc::clone(&old.left_out)));
            }
        }
        let gone: HashSet<SegmentId> =
            shrunk.iter().filter(|(_, _, rest, _)| rest.is_empty()).map(|(id, ..)| *id).collect();
        let mut new = HashSet::new();
        let is_taken = |name: &Arc<str>| {
            self.current.get(&**name).is_some_and(|id| !gone.contains(id)) || !new.insert(name.clone())
        };
        if let Some(name) = specs.iter().map(|(name, _)| name.clone()).find(is_taken) {
            return Err(refuse(&name, "the name is taken".into()));
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
        let ids: Vec<SegmentId> =
            specs.into_iter().map(|(name, entries)| self.push_segment(name, entries, Arc::default())).collect();
        Ok(ids.into_iter().map(|id| self.segments[id.0 as usize].clone()).collect())
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

fn refuse(segment: &str, reason: String) -> Error {
    Error::Invalid { what: format!("segment `{segment}`"), reason }
}

fn check_names<'a>(segment: &str, mut short_names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut seen = HashSet::new();
    match short_names.find(|short| !seen.insert(*short)) {
        Some(twice) => Err(refuse(segment, format!("the name `{twice}` is given twice"))),
        None => Ok(()),
    }
}
