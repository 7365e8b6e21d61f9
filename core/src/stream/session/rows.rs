//! Rows of an embedding, read from the file by the ids of a batch.

use crate::compile::{Action, Plan};
use crate::error::{Error, Result};
use crate::weights::{Source, Weight};

/// Where the rows of a weight are.
pub(super) struct Rows {
    source: Source,
    start: u64,
    row: u64,
    count: u64,
    name: String,
}

impl Rows {
    pub fn new(source: Source, weight: &Weight) -> Rows {
        let row = weight.shape.last().copied().unwrap_or(1) * weight.dtype.size();
        let count = weight.bytes().checked_div(row).unwrap_or(0);
        Rows { source, start: weight.range.start, row, count, name: weight.name().to_string() }
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

    /// Bytes `start ..` of the rows, one behind the other, as many as `out` holds; those past the last row are zero.
    pub async fn read(&self, ids: &[u8], start: u64, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            let at = start + done as u64;
            let (index, within) = ((at / self.row) as usize, at % self.row);
            let Some(id) = ids.get(4 * index..4 * index + 4) else {
                out[done..].fill(0);
                return Ok(());
            };
            let len = ((self.row - within) as usize).min(out.len() - done);
            let from = self.start + u64::from(id_at(id)) * self.row + within;
            self.source.fill(from, &mut out[done..done + len]).await?;
            done += len;
        }
        Ok(())
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
