//! The programs of a model: a training step, an evaluation, a prompt, a token. Each is for one shape of a batch.
//!
//! All programs of a session are compiled together, so a bucket more is a program more and never new memory. Blocks are
//! marked for recomputation; what differs from run to run (positions, rotary tables) is an input.

use super::adapters::Adapter;
use super::models::{DropoutInputs, Forward, Model};
use crate::compile::Plan;
use crate::error::{Error, Result};
use crate::graph::{Graph, Program, Tensor};
use crate::nn::{AdamW, HYPER_INPUT, Part, Trainable, embedding, rope_tables, token_losses, train_part_with};

/// Name of the output with the loss of each token, `[rows · tokens]`, 0 where nothing is trained. A step's loss is added up
/// from these, so that it does not depend on how many micro-batches a budget lets through together.
pub const LOSSES: &str = "losses";

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket {
    /// Rows.
    pub rows: u64,
    /// Tokens of a row, padding included.
    pub tokens: u64,
}

/// A graph being built, with what it was given.
struct Built<'a> {
    g: Graph,
    f: Forward<'a>,
    values: Option<Trainable>,
    /// The input of every block, then the normalized end.
    hidden: Vec<Tensor>,
}

fn build<'a>(
    model: &'a Model,
    adapter: Option<&'a Adapter>,
    bucket: Bucket,
    training: bool,
    capacity: Option<u64>,
) -> Result<Built<'a>> {
    let (b, t) = (bucket.rows, bucket.tokens);
    if b == 0 || t == 0 || t > model.config().max_positions {
        let reason = format!("1 to {} tokens of at least one row are possible", model.config().max_positions);
        return Err(Error::Invalid { what: format!("a batch of {b} rows of {t} tokens"), reason });
    }
    let mut g = Graph::new();
    let values = adapter.map(|a| a.params().bind(&mut g)).transpose()?;
    let ids = g.input_i32("ids", [b * t])?;
    let spans = g.input_i32("spans", [b, 2])?;
    let rotary = model.family().rotary();
    let positions = if rotary { None } else { Some(g.input_i32("positions", [b * t])?) };
    let tables = if rotary {
        let half = model.config().head_dim / 2;
        Some((g.input("cosines", [t, half])?, g.input("sines", [t, half])?))
    } else {
        None
    };
    let drops = training && adapter.is_some_and(|a| a.spec().dropout > 0.0);
    let dropout = if drops {
        Some(DropoutInputs { rows: g.input_i32("row_ids", [b])?, step: g.input_i32("step", [1])? })
    } else {
        None
    };
    let windows = values.as_ref().map(|v| v.windows.clone()).unwrap_or_default();
    let f =
        Forward { model, adapter: adapter.map(|a| (a, windows)), rows: b, tokens: t, spans, tables, capacity, dropout };
    let mut h = f.embed(&mut g, ids, positions)?;
    let mut hidden = Vec::with_capacity(model.blocks() + 1);
    for block in 0..model.blocks() {
        hidden.push(h);
        h = g.block(|g| model.family().block(g, &f, block, h))?;
    }
    hidden.push(h);
    Ok(Built { g, f, values, hidden })
}

impl Built<'_> {
    fn end(&mut self) -> Result<Tensor> {
        let h = self.hidden[self.hidden.len() - 1];
        let h = self.f.last_norm(&mut self.g, h)?;
        let last = self.hidden.len() - 1;
        self.hidden[last] = h;
        Ok(h)
    }

    fn loss(&mut self) -> Result<Tensor> {
        Ok(self.losses()?.0)
    }

    /// Σ weight · loss over tokens, and the loss of each token.
    fn losses(&mut self) -> Result<(Tensor, Tensor)> {
        let n = self.f.rows * self.f.tokens;
        let labels = self.g.input_i32("labels", [n])?;
        let weights = self.g.input("weights", [n])?;
        let h = self.end()?;
        let head = self.f.head(&mut self.g)?;
        let losses = token_losses(&mut self.g, h, &head, labels)?;
        let weighted = self.g.mul(losses, weights)?;
        Ok((self.g.sum(weighted)?, losses))
    }
}

