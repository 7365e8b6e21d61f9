//! STUB of the model side, to compile against until the owner of this file writes it: replace it whole.
#![allow(missing_docs, reason = "a stub")]
use crate::nn::RopeScaling;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gpt2,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    GeluTanh,
    GeluErf,
    Relu,
}
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub scaling: RopeScaling,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    pub hidden: u64,
    pub layers: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub ffn: u64,
    pub vocabulary: u64,
    pub max_positions: u64,
    pub eps: f64,
    pub rope: RopeConfig,
    pub tied: bool,
    pub biases: Biases,
    pub qk_norm: bool,
    pub activation: Activation,
}
impl ModelConfig {
    pub fn parse(_file: &str, text: &str) -> crate::Result<ModelConfig> {
        let v: serde_json::Value = serde_json::from_str(text).map_err(|e| crate::Error::Invalid {
            what: "config".into(),
            reason: e.to_string(),
        })?;
        let n = |k: &str| v[k].as_u64().unwrap_or(0);
        if v["model_type"] == "gpt2" {
            return Ok(ModelConfig {
                family: Family::Gpt2,
                hidden: n("n_embd"),
                layers: n("n_layer"),
                heads: n("n_head"),
                kv_heads: n("n_head"),
                head_dim: n("n_embd") / n("n_head"),
                ffn: 4 * n("n_embd"),
                vocabulary: n("vocab_size"),
                max_positions: n("n_positions"),
                eps: v["layer_norm_epsilon"].as_f64().unwrap_or(1e-5),
                rope: RopeConfig {
                    theta: 1e4,
                    scaling: RopeScaling::None,
                },
                tied: v["tie_word_embeddings"] == true,
                biases: Biases::default(),
                qk_norm: false,
                activation: Activation::GeluTanh,
            });
        }
        let theta = v["rope_theta"]
            .as_f64()
            .or(v["rope_parameters"]["rope_theta"].as_f64())
            .unwrap_or(1e4);
        let qwen = v["model_type"] == "qwen2";
        Ok(ModelConfig {
            family: if qwen { Family::Qwen2 } else { Family::Llama },
            hidden: n("hidden_size"),
            layers: n("num_hidden_layers"),
            heads: n("num_attention_heads"),
            kv_heads: n("num_key_value_heads"),
            head_dim: n("hidden_size") / n("num_attention_heads"),
            ffn: n("intermediate_size"),
            vocabulary: n("vocab_size"),
            max_positions: n("max_position_embeddings"),
            eps: v["rms_norm_eps"].as_f64().unwrap_or(1e-5),
            rope: RopeConfig {
                theta,
                scaling: RopeScaling::None,
            },
            tied: v["tie_word_embeddings"] == true,
            biases: Biases {
                qkv: qwen,
                o: false,
                mlp: false,
            },
            qk_norm: false,
            activation: Activation::Silu,
        })
    }
    pub fn window(&self, _block: usize) -> Option<u64> {
        None
    }
}
