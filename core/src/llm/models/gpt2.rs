//! GPT-2: learned positions, layer norms with a bias, one product for q, k and v, weights stored `[in, out]`.

use super::layers::Forward;
use super::{Family, Module, Names};
use crate::error::Result;
use crate::graph::{Graph, Tensor};
use crate::llm::config::ModelConfig;

/// The family.
pub(super) struct Gpt2;

impl Family for Gpt2 {
    fn names(&self) -> Names {
        Names {
            prefix: "transformer.",
            bare: true,
            blocks: "h",
            tokens: "wte",
            positions: Some("wpe"),
            norm: ("ln_f", true),
            // Causal masks that old files carry along.
            ignored: &[".attn.bias", ".attn.masked_bias"],
        }
    }

    fn modules(&self, c: &ModelConfig) -> Vec<Module> {
        let d = c.hidden;
        vec![
            Module::norm("ln_1", d, true),
            Module::conv("attn.c_attn", d, 3 * d),
            Module::conv("attn.c_proj", d, d),
            Module::norm("ln_2", d, true),
            Module::conv("mlp.c_fc", d, c.ffn),
            Module::conv("mlp.c_proj", c.ffn, d),
        ]
    }

    fn block(&self, g: &mut Graph, f: &Forward<'_>, block: usize, h: Tensor) -> Result<Tensor> {
        let n = f.config().heads;
        let x = f.norm(g, block, "ln_1", h)?;
        let x = f.linear(g, block, "attn.c_attn", x)?;
        // The three parts stand behind one another, as if they were heads: each is a window.
        let x = f.heads(g, x, 3 * n)?;
        let (q, k, v) = (g.slice(x, 2, 0, n)?, g.slice(x, 2, n, 2 * n)?, g.slice(x, 2, 2 * n, 3 * n)?);
        let a = f.attend(g, block, q, k, v)?;
        let a = f.linear(g, block, "attn.c_proj", a)?;
        let h = g.add(h, a)?;
        let x = f.norm(g, block, "ln_2", h)?;
        let m = f.linear(g, block, "mlp.c_fc", x)?;
        let m = f.activation(g, m)?;
        let m = f.linear(g, block, "mlp.c_proj", m)?;
        g.add(h, m)
    }
}
