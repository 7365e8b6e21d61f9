//! Llama and what differs from it by options: Mistral, SmolLM2, Qwen2 (biases of q, k, v), Qwen3 (norms of q and k).

use super::layers::Forward;
use super::{Family, Module, Names};
use crate::error::Result;
use crate::graph::{Graph, Tensor};
use crate::llm::config::ModelConfig;

/// The family.
pub(super) struct Llama;

impl Family for Llama {
    fn names(&self) -> Names {
        Names {
            prefix: "model.",
            bare: false,
            blocks: "layers",
            tokens: "embed_tokens",
            positions: None,
            norm: ("norm", false),
            ignored: &[".rotary_emb.inv_freq"],
        }
    }

    fn modules(&self, c: &ModelConfig) -> Vec<Module> {
        let (d, q, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut modules = vec![
            Module::norm("input_layernorm", d, false),
            Module::linear("self_attn.q_proj", d, q, c.biases.qkv),
            Module::linear("self_attn.k_proj", d, kv, c.biases.qkv),
            Module::linear("self_attn.v_proj", d, kv, c.biases.qkv),
            Module::linear("self_attn.o_proj", q, d, c.biases.o),
            Module::norm("post_attention_layernorm", d, false),
            Module::linear("mlp.gate_proj", d, c.ffn, c.biases.mlp),
            Module::linear("mlp.up_proj", d, c.ffn, c.biases.mlp),
            Module::linear("mlp.down_proj", c.ffn, d, c.biases.mlp),
        ];
        if c.qk_norm {
            modules.push(Module::norm("self_attn.q_norm", c.head_dim, false));
            modules.push(Module::norm("self_attn.k_norm", c.head_dim, false));
        }
        modules
    }

    fn block(&self, g: &mut Graph, f: &Forward<'_>, block: usize, h: Tensor) -> Result<Tensor> {
        let c = f.config();
        let x = f.norm(g, block, "input_layernorm", h)?;
        let q = f.linear(g, block, "self_attn.q_proj", x)?;
        let k = f.linear(g, block, "self_attn.k_proj", x)?;
        let v = f.linear(g, block, "self_attn.v_proj", x)?;
        let (mut q, mut k, v) = (f.heads(g, q, c.heads)?, f.heads(g, k, c.kv_heads)?, f.heads(g, v, c.kv_heads)?);
        if c.qk_norm {
            q = f.norm(g, block, "self_attn.q_norm", q)?;
            k = f.norm(g, block, "self_attn.k_norm", k)?;
        }
        let (q, k) = (f.rope(g, q)?, f.rope(g, k)?);
        let a = f.attend(g, block, q, k, v)?;
        let a = f.linear(g, block, "self_attn.o_proj", a)?;
        let h = g.add(h, a)?;
        let x = f.norm(g, block, "post_attention_layernorm", h)?;
        let gate = f.linear(g, block, "mlp.gate_proj", x)?;
        let gate = f.activation(g, gate)?;
        let up = f.linear(g, block, "mlp.up_proj", x)?;
        let m = g.mul(gate, up)?;
        let m = f.linear(g, block, "mlp.down_proj", m)?;
        g.add(h, m)
    }
}
