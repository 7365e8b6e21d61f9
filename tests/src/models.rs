//! Models of any size with random weights, in memory.

use ebbtide::llm::config::ModelConfig;
use ebbtide::llm::models::Model;
use ebbtide::{Catalog, Source};
use serde_json::json;

use crate::engine::{Data, f32s, file, random, wait};

/// A Llama with the vocabulary of the small tokenizer (512), four heads, and a feed-forward part twice as wide.
pub fn llama_config(layers: u64, hidden: u64, positions: u64) -> ModelConfig {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * hidden, "vocab_size": 512,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    ModelConfig::parse("config.json", config.to_string().as_bytes()).unwrap()
}

/// Its bytes as a safetensors file.
pub fn llama_file(config: &ModelConfig) -> Vec<u8> {
    file(&tensors(config))
}

/// The model.
pub fn llama(layers: u64, hidden: u64, positions: u64) -> Model {
    let config = llama_config(layers, hidden, positions);
    let source = Source::memory("model.safetensors", llama_file(&config));
    Model::new(config, wait(Catalog::from_sources(vec![source])).unwrap()).unwrap()
}

/// Random tensors of a Llama-like model.
pub fn tensors(c: &ModelConfig) -> Vec<Data> {
    let (d, q, kv, f) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.ffn);
    let mut list: Vec<(String, Vec<u64>)> = vec![("model.embed_tokens.weight".into(), vec![c.vocabulary, d])];
    for l in 0..c.layers {
        let mut linear = |name: &str, out: u64, inner: u64, bias: bool| {
            list.push((format!("model.layers.{l}.{name}.weight"), vec![out, inner]));
            if bias {
                list.push((format!("model.layers.{l}.{name}.bias"), vec![out]));
            }
        };
        linear("self_attn.q_proj", q, d, c.biases.qkv);
        linear("self_attn.k_proj", kv, d, c.biases.qkv);
        linear("self_attn.v_proj", kv, d, c.biases.qkv);
        linear("self_attn.o_proj", d, q, c.biases.o);
        linear("mlp.gate_proj", f, d, c.biases.mlp);
        linear("mlp.up_proj", f, d, c.biases.mlp);
        linear("mlp.down_proj", d, f, c.biases.mlp);
        let mut norms = vec![("input_layernorm", d), ("post_attention_layernorm", d)];
        if c.qk_norm {
            norms.extend([("self_attn.q_norm", c.head_dim), ("self_attn.k_norm", c.head_dim)]);
        }
        list.extend(norms.iter().map(|(n, w)| (format!("model.layers.{l}.{n}.weight"), vec![*w])));
    }
    list.push(("model.norm.weight".into(), vec![d]));
    let values = |(i, (name, shape)): (usize, &(String, Vec<u64>))| {
        let n = shape.iter().product::<u64>() as usize;
        let mut v = random(500 + i as u64, n, 1.5 / (shape[shape.len() - 1] as f32).sqrt());
        if name.contains("norm") {
            v.iter_mut().for_each(|x| *x += 1.0);
        }
        f32s(name, shape, &v)
    };
    list.iter().enumerate().map(values).collect()
}