/// A training step, or a part of one, of an adapter. Inputs: those of [`Inputs::batch`] and, for a part that updates,
/// [`HYPER_INPUT`] ([`Inputs::hyper`]); with dropout [`Inputs::dropout`]. Outputs: as [`crate::nn::train_part`], and
/// [`LOSSES`].
pub fn train(model: &Model, adapter: &Adapter, bucket: Bucket, adamw: &AdamW, part: Part) -> Result<Program> {
    let mut built = build(model, Some(adapter), bucket, true, None)?;
    let (loss, losses) = built.losses()?;
    let Built { g, values, .. } = built;
    let Some(values) = values else {
        return Err(Error::Invalid { what: "train".into(), reason: "there is no adapter".into() });
    };
    let name = match part {
        Part::Whole => "train",
        Part::First => "train first",
        Part::Middle => "train middle",
        Part::Last => "train last",
    };
    let also = [(LOSSES, losses)];
    Ok(train_part_with(g, loss, &also, adapter.params(), &values, adamw, part)?.named(&title(name, bucket)))
}

/// The loss of a batch, without dropout. Output: `loss`, Σ weight · loss over tokens.
pub fn evaluate(model: &Model, adapter: Option<&Adapter>, bucket: Bucket) -> Result<Program> {
    let mut built = build(model, adapter, bucket, false, None)?;
    let loss = built.loss()?;
    Ok(built.g.outputs(&[("loss", loss)])?.named(&title("evaluate", bucket)))
}

/// Everything about a batch: outputs `loss`, `logits` `[b · t, vocabulary]`, `hidden.0` … (the input of each block,
/// `[b · t, hidden]`; the last is the normalized end). For tests and for looking into a model.
pub fn inspect(model: &Model, adapter: Option<&Adapter>, bucket: Bucket) -> Result<Program> {
    let mut built = build(model, adapter, bucket, false, None)?;
    let loss = built.loss()?;
    let h = built.hidden[built.hidden.len() - 1];
    let logits = built.f.logits(&mut built.g, h)?;
    let names: Vec<String> = (0..built.hidden.len()).map(|i| format!("hidden.{i}")).collect();
    let mut outputs = vec![("loss", loss), ("logits", logits)];
    outputs.extend(names.iter().map(String::as_str).zip(built.hidden.iter().copied()));
    Ok(built.g.outputs(&outputs)?.named(&title("inspect", bucket)))
}

/// The loss and its gradient with respect to the input of each block and the normalized end: outputs `loss`, `grad.0` …
pub fn hidden_gradients(model: &Model, adapter: Option<&Adapter>, bucket: Bucket) -> Result<Program> {
    let mut built = build(model, adapter, bucket, false, None)?;
    let loss = built.loss()?;
    Ok(built.g.value_and_grad(loss, &built.hidden)?.named(&title("gradients", bucket)))
}

/// Some tokens of a text: they go into the cache of `capacity` tokens, and `logits` `[1, vocabulary]` are those of the
/// last one. They stand behind what earlier runs put there, by their position: a text that begins at 0 is a new one. Inputs:
/// [`Inputs::text`].
pub fn prefill(model: &Model, adapter: Option<&Adapter>, tokens: u64, capacity: u64) -> Result<Program> {
    if capacity < tokens || capacity > model.config().max_positions {
        let reason = format!("{tokens} to {} tokens are possible", model.config().max_positions);
        return Err(Error::Invalid { what: format!("a cache of {capacity} tokens"), reason });
    }
    let bucket = Bucket { rows: 1, tokens };
    let mut built = build(model, adapter, bucket, false, Some(capacity))?;
    let last = built.hidden.len() - 1;
    if tokens > 1 {
        let at = built.g.input_i32("last", [1])?;
        built.hidden[last] = embedding(&mut built.g, built.hidden[last], at)?;
    }
    let h = built.end()?;
    let logits = built.f.logits(&mut built.g, h)?;
    Ok(built.g.outputs(&[("logits", logits)])?.named(&format!("prompt {tokens} of {capacity}")))
}

/// One token behind what the cache holds: [`prefill`] of one.
pub fn decode(model: &Model, adapter: Option<&Adapter>, capacity: u64) -> Result<Program> {
    Ok(prefill(model, adapter, 1, capacity)?.named(&format!("token of {capacity}")))
}

