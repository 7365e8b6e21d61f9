//! Text from a model: a prompt in, one token at a time out, sampled on the host.
//!
//! The random number of a token depends on the seed and the token's position alone, so a text does not depend on how
//! its prompt was cut or what else the session ran.

use super::adapters::Adapter;
use super::models::Model;
use super::programs::{self, Inputs};
use crate::error::{Error, Result};
use crate::event::EventSink;
use crate::graph::Program;
use crate::stream::{Cancel, Session};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: the likeliest token. Else logits are divided by it.
    pub temperature: f32,
    /// Only the so many likeliest; 0: all.
    pub top_k: usize,
    /// Only the likeliest that together have this probability; 1: all.
    pub top_p: f32,
    /// Logits of tokens that occurred are divided (negative ones multiplied) by it; 1: none.
    pub repetition_penalty: f32,
    /// Seed.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Refuses numbers that make no sense, by the name of the flag.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: &str, reason: &str| Err(Error::Invalid { what: what.into(), reason: reason.into() });
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return refuse("temperature", "must be 0 (greedy) or above");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top-p", "must be above 0 and at most 1");
        }
        if !self.repetition_penalty.is_finite() || self.repetition_penalty <= 0.0 {
            return refuse("repetition-penalty", "must be above 0; 1 changes nothing");
        }
        Ok(())
    }

    /// The next token, of these logits, after these tokens.
    pub fn choose(&self, logits: &[f32], before: &[i32]) -> i32 {
        let mut scores: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
        if self.repetition_penalty != 1.0 {
            let mut seen: Vec<usize> = before.iter().filter_map(|t| usize::try_from(*t).ok()).collect();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some((_, s)) = scores.get_mut(token) {
                    *s = if *s > 0.0 { *s / self.repetition_penalty } else { *s * self.repetition_penalty };
                }
            }
        }
        // Ties go to the lower id.
        let likelier = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.temperature == 0.0 {
            return scores.iter().min_by(|a, b| likelier(a, b)).map_or(0, |(t, _)| *t as i32);
        }
        scores.sort_by(likelier);
        if self.top_k > 0 {
            scores.truncate(self.top_k);
        }
        let top = scores.first().map_or(0.0, |s| s.1);
        let mut weights: Vec<f64> = scores.iter().map(|s| f64::from((s.1 - top) / self.temperature).exp()).collect();
        if self.top_p < 1.0 {
            let limit = weights.iter().sum::<f64>() * f64::from(self.top_p);
            let mut sum = 0.0;
            let keep = weights.iter().position(|w| {
                sum += w;
                sum >= limit
            });
            weights.truncate(keep.map_or(weights.len(), |k| k + 1));
        }
        let mut at = unit(self.seed, before.len() as u64) * weights.iter().sum::<f64>();
        for (weight, (token, _)) in weights.iter().zip(&scores) {
            at -= weight;
            if at < 0.0 {
                return *token as i32;
            }
        }
        scores.first().map_or(0, |(t, _)| *t as i32)
    }
}

/// A number in [0, 1), a function of seed and index.
fn unit(seed: u64, index: u64) -> f64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(index.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(1);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// The two programs that make text, and where they stand in their set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Index of the first of the two plans.
    pub first: usize,
    /// Prompt tokens that go through at once.
    pub chunk: u64,
    /// Tokens of prompt and text together.
    pub capacity: u64,
}

impl Writer {
    /// The programs: part of a prompt, one token.
    pub fn programs(model: &Model, adapter: Option<&Adapter>, chunk: u64, capacity: u64) -> Result<Vec<Program>> {
        let chunk = chunk.clamp(2, capacity.max(2));
        Ok(vec![programs::prefill(model, adapter, chunk, capacity)?, programs::decode(model, adapter, capacity)?])
    }

