#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use super::*;
use serde_json::{Map, Value, json};

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512,
    })
}

fn with(fields: Value) -> Value {
    let mut all: Map<String, Value> = base().as_object().unwrap().clone();
    for (name, value) in fields.as_object().unwrap() {
        all.insert(name.clone(), value.clone());
    }
    Value::Object(all)
}

fn of(family: Family, fields: Value) -> Value {
    let mut all = with(fields);
    all["architectures"] = json!([family.architecture()]);
    all["model_type"] = json!(family.model_type());
    all
}

fn parse(config: &Value) -> Result<ModelConfig> {
    ModelConfig::parse("m/config.json", config.to_string().as_bytes())
}

/// The error of `config`, which must name the file and `field`.
#[track_caller]
fn refused(config: &Value, field: &str) -> String {
    let error = parse(config).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.code(), "format", "{text}");
    assert!(text.starts_with("m/config.json: field `") && text.contains(&format!("{field}`")), "{field}: {text}");
    text
}

#[test]
fn absent_fields_have_the_defaults_of_the_family() {
    let llama = parse(&base()).unwrap();
    assert_eq!((llama.head_dim, llama.eps, llama.tied, llama.max_positions), (16, 1e-6, false, 2048));
    assert_eq!(llama.rope, RopeConfig { theta: 10_000.0, scaling: RopeScaling::None });
    assert_eq!((llama.biases, llama.qk_norm, llama.window(0)), (Biases::default(), false, None));
    assert_eq!((llama.activation, llama.bos, llama.eos.len()), (Activation::Silu, None, 0));
    let qwen3 = parse(&of(Family::Qwen3, json!({}))).unwrap();
    assert_eq!((qwen3.head_dim, qwen3.qk_norm, qwen3.biases), (128, true, Biases::default()));
    let qwen2 = parse(&of(Family::Qwen2, json!({}))).unwrap();
    assert_eq!(qwen2.biases, Biases { qkv: true, o: false, mlp: false });
    let gpt2 =
        json!({ "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 512 });
    let gpt2 = parse(&gpt2).unwrap();
    assert_eq!((gpt2.ffn, gpt2.tied, gpt2.activation, gpt2.eps), (256, true, Activation::GeluTanh, 1e-5));
}

#[test]
fn both_styles_of_rotary_fields_read_the_same() {
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192 });
    let mut new = scaling.clone();
    new["rope_theta"] = json!(500_000.0);
    let hub =
        parse(&with(json!({ "rope_theta": 500_000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16" }))).unwrap();
    let five = parse(&with(json!({ "rope_parameters": new, "dtype": "bfloat16" }))).unwrap();
    assert_eq!(hub, five);
    let expected = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    assert_eq!(five.rope, RopeConfig { theta: 500_000.0, scaling: expected });
    let linear = parse(&with(json!({ "rope_scaling": { "type": "linear", "factor": 2 } }))).unwrap();
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn rotary_fields_that_contradict_or_are_not_known_are_refused() {
    for (fields, field) in [
        (json!({ "rope_scaling": { "type": "yarn", "factor": 4.0 } }), "rope_scaling.rope_type"),
        (json!({ "rope_scaling": { "type": "dynamic", "factor": 4.0 } }), "rope_scaling.rope_type"),
        (
            json!({ "rope_scaling": { "type": "linear", "rope_type": "llama3", "factor": 4.0 } }),
            "rope_scaling.rope_type",
        ),
        (json!({ "rope_scaling": { "type": "linear" } }), "rope_scaling.factor"),
        (json!({ "rope_scaling": { "factor": 2.0 } }), "rope_scaling.rope_type"),
        (json!({ "rope_scaling": { "type": "default", "mrope_section": [1, 2] } }), "rope_scaling.mrope_section"),
        (
            json!({ "rope_scaling": { "rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192 } }),
            "rope_scaling.high_freq_factor",
        ),
        (json!({ "rope_theta": 1.0, "rope_parameters": { "rope_theta": 2.0 } }), "rope_parameters.rope_theta"),
        (json!({ "rope_parameters": { "rope_theta": 2.0 }, "rope_scaling": { "rope_theta": 3.0 } }), "rope_scaling"),
        (json!({ "rope_parameters": { "full_attention": { "rope_theta": 2.0 } } }), "rope_parameters.full_attention"),
        (json!({ "rope_theta": 0 }), "rope_theta"),
        (json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }), "rope_parameters.partial_rotary_factor"),
    ] {
        refused(&with(fields), field);
    }
}

#[test]
fn a_field_that_changes_the_result_is_refused_by_name_and_so_is_one_not_known() {
    for (fields, field) in [
        (json!({ "quantization_config": { "bits": 4 } }), "quantization_config"),
        (json!({ "use_mrope": true }), "use_mrope"),
        (json!({ "hidden_act": "xielu" }), "hidden_act"),
        (json!({ "rope_interleaved": true }), "rope_interleaved"),
        (json!({ "auto_map": { "AutoModel": "x.py" } }), "auto_map"),
        (json!({ "logit_scale": 0.5 }), "logit_scale"),
        (json!({ "invented_tomorrow": null }), "invented_tomorrow"),
        (json!({ "sliding_window": 128 }), "sliding_window"),
        (json!({ "architectures": ["MambaForCausalLM"] }), "architectures"),
        (json!({ "architectures": ["LlamaModel"] }), "architectures"),
        (json!({ "model_type": "mistral" }), "model_type"),
        (json!({ "architectures": [], "model_type": "t5" }), "model_type"),
    ] {
        let text = refused(&with(fields), field);
        assert!(text.len() < 1000);
    }
    refused(&of(Family::Qwen2, json!({ "attention_bias": true })), "attention_bias");
    refused(&of(Family::Mistral, json!({ "mlp_bias": true })), "mlp_bias");
}

#[test]
fn sizes_that_cannot_be_are_refused_by_name() {
    for (fields, field) in [
        (json!({ "hidden_size": 0 }), "hidden_size"),
        (json!({ "hidden_size": -1 }), "hidden_size"),
        (json!({ "hidden_size": 64.5 }), "hidden_size"),
        (json!({ "hidden_size": "64" }), "hidden_size"),
        (json!({ "hidden_size": u64::MAX }), "hidden_size"),
        (json!({ "hidden_size": null }), "hidden_size"),
        (json!({ "num_hidden_layers": 1_000_000_000 }), "num_hidden_layers"),
        (json!({ "num_attention_heads": 5, "num_key_value_heads": 5 }), "num_attention_heads"),
        (json!({ "num_key_value_heads": 3 }), "num_key_value_heads"),
        (json!({ "num_key_value_heads": 0 }), "num_key_value_heads"),
        (json!({ "head_dim": 15 }), "head_dim"),
        (json!({ "vocab_size": 0 }), "vocab_size"),
        (json!({ "rms_norm_eps": 0.0 }), "rms_norm_eps"),
        (json!({ "rms_norm_eps": 1.5 }), "rms_norm_eps"),
        (json!({ "eos_token_id": -1 }), "eos_token_id"),
        (json!({ "eos_token_id": [1, "2"] }), "eos_token_id"),
        (json!({ "attention_dropout": 2.0 }), "attention_dropout"),
        (json!({ "tie_word_embeddings": 1 }), "tie_word_embeddings"),
    ] {
        refused(&with(fields), field);
    }
}

#[test]
fn hostile_texts_give_errors_that_are_typed_and_short() {
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let long = format!("{{\"{}\":1}}", "x".repeat(500_000));
    let texts: Vec<Vec<u8>> = vec![
        b"".into(),
        b"[]".into(),
        b"{".into(),
        b"{} {}".into(),
        b"\xff\xfe".into(),
        b"{\"hidden_size\":1e999}".into(),
        b"{\"hidden_size\":1,\"hidden_size\":2}".into(),
        b"{\"rope_scaling\":{\"type\":\"linear\",\"type\":\"yarn\"}}".into(),
        deep.into_bytes(),
        long.into_bytes(),
    ];
    for text in texts {
        let error = ModelConfig::parse("c", &text).unwrap_err();
        assert!(error.code() == "format" && error.to_string().len() < 2000, "{error}");
    }
}

#[test]
fn the_sliding_window_is_where_the_family_puts_it() {
    let windows = |config: &Value| -> Vec<Option<u64>> {
        let config = parse(config).unwrap();
        (0..4).map(|block| config.window(block)).collect()
    };
    let mistral = |fields| windows(&of(Family::Mistral, fields));
    assert_eq!(mistral(json!({ "sliding_window": 8 })), [Some(8); 4]);
    assert_eq!(mistral(json!({ "sliding_window": null })), [None; 4]);
    assert_eq!(mistral(json!({})), [Some(4096); 4]);
    let qwen = |fields| windows(&of(Family::Qwen2, fields));
    let used = json!({ "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3 });
    assert_eq!(qwen(used), [None, None, None, Some(8)]);
    assert_eq!(qwen(json!({ "sliding_window": 8, "use_sliding_window": false, "max_window_layers": 3 })), [None; 4]);
    assert_eq!(qwen(json!({ "sliding_window": 8, "use_sliding_window": true })), [None; 4]);
    let types = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    let listed = json!({ "sliding_window": 8, "use_sliding_window": true, "layer_types": types });
    assert_eq!(qwen(listed), [Some(8), None, None, Some(8)]);
    refused(&of(Family::Qwen2, json!({ "layer_types": types })), "layer_types");
    refused(&of(Family::Qwen2, json!({ "layer_types": ["full_attention"] })), "layer_types");
}

#[test]
fn dropout_of_the_base_is_said_and_end_tokens_are_gathered() {
    let mut config =
        parse(&with(json!({ "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": [2, 7] }))).unwrap();
    assert!(config.notes.len() == 1 && config.notes[0].contains("attention_dropout is 0.1"), "{:?}", config.notes);
    assert_eq!((config.bos, config.eos.as_slice()), (Some(1), [2, 7].as_slice()));
    config.add_end_tokens("g", br#"{"eos_token_id": [7, 9], "do_sample": true}"#).unwrap();
    assert_eq!(config.eos, [2, 7, 9]);
    assert_eq!(config.add_end_tokens("g", b"{\"eos_token_id\": true}").unwrap_err().code(), "format");
}

#[test]
fn fields_that_files_of_the_hub_carry_and_that_change_nothing_are_let_by() {
    let small = with(json!({
        "_name_or_path": "x", "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.04, "is_llama_config": true, "mlp_bias": false, "pad_token_id": 2, "pretraining_tp": 1,
        "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100_000, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers.js_config": { "kv_cache_dtype": {} }, "transformers_version": "4.42.3",
        "use_cache": true, "quantization_config": null,
    }));
    let small = parse(&small).unwrap();
    assert_eq!((small.rope.theta, small.tied, small.notes.len()), (100_000.0, true, 0));
    let gpt2 = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true, "vocab_size": 50257,
        "task_specific_params": { "text-generation": { "do_sample": true, "max_length": 50 } },
    });
    let gpt2 = parse(&gpt2).unwrap();
    assert_eq!((gpt2.head_dim, gpt2.ffn, gpt2.notes.len()), (64, 3072, 3));
}
