//! Cross-entropy over a large vocabulary without its logits.
//!
//! Logits of 2,048 tokens over 128 K entries are 1 GB. Here a block of 256 tokens by 4,096 entries exists at a time: the
//! first pass keeps a maximum, a sum and the label's logit for each token; the second makes the block's logits once more
//! and goes from them to the gradient of the hidden state. Entries are merged in chunks of exactly 1,024 in ascending order;
//! the gradient adds over *descending* entries into one accumulator, which each block takes up where the last left it. So
//! a streamed head is a palindrome, every piece is met in the reverse of the order in which it came, and no cut of
//! vocabulary or tokens changes a bit.

use super::{NnOp, dense_f32, integers, shape_error};
use crate::error::Result;
use crate::graph::{CustomGrad, Graph, Region, Shape, Tensor, View};

/// Vocabulary entries that are reduced at once: a constant of the op.
pub const VOCABULARY_CHUNK: u64 = 1024;
/// Vocabulary entries whose logits exist at a time.
pub const VOCABULARY_BLOCK: u64 = 4096;
/// Tokens whose logits exist at a time.
pub const TOKEN_BLOCK: u64 = 256;

/// How much exists at a time. Changes no bit.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Tokens.
    pub tokens: u64,
    /// Vocabulary entries, a multiple of [`VOCABULARY_CHUNK`].
    pub vocabulary: u64,
}

impl Default for Blocks {
    fn default() -> Blocks {
        Blocks { tokens: TOKEN_BLOCK, vocabulary: VOCABULARY_BLOCK }
    }
}

/// Σ weight · loss over tokens, a scalar. h `[t, d]`; head: the frozen output matrix as pieces `[v_i, d]` in any float
/// dtype, each but the last of a multiple of 1,024 rows; labels `[t]`, 32-bit integers below the vocabulary's size, negative
/// where a token is masked; weight `[t]`: 1 / (unmasked tokens of the step) for their mean.
pub fn cross_entropy(g: &mut Graph, h: Tensor, head: &[Tensor], labels: Tensor, weight: Tensor) -> Result<Tensor> {
    let losses = token_losses(g, h, head, labels)?;
    if g.shape(weight)? != g.shape(losses)? {
        let reason = format!("weights {} for tokens {}", g.shape(weight)?, g.shape(losses)?);
        return Err(shape_error("cross_entropy", reason));
    }
    let weighted = g.mul(losses, weight)?;
    g.sum(weighted)
}

/// The loss of each token, `[t]`, 0 where it is masked; see [`cross_entropy`].
pub fn token_losses(g: &mut Graph, h: Tensor, head: &[Tensor], labels: Tensor) -> Result<Tensor> {
    token_losses_in(g, h, head, labels, Blocks::default())
}

/// As [`token_losses`], with blocks of another size.
pub fn token_losses_in(g: &mut Graph, h: Tensor, head: &[Tensor], labels: Tensor, blocks: Blocks) -> Result<Tensor> {
    const OP: &str = "cross_entropy";
    integers(g, OP, "labels", labels)?;
    let (sh, sl) = (g.shape(h)?, g.shape(labels)?);
    let fail = |reason: String| Err(shape_error(OP, reason));
    let [t, d] = *sh.dims() else {
        return fail(format!("hidden states of {sh} have not two dimensions (tokens, features)"));
    };
    if sl.dims() != [t] {
        return fail(format!("labels {sl} for {t} tokens"));
    }
    if blocks.tokens == 0 || blocks.vocabulary == 0 || !blocks.vocabulary.is_multiple_of(VOCABULARY_CHUNK) {
        return fail(format!("blocks of {} entries; {VOCABULARY_CHUNK} must divide them", blocks.vocabulary));
    }
    let mut first = 0;
    for (i, piece) in head.iter().enumerate() {
        let s = g.shape(*piece)?;
        let last = i + 1 == head.len();
        match *s.dims() {
            [v, width] if width == d && v > 0 && (last || v.is_multiple_of(VOCABULARY_CHUNK)) => first += v,
            _ => {
                return fail(format!(
                    "piece {i} of the head has shape {s}; rows of {d}, {VOCABULARY_CHUNK} or a multiple at a time"
                ));
            }
        }
    }
    if first == 0 {
        return fail("the head has no rows".into());
    }
    let labels = g.dense(labels)?;
    let mut inputs = vec![h];
    inputs.extend(head);
    // Made in front of the custom node, as its backward needs the stats as well as the value.
    let stats = running_stats(g, h, head, labels, blocks)?;
    let losses = g.nn(NnOp::CeLoss, vec![stats, labels], Shape::new(&[t])?, &[]).0;
    g.custom(&inputs, |_, _| Ok(losses), move |g, call| vjp(g, call, stats, labels, blocks))
}

