//! Grouped attention, causal or windowed, in one pass over the keys: scores never exist whole.
//!
//! Queries, keys and values may be any views with adjacent features, so heads are never transposed into place.

use super::{NnOp, Vjp, adjacent_features, integers, shape_error};
use crate::error::Result;
use crate::graph::{Graph, Op, Region, Shape, Tensor, View};

/// How queries look at keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// A query sees keys up to its own position only.
    pub causal: bool,
    /// A query sees the last `window` keys up to its position; 0: all.
    pub window: u32,
    /// Factor of the scores: 1 / √d.
    pub scale: f32,
}

/// Largest extent of a head.
const MAX_FEATURES: u64 = 256;

/// `softmax(scale · q kᵀ) v`; q `[b, t, h, d]`, k and v `[b, s, hk, d]` with hk a divisor of h, result `[b, t, h, d]`.
/// rows `[b, 2]`, 32-bit integers: absolute position of a row's first query, and its number of keys.
pub fn attention(g: &mut Graph, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, spec: Attention) -> Result<Tensor> {
    const OP: &str = "attention";
    integers(g, OP, "rows", rows)?;
    let (sq, sk, sv, sr) = (g.shape(q)?, g.shape(k)?, g.shape(v)?, g.shape(rows)?);
    let fail = |reason: String| Err(shape_error(OP, reason));
    let ([b, t, h, d], [kb, _, hk, kd]) = (four(OP, &sq)?, four(OP, &sk)?);
    if sv != sk || kb != b || kd != d {
        return fail(format!("queries {sq}, keys {sk} and values {sv} do not fit"));
    }
    if hk == 0 && h > 0 || hk > 0 && h % hk != 0 {
        return fail(format!("{hk} key heads do not divide {h} query heads"));
    }
    if d > MAX_FEATURES {
        return fail(format!("heads of {d} features; up to {MAX_FEATURES} are possible"));
    }
    if sr.dims() != [b, 2] {
        return fail(format!("rows have shape {sr}, not [{b}, 2]"));
    }
    let [q, k, v] = [adjacent_features(g, q)?, adjacent_features(g, k)?, adjacent_features(g, v)?];
    let rows = g.dense(rows)?;
    Ok(g.nn(NnOp::Attention(spec), vec![q, k, v, rows], sq, &[Shape::new(&[b, h, t])?]).0)
}

/// A cache `[b, s, h, d]` (a state, or the result of another append) with x `[b, t, h, d]` behind what its rows hold: entry i
/// of a row goes to position `rows[b, 0] + i` while that is below `rows[b, 1]`; rows as in [`attention`]. No gradient.
pub fn append(g: &mut Graph, cache: Tensor, x: Tensor, rows: Tensor) -> Result<Tensor> {
    const OP: &str = "append";
    integers(g, OP, "rows", rows)?;
    let (sc, sx, sr) = (g.shape(cache)?, g.shape(x)?, g.shape(rows)?);
    let ([b, _, h, d], [xb, _, xh, xd]) = (four(OP, &sc)?, four(OP, &sx)?);
    if [b, h, d] != [xb, xh, xd] || sr.dims() != [b, 2] {
        return Err(shape_error(OP, format!("entries {sx} with rows {sr} do not fit a cache of {sc}")));
    }
    let (x, rows) = (adjacent_features(g, x)?, g.dense(rows)?);
    let region = Region { shape: sc, view: View::dense(&sc), carry: true };
    g.push_into(Op::Nn(NnOp::Append), vec![x, rows], cache, region)
}

fn four(op: &'static str, s: &Shape) -> Result<[u64; 4]> {
    s.dims()
        .try_into()
        .map_err(|_| shape_error(op, format!("{s} has not four dimensions (rows, positions, heads, features)")))
}

pub(super) fn vjp(g: &mut Graph, call: &Vjp<'_>, spec: Attention) -> Result<Vec<Option<Tensor>>> {
    let [q, k, v, rows] = [call.inputs[0], call.inputs[1], call.inputs[2], call.inputs[3]];
    let (sq, sk) = (g.shape(q)?, g.shape(k)?);
    let dy = adjacent_features(g, call.dy)?;
    let [b, t, h, _] = four("attention", &sq)?;
    let stats = g.nn(NnOp::AttentionDelta, vec![call.y, dy, call.extras[0]], Shape::new(&[b, h, t, 2])?, &[]).0;
    let all = vec![q, k, v, dy, stats, rows];
    let dq = call.needed[0].then(|| g.nn(NnOp::AttentionDq(spec), all.clone(), sq, &[]).0);
    let (mut dk, mut dv) = (None, None);
    if call.needed[1] || call.needed[2] {
        let (key, more) = g.nn(NnOp::AttentionDkv(spec), all, sk, &[sk]);
        dk = call.needed[1].then_some(key);
        dv = more.first().copied().filter(|_| call.needed[2]);
    }
    Ok(vec![dq, dk, dv, None])
}
