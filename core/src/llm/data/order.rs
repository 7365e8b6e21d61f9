//! Which rows make which batch: a function of the position, so that a training goes on anywhere as if it had never stopped.
//!
//! A *window* is the rows of one optimizer step, and all of it has one length (one program): the shortest bucket that holds
//! its longest row. Window number p is computed from p, the rows' lengths and the seed; nothing of the past is needed.
//! Shuffled windows are made of rows of like length, so that little is padded, and each pass over the data is shuffled anew.

use super::Dataset;
use crate::error::{Error, Result};
use crate::llm::programs::Bucket;
use crate::llm::trainer::Micro;

/// The shortest bucket.
const SHORTEST: u64 = 32;

/// In what order rows are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they stand in the file, from its beginning again after the end.
    File,
    /// Each pass in another order, drawn from the seed and the pass's number. Rows that fill no whole window at the end of a
    /// pass wait for the next.
    Shuffled {
        /// The seed.
        seed: u64,
    },
}

/// A data set in batches.
#[derive(Clone, Debug)]
pub struct Batches {
    set: Dataset,
    order: Order,
    rows: u64,
    accumulation: u64,
    lengths: Vec<u64>,
    /// The windows of one pass, and which.
    pass: Option<(u64, Vec<Vec<u32>>)>,
}

impl Batches {
    /// `rows` in a batch, `accumulation` batches in a window (an optimizer step).
    ///
    /// Errors: [`Error::Invalid`] if one is 0, or a window has more rows than 2²⁴.
    pub fn new(set: Dataset, order: Order, rows: u64, accumulation: u64) -> Result<Batches> {
        let window = rows.saturating_mul(accumulation);
        if !(1..=1 << 24).contains(&window) {
            let reason = format!("{accumulation} batches of {rows} rows: a step needs from 1 to 16777216 rows");
            return Err(Error::Invalid { what: "--batch-size".into(), reason });
        }
        let lengths = lengths(set.stats().longest, set.encoder().options.max_tokens);
        Ok(Batches { set, order, rows, accumulation, lengths, pass: None })
    }

    /// The data.
    pub fn set(&self) -> &Dataset {
        &self.set
    }

    /// Rows of a batch.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Batches of a window.
    pub fn accumulation(&self) -> u64 {
        self.accumulation
    }

    /// In what order rows are taken.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The shapes that occur, shortest first: one for each length of a row.
    pub fn buckets(&self) -> Vec<Bucket> {
        let mut used: Vec<u64> = self.set.rows().iter().map(|row| self.length(u64::from(row.tokens))).collect();
        used.sort_unstable();
        used.dedup();
        used.into_iter().map(|tokens| Bucket { rows: self.rows, tokens }).collect()
    }

    fn length(&self, tokens: u64) -> u64 {
        let i = self.lengths.partition_point(|length| *length < tokens);
        // The last is as long as the longest row.
        self.lengths.get(i).copied().unwrap_or(tokens)
    }

    fn bucket(&self, rows: &[u32]) -> Bucket {
        let tokens = |row: &u32| self.set.rows().get(*row as usize).map_or(0, |row| u64::from(row.tokens));
        Bucket { rows: self.rows, tokens: self.length(rows.iter().map(tokens).max().unwrap_or(0)) }
    }

    /// Windows of one pass over the data; at least 1.
    pub fn windows_per_pass(&self) -> u64 {
        (self.set.len() as u64 / (self.rows * self.accumulation)).max(1)
    }

    /// The rows of window number `position`, in order, batch after batch.
    pub fn window_rows(&mut self, position: u64) -> Vec<u32> {
        let size = self.rows * self.accumulation;
        let all = self.set.len() as u64;
        match self.order {
            Order::File => (0..size)
                .map(|i| ((u128::from(position) * u128::from(size) + u128::from(i)) % u128::from(all)) as u32)
                .collect(),
            Order::Shuffled { seed } => {
                let (pass, within) = (position / self.windows_per_pass(), position % self.windows_per_pass());
                if self.pass.as_ref().is_none_or(|(there, _)| *there != pass) {
                    self.pass = Some((pass, self.shuffled(seed, pass)));
                }
                let windows = self.pass.as_ref().map(|(_, windows)| windows.as_slice()).unwrap_or_default();
                windows.get(within as usize).cloned().unwrap_or_default()
            }
        }
    }

    /// The windows of one pass: rows drawn without regard to length, sorted into windows of like length as they come, what is
    /// left over put together from short to long, and the windows then shuffled again.
    fn shuffled(&self, seed: u64, pass: u64) -> Vec<Vec<u32>> {
        let size = (self.rows * self.accumulation) as usize;
        let mut drawn: Vec<u32> = (0..self.set.len() as u32).collect();
        shuffle(&mut drawn, seed, 2 * pass);
        let wanted = self.windows_per_pass() as usize * size;
        let drawn = drawn.iter().cycle().take(wanted);
        let mut bins: Vec<Vec<u32>> = vec![Vec::new(); self.lengths.len()];
        let mut windows = Vec::new();
        for row in drawn {
            let length = self.bucket(std::slice::from_ref(row)).tokens;
            let i = self.lengths.partition_point(|l| *l < length);
            let Some(bin) = bins.get_mut(i) else { continue };
            bin.push(*row);
            if bin.len() == size {
                windows.push(std::mem::take(bin));
            }
        }
        let left: Vec<u32> = bins.into_iter().flatten().collect();
        windows.extend(left.chunks(size).map(<[u32]>::to_vec));
        shuffle(&mut windows, seed, 2 * pass + 1);
        windows
    }

