//! The layers that families share, each aware of adapters and caches: written once, so that no family can forget either.

use super::{Layer, Model};
use crate::compile::Category;
use crate::error::{Error, Result};
use crate::graph::{Graph, Shape, Tensor, Unary};
use crate::llm::adapters::Adapter;
use crate::llm::config::{Activation, ModelConfig};
use crate::nn::{
    Attention, Dropout, Lora, Rope, append, attention, dropout, layer_norm, linear, linear_lora, rms_norm, rope,
};
use crate::weights::Segment;

/// Inputs of dropout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropoutInputs {
    /// Identity of each row, `[b]`.
    pub rows: Tensor,
    /// The optimizer step, `[1]`.
    pub step: Tensor,
}

/// What the layers of one program have in common.
pub(crate) struct Forward<'a> {
    pub model: &'a Model,
    /// The adapter, and its matrices in this graph.
    pub adapter: Option<(&'a Adapter, Vec<Tensor>)>,
    /// Rows of the batch.
    pub rows: u64,
    /// Tokens of a row.
    pub tokens: u64,
    /// Input: position of each row's first query and its number of keys, `[b, 2]`.
    pub spans: Tensor,
    /// Cosines and sines, `[t, half]`, where positions turn queries and keys.
    pub tables: Option<(Tensor, Tensor)>,
    /// Tokens that a cache of keys and values holds, where there is one.
    pub capacity: Option<u64>,
    pub dropout: Option<DropoutInputs>,
}

