//! Rows of an embedding, read from the file by the ids of a batch.

use std::ops::Range;
use std::sync::Arc;

use crate::compile::{Action, Plan};
use crate::error::{Error, Result};
use crate::rt::{Read, Reads};
use crate::weights::{Source, Weight};

/// Where the rows of a weight are.
pub(super) struct Rows {
    start: u64,
    row: u64,
    count: u64,
    name: String,
    /// The reads of the batch at hand, and which of them are a part's.
    table: Arc<Reads>,
    parts: Vec<Range<u32>>,
}

impl Rows {
    pub fn new(source: Source, weight: &Weight) -> Rows {
        let row = weight.shape.last().copied().unwrap_or(1) * weight.dtype.size();
        let count = weight.bytes().checked_div(row).unwrap_or(0);
        Rows {
            start: weight.range.start,
            row,
            count,
            name: weight.name().to_string(),
            table: Arc::new(Reads { sources: vec![source], reads: Vec::new() }),
            parts: Vec::new(),
        }
    }

    /// Fails on the first id that is not a row.
    pub fn check(&self, ids: &[u8]) -> Result<()> {
        match ids.chunks_exact(4).position(|id| u64::from(id_at(id)) >= self.count) {
            None => Ok(()),
            Some(i) => Err(Error::Invalid {
                what: format!("id {} at position {i}", id_at(&ids[4 * i..]) as i32),
                reason: format!("`{}` has {} rows", self.name, self.count),
            }),
        }
    }

    /// Lists what is to be read for the rows of a batch, one behind the other, in parts of `chunk` bytes, `size` in all. What
    /// lies past the last row is not read. Makes nothing once a batch of that many ids was prepared.
    pub fn prepare(&mut self, ids: &[u8], size: u64, chunk: u64) {
        if Arc::get_mut(&mut self.table).is_none() {
            // A run that was dropped has left reads of its own under way.
            self.table = Arc::new(Reads { sources: self.table.sources.clone(), reads: Vec::new() });
        }
        let Some(table) = Arc::get_mut(&mut self.table) else { return };
        table.reads.clear();
        self.parts.clear();
        let end = size.min(ids.len() as u64 / 4 * self.row);
        let mut at = 0;
        while at < size {
            let first = table.reads.len() as u32;
            let part = (at + chunk).min(size);
            let mut from = at;
            while from < part.min(end) {
                let (index, within) = ((from / self.row) as usize, from % self.row);
                let len = (self.row - within).min(part.min(end) - from);
                table.reads.push(Read {
                    source: 0,
                    at: self.start + u64::from(id_at(&ids[4 * index..])) * self.row + within,
                    to: (from - at) as u32,
                    len: len as u32,
                });
                from += len;
            }
            self.parts.push(first..table.reads.len() as u32);
            at = part;
        }
    }

    /// The reads of a part of what was prepared.
    pub fn part(&self, part: u32) -> (Range<u32>, &Arc<Reads>) {
        (self.parts.get(part as usize).cloned().unwrap_or_default(), &self.table)
    }
}

fn id_at(bytes: &[u8]) -> u32 {
    bytes.first_chunk::<4>().map_or(u32::MAX, |b| u32::from_le_bytes(*b))
}

/// The bytes of an input, by its index in the plan.
pub(super) fn ids_of<'a>(plan: &Plan, input: u32, inputs: &[(&str, &'a [u8])]) -> &'a [u8] {
    let name = plan.inputs.get(input as usize).map_or("", |p| &p.name);
    inputs.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, bytes)| bytes)
}

/// Checks all ids of a run before it begins.
pub(super) fn check_ids(
    plan: &Plan,
    inputs: &[(&str, &[u8])],
    rows: &std::collections::HashMap<crate::weights::WeightId, Rows>,
) -> Result<()> {
    for action in &plan.actions {
        if let Action::LoadRows { weight, input, .. } = action
            && let Some(rows) = rows.get(weight)
        {
            rows.check(ids_of(plan, *input, inputs))?;
        }
    }
    Ok(())
}