    /// Goes on from `prompt` for at most `count` tokens or until one of `stop`, which is not part of the text. Each
    /// token is given to `each` as it comes; `false` from it ends the text.
    #[allow(clippy::too_many_arguments)] // a text is all of these
    pub async fn write(
        &self,
        session: &mut Session,
        model: &Model,
        prompt: &[i32],
        count: usize,
        stop: &[i32],
        sampling: &Sampling,
        cancel: &Cancel,
        events: &mut dyn EventSink,
        each: &mut dyn FnMut(i32) -> bool,
    ) -> Result<Vec<i32>> {
        self.go_on(session, model, 0, prompt, count, stop, sampling, cancel, events, each).await
    }

    /// As [`Writer::write`], where the cache holds the first `held` tokens of the prompt already, from the text before.
    #[allow(clippy::too_many_arguments)] // a text is all of these
    pub async fn go_on(
        &self,
        session: &mut Session,
        model: &Model,
        held: usize,
        prompt: &[i32],
        count: usize,
        stop: &[i32],
        sampling: &Sampling,
        cancel: &Cancel,
        events: &mut dyn EventSink,
        each: &mut dyn FnMut(i32) -> bool,
    ) -> Result<Vec<i32>> {
        sampling.check()?;
        let room = (self.capacity as usize).saturating_sub(prompt.len());
        if prompt.is_empty() || room == 0 {
            let reason = format!("1 to {} tokens are possible", self.capacity.saturating_sub(1));
            return Err(Error::Invalid { what: format!("a prompt of {} tokens", prompt.len()), reason });
        }
        let mut all = prompt.to_vec();
        // The last token always goes through: its logits are what the text begins with.
        let (mut at, mut logits) = (held.min(prompt.len() - 1), Vec::new());
        while at < prompt.len() {
            let part = &prompt[at..prompt.len().min(at + self.chunk as usize)];
            let inputs = Inputs::text(model, self.chunk, self.capacity, at as u64, part)?;
            logits = self.run(session, 0, &inputs, cancel, events).await?;
            at += part.len();
        }
        let mut text = Vec::new();
        for _ in 0..count.min(room) {
            let token = sampling.choose(&logits, &all);
            if stop.contains(&token) {
                break;
            }
            all.push(token);
            text.push(token);
            if !each(token) || text.len() == count.min(room) {
                break;
            }
            let inputs = Inputs::text(model, 1, self.capacity, all.len() as u64 - 1, &[token])?;
            logits = self.run(session, 1, &inputs, cancel, events).await?;
        }
        Ok(text)
    }

    async fn run(
        &self,
        session: &mut Session,
        which: usize,
        inputs: &Inputs,
        cancel: &Cancel,
        events: &mut dyn EventSink,
    ) -> Result<Vec<f32>> {
        let index = self.first + which;
        let plan = session.set().plans.get(index).ok_or_else(|| Error::NotFound {
            what: "plan",
            name: index.to_string(),
            hint: None,
        })?;
        let named = inputs.of_plan(plan);
        session.run(index, &named, cancel, events).await?.f32("logits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_likeliest_and_the_lower_id_at_a_tie() {
        assert_eq!(Sampling::default().choose(&[0.0, 3.0, 3.0, -1.0], &[]), 1);
    }

    #[test]
    fn a_penalty_holds_back_what_occurred() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(sampling.choose(&[1.0, 3.0, 2.0], &[1]), 2);
        assert_eq!(sampling.choose(&[-1.0, -0.9, -1.5], &[1]), 0);
    }

    #[test]
    fn sampling_keeps_to_top_k_and_top_p_and_repeats_by_seed() {
        let logits = [1.0, 2.0, 3.0, 4.0];
        let draw = |s: &Sampling| (0..200).map(|i| s.choose(&logits, &vec![0; i])).collect::<Vec<_>>();
        let k = Sampling { temperature: 1.0, top_k: 2, seed: 5, ..Sampling::default() };
        assert!(draw(&k).iter().all(|t| *t >= 2) && draw(&k).contains(&2));
        let p = Sampling { temperature: 1.0, top_p: 0.6, seed: 5, ..Sampling::default() };
        assert!(draw(&p).iter().all(|t| *t == 3));
        assert_eq!(draw(&k), draw(&k));
        assert_ne!(draw(&k), draw(&Sampling { seed: 6, ..k }));
    }
}