    /// The micro-batches of window number `position`.
    ///
    /// Errors: as [`Dataset::example`].
    pub async fn window(&mut self, position: u64) -> Result<Vec<Micro>> {
        let rows = self.window_rows(position);
        let bucket = self.bucket(&rows);
        let mut batches = Vec::with_capacity(self.accumulation as usize);
        for rows in rows.chunks(self.rows as usize) {
            batches.push(self.batch(bucket, rows).await?);
        }
        Ok(batches)
    }

    /// Batches of an evaluation: all rows in file order.
    pub fn evaluation_batches(&self) -> u64 {
        (self.set.len() as u64).div_ceil(self.rows)
    }

    /// Batch number `index` of an evaluation; what is missing in the last one is filled with rows of which nothing counts.
    pub async fn evaluation(&self, index: u64) -> Result<Micro> {
        let all = self.set.len() as u64;
        let begin = index.saturating_mul(self.rows).min(all);
        let rows: Vec<u32> = (begin..(begin + self.rows).min(all)).map(|row| row as u32).collect();
        self.batch(self.bucket(&rows), &rows).await
    }

    async fn batch(&self, bucket: Bucket, rows: &[u32]) -> Result<Micro> {
        let (width, tokens) = (bucket.rows as usize, bucket.tokens as usize);
        // The end token fills up. Nothing is learned there, and no token looks ahead.
        let fill = self.set.encoder().end() as i32;
        let mut micro =
            Micro { bucket, ids: vec![fill; width * tokens], labels: vec![-1; width * tokens], rows: vec![-1; width] };
        let places = micro.ids.chunks_mut(tokens).zip(micro.labels.chunks_mut(tokens)).zip(&mut micro.rows);
        for (row, ((ids, labels), id)) in rows.iter().zip(places) {
            let example = self.set.example(*row).await?;
            for (to, from) in ids.iter_mut().zip(&example.ids) {
                *to = *from;
            }
            // Position i predicts token i + 1.
            for (to, next) in labels.iter_mut().zip(example.ids.iter().skip(1)).skip(example.from - 1) {
                *to = *next;
            }
            *id = i32::try_from(*row).unwrap_or(-1);
        }
        Ok(micro)
    }
}

/// Bucket lengths: doubling, the last as long as the longest row rounded up to 32, and never above `most`.
fn lengths(longest: u64, most: u64) -> Vec<u64> {
    let last = longest.next_multiple_of(SHORTEST).min(most).max(longest);
    let doubled = std::iter::successors(Some(SHORTEST), |length| length.checked_mul(2));
    doubled.take_while(|length| *length < last).chain([last]).collect()
}

/// Fisher and Yates' shuffle, its random numbers drawn by counter: (seed, stream, index).
fn shuffle<T>(items: &mut [T], seed: u64, stream: u64) {
    for i in (1..items.len()).rev() {
        let random = mix(mix(mix(seed) ^ stream) ^ i as u64);
        // The bias of this way to a range is below 2⁻³².
        let j = ((u128::from(random) * (i as u128 + 1)) >> 64) as usize;
        items.swap(i, j);
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014): its step and its finalizer.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_those_the_authors_publish() {
        // The first three outputs from state 1234567 (their states are its multiples of the step).
        let step = 0x9E37_79B9_7F4A_7C15u64;
        let outputs = [0, 1, 2].map(|i| mix(1_234_567u64.wrapping_add(step.wrapping_mul(i))));
        assert_eq!(outputs, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn lengths_double_and_end_at_the_longest_row_within_the_limit() {
        assert_eq!(lengths(60, 64), [32, 64]);
        assert_eq!(lengths(61, 2048), [32, 64]);
        assert_eq!(lengths(200, 2048), [32, 64, 128, 224]);
        assert_eq!(lengths(50, 50), [32, 50]);
        assert_eq!(lengths(10, 2048), [32]);
        assert_eq!(lengths(10, 10), [10]);
        assert_eq!(lengths(128, 128), [32, 64, 128]);
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_seeds_and_passes_differ() {
        let of = |seed, stream| {
            let mut items: Vec<u32> = (0..1000).collect();
            shuffle(&mut items, seed, stream);
            items
        };
        let mut sorted = of(1, 0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(1, 2));
        assert_ne!(of(1, 0), of(2, 0));
        assert!(of(1, 0).iter().enumerate().filter(|(i, x)| *i as u32 == **x).count() < 10);
    }
}