impl Forward<'_> {
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Rows of the tables of tokens and, where there are any, positions: `[b · t, hidden]`.
    pub fn embed(&self, g: &mut Graph, ids: Tensor, positions: Option<Tensor>) -> Result<Tensor> {
        let h = crate::nn::embedding_rows(g, &self.model.embed, "tokens", ids)?;
        match (&self.model.positions, positions) {
            (Some(segment), Some(positions)) => {
                let p = crate::nn::embedding_rows(g, segment, "positions", positions)?;
                g.add(h, p)
            }
            _ => Ok(h),
        }
    }

    fn weight(&self, g: &mut Graph, block: usize, name: &str) -> Result<Tensor> {
        g.weight(self.segment(block)?, name)
    }

    fn segment(&self, block: usize) -> Result<&Segment> {
        self.model.blocks.get(block).ok_or_else(|| super::no_block(block, self.model.blocks.len()))
    }

    /// The linear layer of that path, with its adapter where it has one. x `[b · t, in]`.
    pub fn linear(&self, g: &mut Graph, block: usize, path: &str, x: Tensor) -> Result<Tensor> {
        let Layer::Linear { bias, conv, .. } = self.model.module(path)?.layer else {
            return Err(Error::Invalid { what: format!("module `{path}`"), reason: "it is not a linear layer".into() });
        };
        let mut w = self.weight(g, block, &format!("{path}.weight"))?;
        if conv {
            w = g.transpose(w)?;
        }
        let bias = if bias { Some(self.weight(g, block, &format!("{path}.bias"))?) } else { None };
        let Some((adapter, windows)) = &self.adapter else {
            return linear(g, x, w, bias);
        };
        let Some(site) = adapter.site(block, path) else {
            return linear(g, x, w, bias);
        };
        let (Some(a), Some(b)) = (windows.get(site.a).copied(), windows.get(site.b).copied()) else {
            return Err(Error::Invalid { what: "adapter".into(), reason: "it belongs to another model".into() });
        };
        let input = match (self.dropout, adapter.spec().dropout) {
            (Some(inputs), p) if p > 0.0 => {
                let n = g.shape(x)?.dims()[1];
                let spec = Dropout { probability: p, seed: adapter.spec().seed, site: site.number, first_position: 0 };
                let x = g.reshape(x, &[self.rows, self.tokens, n])?;
                let dropped = dropout(g, x, inputs.rows, inputs.step, spec)?;
                Some(g.reshape(dropped, &[self.rows * self.tokens, n])?)
            }
            _ => None,
        };
        linear_lora(g, x, w, bias, Lora { a, b, scale: adapter.spec().scale(), input })
    }

    /// The norm of that path over the last dimension: by layer where it has a bias, else by root mean square.
    pub fn norm(&self, g: &mut Graph, block: usize, path: &str, x: Tensor) -> Result<Tensor> {
        let has_bias = matches!(self.model.module(path)?.layer, Layer::Norm { bias: true, .. });
        let w = self.weight(g, block, &format!("{path}.weight"))?;
        let bias = if has_bias { Some(self.weight(g, block, &format!("{path}.bias"))?) } else { None };
        self.normalize(g, x, w, bias)
    }

    fn normalize(&self, g: &mut Graph, x: Tensor, w: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
        let eps = self.config().eps as f32;
        match bias {
            Some(bias) => layer_norm(g, x, w, Some(bias), eps),
            None => rms_norm(g, x, w, eps, 0.0),
        }
    }

    /// The norm after the last block.
    pub fn last_norm(&self, g: &mut Graph, h: Tensor) -> Result<Tensor> {
        let segment = &self.model.head[0];
        let w = g.weight(segment, "norm.weight")?;
        let bias = if self.model.family.names().norm.1 { Some(g.weight(segment, "norm.bias")?) } else { None };
        self.normalize(g, h, w, bias)
    }

    /// The pieces of the head.
    pub fn head(&self, g: &mut Graph) -> Result<Vec<Tensor>> {
        self.model.head.iter().map(|s| g.weight(s, "head")).collect()
    }

    /// Logits `[rows, vocabulary]` of normalized hidden states.
    pub fn logits(&self, g: &mut Graph, h: Tensor) -> Result<Tensor> {
        let mut parts = Vec::new();
        for piece in self.head(g)? {
            parts.push(linear(g, h, piece, None)?);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { g.concat(&parts, 1) }
    }

    /// `[b · t, n · d]` as `[b, t, n, d]`.
    pub fn heads(&self, g: &mut Graph, x: Tensor, n: u64) -> Result<Tensor> {
        g.reshape(x, &[self.rows, self.tokens, n, self.config().head_dim])
    }

    /// Turned by the tables of this program.
    pub fn rope(&self, g: &mut Graph, x: Tensor) -> Result<Tensor> {
        let Some((cosines, sines)) = self.tables else {
            return Err(Error::Invalid { what: "rope".into(), reason: "this family has no rotary positions".into() });
        };
        rope(g, x, cosines, sines, Rope::HalfSplit)
    }

    /// The activation of the configuration.
    pub fn activation(&self, g: &mut Graph, x: Tensor) -> Result<Tensor> {
        let f = match self.config().activation {
            Activation::Silu => Unary::Silu,
            Activation::GeluTanh => Unary::GeluTanh,
            Activation::GeluErf => Unary::GeluErf,
            Activation::Relu => Unary::Relu,
        };
        g.unary(f, x)
    }

    /// Causal attention of q `[b, t, h, d]` over k and v `[b, t, hk, d]` and, with a cache, all that came before:
    /// `[b · t, h · d]`.
    pub fn attend(&self, g: &mut Graph, block: usize, q: Tensor, k: Tensor, v: Tensor) -> Result<Tensor> {
        let c = self.config();
        let (k, v) = match self.capacity {
            None => (k, v),
            Some(n) => (self.remember(g, n, block, "k", k)?, self.remember(g, n, block, "v", v)?),
        };
        let window = c.window(block).map_or(0, |w| w as u32);
        let scale = (1.0 / (c.head_dim as f64).sqrt()) as f32;
        let spec = Attention { causal: true, window, scale };
        let a = attention(g, q, k, v, self.spans, spec)?;
        g.reshape(a, &[self.rows * self.tokens, c.heads * c.head_dim])
    }

    /// Writes x `[b, t, n, d]` behind what the rows hold; gives the whole cache, `[b, capacity, n, d]`. What a row does not
    /// count among its keys is never looked at, so nothing has to be cleared when a text begins.
    fn remember(&self, g: &mut Graph, capacity: u64, block: usize, what: &str, x: Tensor) -> Result<Tensor> {
        let dims = g.shape(x)?;
        let shape = Shape::new(&[self.rows, capacity, dims.dims()[2], dims.dims()[3]])?;
        let cache = g.scratch(&format!("cache.{what}.{block}"), shape, Category::Kv);
        append(g, cache, x, self.spans)
    }
}