/// A block of the vocabulary: its piece, rows there, and first entry.
struct Block {
    piece: usize,
    from: u64,
    to: u64,
    first: u64,
}

fn vocabulary(g: &Graph, head: &[Tensor], blocks: Blocks) -> Result<Vec<Block>> {
    let (mut all, mut first) = (Vec::new(), 0);
    for (piece, t) in head.iter().enumerate() {
        let rows = g.shape(*t)?.dims()[0];
        for from in (0..rows).step_by(blocks.vocabulary as usize) {
            all.push(Block { piece, from, to: rows.min(from + blocks.vocabulary), first: first + from });
        }
        first += rows;
    }
    Ok(all)
}

fn logits(g: &mut Graph, h: Tensor, head: Tensor, block: &Block, tokens: (u64, u64)) -> Result<Tensor> {
    let rows = g.slice(h, 0, tokens.0, tokens.1)?;
    let w = g.slice(head, 0, block.from, block.to)?;
    let wt = g.transpose(w)?;
    g.matmul(rows, wt, None)
}

fn token_blocks(t: u64, blocks: Blocks) -> impl Iterator<Item = (u64, u64)> {
    (0..t).step_by(blocks.tokens as usize).map(move |from| (from, t.min(from + blocks.tokens)))
}

fn running_stats(g: &mut Graph, h: Tensor, head: &[Tensor], labels: Tensor, blocks: Blocks) -> Result<Tensor> {
    let t = g.shape(h)?.dims()[0];
    let shape = Shape::new(&[t, 3])?;
    let mut stats = g.empty(shape);
    for block in vocabulary(g, head, blocks)? {
        for tokens in token_blocks(t, blocks) {
            let x = logits(g, h, head[block.piece], &block, tokens)?;
            let op = NnOp::CeLse { first: block.first as u32, first_row: tokens.0 as u32, start: block.first == 0 };
            let region = Region { shape, view: View::dense(&shape), carry: true };
            stats = g.push_into(crate::graph::Op::Nn(op), vec![x, labels], stats, region)?;
        }
    }
    Ok(stats)
}

fn vjp(
    g: &mut Graph,
    call: CustomGrad<'_>,
    stats: Tensor,
    labels: Tensor,
    blocks: Blocks,
) -> Result<Vec<Option<Tensor>>> {
    let (h, head) = (call.inputs[0], &call.inputs[1..]);
    if call.needed[1..].iter().any(|n| *n) {
        return Err(shape_error("cross_entropy", "the head is frozen: it has no gradient".into()));
    }
    let dloss = dense_f32(g, call.grad)?;
    let shape = g.shape(h)?;
    let (t, d) = (shape.dims()[0], shape.dims()[1]);
    let mut dh = g.empty(shape);
    let all = vocabulary(g, head, blocks)?;
    for (i, block) in all.iter().rev().enumerate() {
        for tokens in token_blocks(t, blocks) {
            let x = logits(g, h, head[block.piece], block, tokens)?;
            let width = g.shape(x)?;
            let op = NnOp::CeGrad { first: block.first as u32, first_row: tokens.0 as u32 };
            let dx = g.nn(op, vec![x, stats, labels, dloss], width, &[]).0;
            let w = g.slice(head[block.piece], 0, block.from, block.to)?;
            let view = View { offset: tokens.0 * d, strides: shape.dense_strides() };
            let region = Region { shape: Shape::new(&[tokens.1 - tokens.0, d])?, view, carry: i > 0 };
            dh = g.push_into(crate::graph::Op::Nn(NnOp::MatmulDescending), vec![dx, w], dh, region)?;
        }
    }
    let mut parts = vec![None; call.inputs.len()];
    parts[0] = Some(dh);
    Ok(parts)
}