fn title(what: &str, bucket: Bucket) -> String {
    format!("{what} {}x{}", bucket.rows, bucket.tokens)
}

/// The inputs of a run, by name.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    values: Vec<(&'static str, Vec<u8>)>,
}

impl Inputs {
    /// Those of a batch: token ids, labels (negative: not trained) and weights in the loss, `[rows · tokens]` each.
    /// Padding is any token with a negative label.
    pub fn batch(model: &Model, bucket: Bucket, ids: &[i32], labels: &[i32], weights: &[f32]) -> Result<Inputs> {
        let n = (bucket.rows * bucket.tokens) as usize;
        if ids.len() != n || labels.len() != n || weights.len() != n {
            let reason =
                format!("{} ids, {} labels, {} weights for {bucket:?}", ids.len(), labels.len(), weights.len());
            return Err(Error::Shape { op: "batch", reason });
        }
        let mut inputs = Inputs::default();
        inputs.set("ids", ids);
        inputs.set("labels", labels);
        inputs.set("weights", weights);
        let spans: Vec<i32> = (0..bucket.rows).flat_map(|_| [0, bucket.tokens as i32]).collect();
        inputs.set("spans", &spans);
        let row: Vec<u32> = (0..bucket.tokens as u32).collect();
        inputs.positions(model, &row, bucket.rows)?;
        Ok(inputs)
    }

    /// Those of a program for `bucket` tokens of a text: `ids` (at least one, at most as many) from position `start` on.
    pub fn text(model: &Model, bucket: u64, capacity: u64, start: u64, ids: &[i32]) -> Result<Inputs> {
        let count = ids.len() as u64;
        if count == 0 || count > bucket || start + count > capacity {
            let reason = format!("{count} tokens from {start} on: a program of {bucket}, a cache of {capacity}");
            return Err(Error::Shape { op: "text", reason });
        }
        let mut inputs = Inputs::default();
        let mut padded = ids.to_vec();
        padded.resize(bucket as usize, 0);
        inputs.set("ids", &padded);
        inputs.set("spans", &[start as i32, (start + count) as i32]);
        inputs.set("last", &[count as i32 - 1]);
        // Padding has no position; it takes the last there is, and nobody looks at it.
        let last = model.config().max_positions.saturating_sub(1);
        let positions: Vec<u32> = (0..bucket).map(|i| (start + i).min(last) as u32).collect();
        inputs.positions(model, &positions, 1)?;
        Ok(inputs)
    }

    /// What changes from step to step: [`AdamW::hyper`].
    pub fn hyper(&mut self, hyper: &[f32]) {
        self.set(HYPER_INPUT, hyper);
    }

    /// What masks of dropout depend on: an identity for each row of the batch, and the optimizer step.
    pub fn dropout(&mut self, row_ids: &[i32], step: u32) {
        self.set("row_ids", row_ids);
        self.set("step", &[step as i32]);
    }

    /// The inputs that a plan asks for.
    pub fn of_plan(&self, plan: &Plan) -> Vec<(&str, &[u8])> {
        let asked = self.values.iter().filter(|(name, _)| plan.inputs.iter().any(|p| &*p.name == *name));
        asked.map(|(name, bytes)| (*name, bytes.as_slice())).collect()
    }

    fn positions(&mut self, model: &Model, row: &[u32], rows: u64) -> Result<()> {
        if model.family().rotary() {
            let c = model.config();
            let (cosines, sines) = rope_tables(c.rope.theta, c.rope.scaling, row, c.head_dim as usize)?;
            self.set("cosines", &cosines);
            self.set("sines", &sines);
        } else {
            let all: Vec<i32> = (0..rows).flat_map(|_| row.iter().map(|p| *p as i32)).collect();
            self.set("positions", &all);
        }
        Ok(())
    }

    fn set<T: bytemuck::NoUninit>(&mut self, name: &'static str, values: &[T]) {
        let bytes = bytemuck::cast_slice(values).to_vec();
        match self.values.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) => *old = bytes,
            None => self.values.push((name, bytes)),
        }
    }
}
