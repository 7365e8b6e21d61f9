//! The host side of language models against the reference's files: configurations, tokenizers, templates, batches.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebbtide::Source;
use ebbtide::llm::config::{Activation, Biases, Family, ModelConfig};
use ebbtide::llm::data::{Batches, DataFiles, DataOptions, Dataset, Encoder, Order};
use ebbtide::llm::template::{ChatTemplate, Message};
use ebbtide::llm::tokenizer::Tokenizer;
use ebbtide_tests::engine::{fixture, wait};
use ebbtide_tests::refs::{self, Tensors};
use proptest::prelude::*;
use serde_json::Value;

fn config(path: &str) -> ModelConfig {
    let source = Source::open(refs::path(path)).unwrap();
    wait(ModelConfig::read(&source)).unwrap_or_else(|e| panic!("{e}"))
}

fn tokenizer(name: &str) -> Tokenizer {
    wait(Tokenizer::open(fixture("tokenizers").join(name))).unwrap_or_else(|e| panic!("{e}"))
}

fn shakespeare() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../native/assets/tiny-shakespeare-llama")
}

fn tide_log_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../native/assets/tide-log")
}

#[test]
fn configurations_of_the_hub_and_of_transformers_5_read_the_same() {
    for model in ["llama_untied", "llama_tied", "qwen2", "gpt2"] {
        let (five, hub) =
            (config(&format!("{model}/f32/config.json")), config(&format!("{model}/config_v4_style.json")));
        assert_eq!(five, hub, "{model}");
        assert_eq!((five.hidden, five.layers, five.heads, five.head_dim, five.vocabulary), (64, 4, 4, 16, 512));
        assert_eq!((five.bos, five.eos.as_slice(), five.notes.len()), (Some(1), [2].as_slice(), 0));
    }
    let tied = config("llama_tied/config_v4_style.json");
    assert_eq!((tied.tied, tied.rope.theta, tied.kv_heads, tied.ffn), (true, 100_000.0, 2, 160));
    let qwen = config("qwen2/f32/config.json");
    assert_eq!((qwen.family, qwen.eps, qwen.window(3)), (Family::Qwen2, 1e-6, None));
    assert_eq!(qwen.biases, Biases { qkv: true, o: false, mlp: false });
    let gpt2 = config("gpt2/f32/config.json");
    assert_eq!((gpt2.family, gpt2.ffn, gpt2.max_positions), (Family::Gpt2, 256, 128));
    assert_eq!((gpt2.activation, gpt2.eps, gpt2.tied), (Activation::GeluTanh, 1e-5, true));
    let demo = wait(ModelConfig::read(&Source::open(shakespeare().join("config.json")).unwrap())).unwrap();
    assert_eq!((demo.hidden, demo.layers, demo.heads, demo.kv_heads, demo.head_dim), (192, 6, 6, 2, 32));
}

#[test]
fn every_text_of_the_vectors_gives_the_ids_of_the_reference_and_comes_back() {
    for name in ["tiny512", "smollm2", "gpt2"] {
        let t = tokenizer(name);
        let text = std::fs::read_to_string(fixture("tokenizers").join(name).join("vectors.json")).unwrap();
        let vectors: Value = serde_json::from_str(&text).unwrap();
        let ids =
            |v: &Value| -> Vec<u32> { v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect() };
        let vectors = vectors["vectors"].as_array().unwrap();
        assert_eq!(vectors.len(), 24);
        for vector in vectors {
            let text = vector["text"].as_str().unwrap();
            assert_eq!(t.encode(text, false).unwrap(), ids(&vector["ids"]), "{name}: {text:?}");
            assert_eq!(t.encode(text, true).unwrap(), ids(&vector["ids_with_special"]), "{name}: {text:?}");
            let all = ids(&vector["ids"]);
            assert_eq!(t.decode(&all, false).unwrap(), vector["decoded"].as_str().unwrap(), "{name}");
            let mut stream = t.stream(false);
            let mut streamed = String::new();
            for id in &all {
                let piece = stream.push(*id).unwrap();
                assert!(!piece.contains('\u{FFFD}'), "{name}: {text:?} streams {piece:?}");
                streamed.push_str(&piece);
            }
            streamed.push_str(&stream.finish().unwrap());
            assert_eq!(streamed, vector["decoded"].as_str().unwrap(), "{name}");
        }
    }
}

#[test]
fn special_tokens_are_those_of_the_configuration() {
    let t = tokenizer("smollm2");
    assert_eq!((t.bos().unwrap().id, t.eos().unwrap().id, t.vocabulary()), (1, 2, 49152));
    assert_eq!(t.eos().unwrap().text, "<|im_end|>");
    let t = tokenizer("tiny512");
    assert_eq!((t.bos().unwrap().id, t.eos().unwrap().id, t.vocabulary(), t.token_id("</s>")), (1, 2, 512, Some(2)));
    let t = tokenizer("gpt2");
    assert_eq!((t.bos(), t.eos(), t.chat_template("default")), (None, None, None));
}

#[test]
fn begin_and_end_tokens_stand_where_the_configuration_wants_them() {
    let json = std::fs::read(fixture("tokenizers/tiny512/tokenizer.json")).unwrap();
    let with = |json: &[u8], flags: &str| {
        let settings = format!("{{\"bos_token\":{{\"content\":\"<s>\"}},\"eos_token\":\"</s>\"{flags}}}");
        Tokenizer::parse("t", json, Some(("c", settings.as_bytes()))).unwrap()
    };
    let bare = with(&json, "").encode("Low water", true).unwrap();
    let (mut begun, mut both) = (vec![1], vec![1]);
    begun.extend(&bare);
    both.extend(&bare);
    both.push(2);
    assert_eq!(with(&json, ",\"add_bos_token\":true").encode("Low water", true).unwrap(), begun);
    let t = with(&json, ",\"add_bos_token\":true,\"add_eos_token\":true");
    assert_eq!(t.encode("Low water", true).unwrap(), both);
    assert_eq!(t.encode("Low water", false).unwrap(), bare);
    // A file that adds the begin token itself: once is enough, and "no" is no.
    let mut own: Value = serde_json::from_slice(&json).unwrap();
    own["post_processor"] = serde_json::json!({ "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } });
    let own = own.to_string().into_bytes();
    assert_eq!(with(&own, "").encode("Low water", true).unwrap(), begun);
    assert_eq!(with(&own, ",\"add_bos_token\":true").encode("Low water", true).unwrap(), begun);
    assert_eq!(with(&own, ",\"add_bos_token\":false").encode("Low water", true).unwrap(), bare);
    assert_eq!(with(&own, ",\"add_bos_token\":true").encode("", true).unwrap(), [1]);
}

#[test]
fn tokenizers_that_would_panic_or_mislead_are_refused_by_file() {
    let json = std::fs::read(fixture("tokenizers/tiny512/tokenizer.json")).unwrap();
    let good: Value = serde_json::from_slice(&json).unwrap();
    let refuse = |json: &[u8], settings: &str| {
        let e = Tokenizer::parse("m/tokenizer.json", json, Some(("m/tokenizer_config.json", settings.as_bytes())))
            .unwrap_err();
        assert!(e.code() == "format" && e.to_string().starts_with("m/tokenizer"), "{e}");
        e.to_string()
    };
    for (field, value) in [
        ("decoder", serde_json::json!(5)),
        ("decoder", serde_json::json!({ "type": "Sequence", "decoders": [1] })),
        ("normalizer", serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" })),
        ("pre_tokenizer", serde_json::json!({ "type": "Invented" })),
        ("post_processor", serde_json::json!("x")),
        ("model", serde_json::json!({ "type": "BPE", "vocab": {}, "merges": ["a b"] })),
        ("model", serde_json::json!(null)),
    ] {
        let mut bad = good.clone();
        bad[field] = value;
        refuse(bad.to_string().as_bytes(), "{}");
    }
    let mut random = good.clone();
    random["model"]["dropout"] = serde_json::json!(0.1);
    assert!(refuse(random.to_string().as_bytes(), "{}").contains("dropout"));
    let deep = format!("{{\"model\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    refuse(deep.as_bytes(), "{}");
    refuse(b"", "{}");
    refuse(&json, "[]");
    assert!(refuse(&json, "{\"eos_token\":\"<none>\"}").contains("eos_token"));
    assert!(refuse(&json, "{\"add_bos_token\":true}").contains("add_bos_token"));
    let moved = "{\"added_tokens_decoder\":{\"7\":{\"content\":\"<s>\"}}}";
    assert!(refuse(&json, moved).contains("added_tokens_decoder"));
    // A file that cuts and pads by itself does neither here.
    let mut cutting = good;
    cutting["truncation"] =
        serde_json::json!({ "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 });
    let cutting = Tokenizer::parse("t", cutting.to_string().as_bytes(), None).unwrap();
    assert!(cutting.encode("Low water at four", true).unwrap().len() > 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_ids_stream_to_the_text_they_have_together(ids in proptest::collection::vec(0u32..512, 0..120)) {
        let t = tokenizer("tiny512");
        for skip in [false, true] {
            let mut stream = t.stream(skip);
            let mut text = String::new();
            for id in &ids {
                text.push_str(&stream.push(*id).unwrap());
            }
            text.push_str(&stream.finish().unwrap());
            prop_assert_eq!(&text, &t.decode(&ids, skip).unwrap());
        }
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,80}") {
        let t = tokenizer("tiny512");
        let ids = t.encode(&text, false).unwrap();
        prop_assert_eq!(t.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn a_stream_of_bytes_that_are_no_text_ends() {
    let t = tokenizer("gpt2");
    // Id 94 to 187 are single bytes above 0x7F: no run of one of them is text.
    let ids = vec![127u32; 500];
    let mut stream = t.stream(false);
    let text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    assert!(text.chars().count() > 490, "what is certain is not held back");
    assert_eq!(text + &stream.finish().unwrap(), t.decode(&ids, false).unwrap());
}

#[test]
fn bytes_of_a_character_wait_for_each_other_where_tokens_stand_for_single_bytes() {
    // As in Llama 2: a run of bytes is text or it is not, as a whole.
    let json = serde_json::json!({ "version": "1.0", "decoder": { "type": "Sequence", "decoders":
        [{ "type": "ByteFallback" }, { "type": "Fuse" }] }, "model": { "type": "BPE", "byte_fallback": true, "merges": [],
        "vocab": { "a": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "<0xFF>": 4 } } });
    let t = Tokenizer::parse("t", json.to_string().as_bytes(), None).unwrap();
    let stream = |ids: &[u32]| {
        let mut stream = t.stream(false);
        let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    };
    assert_eq!(stream(&[0, 1, 2, 3, 0]), ["a", "", "", "€", "a", ""]);
    assert_eq!(stream(&[0, 4, 0]), ["a", "", "\u{FFFD}a", ""]);
    // What was given out stays, although the tokenizer now calls all four bytes broken.
    assert_eq!(stream(&[1, 2, 3, 4, 0]).concat(), "€\u{FFFD}a");
    let many: Vec<u32> = [1, 2, 3, 0].into_iter().cycle().take(400).collect();
    assert_eq!(stream(&many).concat(), t.decode(&many, false).unwrap());
}

#[test]
fn the_template_of_smollm2_makes_the_prompt_of_the_reference() {
    let t = tokenizer("smollm2");
    let text = t.chat_template("default").unwrap();
    let template = ChatTemplate::parse(t.file(), text, "<|im_start|>", "<|im_end|>").unwrap();
    let question = [Message::new("user", "What is the capital of France? Answer in one sentence.")];
    let prompt = template.render(&question, true).unwrap();
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
        <|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt, expected);
    let ids = t.encode(&prompt, false).unwrap();
    let first = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198,
    ];
    assert_eq!(ids[..first.len()], first);
    assert_eq!(t.decode(&ids, false).unwrap(), prompt);
}

fn tide_log(file: &str, tokenizer: Arc<Tokenizer>, mask_prompt: bool, max_tokens: u64) -> Dataset {
    let template = tokenizer.chat_template("default").map(|text| {
        let special = |s: Option<&ebbtide::llm::tokenizer::Special>| s.map(|s| s.text.clone()).unwrap_or_default();
        ChatTemplate::parse(tokenizer.file(), text, &special(tokenizer.bos()), &special(tokenizer.eos())).unwrap()
    });
    let end = tokenizer.eos().unwrap().id;
    let vocabulary = tokenizer.vocabulary();
    let options = DataOptions { mask_prompt, max_tokens };
    let encoder = Arc::new(Encoder::new(tokenizer, template, end, vocabulary, options).unwrap());
    let source = Source::open(tide_log_folder().join(file)).unwrap();
    wait(Dataset::scan(source, encoder)).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn batches_in_file_order_are_those_of_the_reference() {
    let tokenizer = Arc::new(wait(Tokenizer::open(shakespeare())).unwrap());
    let want = Tensors::read(refs::path("tiny_shakespeare_lora/batches.safetensors"));
    let (ids, labels, lengths) = (want.ints("input_ids"), want.ints("labels"), want.ints("lengths"));
    let predicted = refs::json("tiny_shakespeare_lora/reference.json")["predicted_tokens_per_step"].clone();
    let set = tide_log("train.jsonl", Arc::clone(&tokenizer), false, 64);
    assert_eq!(set.len(), 480);
    let mut batches = Batches::new(set, Order::File, 4, 1).unwrap();
    for step in 0..60usize {
        let window = wait(batches.window(step as u64)).unwrap();
        let tokens = window[0].bucket.tokens as usize;
        assert_eq!(window.len(), 1);
        assert_eq!(window[0].trained(), predicted[step].as_u64().unwrap(), "step {step}");
        for row in 0..4 {
            let from = (step * 4 + row) * 64;
            let (ids, labels) = (&ids[from..from + 64], &labels[from..from + 64]);
            let (own, learned) =
                (&window[0].ids[row * tokens..][..tokens], &window[0].labels[row * tokens..][..tokens]);
            assert_eq!(own, &ids[..tokens], "step {step} row {row}");
            assert!(ids[tokens..].iter().all(|id| *id == 0));
            // The reference's labels are not shifted: position i of ours predicts its i + 1.
            let shifted: Vec<i32> = labels[1..].iter().chain([&-100]).map(|l| if *l < 0 { -1 } else { *l }).collect();
            assert_eq!(learned, &shifted[..tokens], "step {step} row {row}");
            assert_eq!(learned.iter().filter(|l| **l >= 0).count() as i32, lengths[step * 4 + row] - 1);
        }
    }
    let valid = Batches::new(tide_log("valid.jsonl", tokenizer, false, 64), Order::File, 4, 1).unwrap();
    let all: Vec<_> = (0..valid.evaluation_batches()).map(|i| wait(valid.evaluation(i)).unwrap()).collect();
    assert_eq!((all.len(), all.iter().map(|m| m.trained()).sum::<u64>()), (12, 1863));
}

#[test]
fn masked_completions_and_answers_of_the_tide_log_train_only_themselves() {
    let t = Arc::new(tokenizer("smollm2"));
    for (file, mark) in [("prompt_completion_train.jsonl", "completion"), ("chat_train.jsonl", "content")] {
        let (masked, all) = (tide_log(file, Arc::clone(&t), true, 512), tide_log(file, Arc::clone(&t), false, 512));
        let lines = std::fs::read_to_string(tide_log_folder().join(file)).unwrap();
        for (row, line) in (0..).zip(lines.lines()) {
            let line: Value = serde_json::from_str(line).unwrap();
            let last = line["messages"].as_array().and_then(|m| m.last()).unwrap_or(&line);
            let (m, a) = (wait(masked.example(row)).unwrap(), wait(all.example(row)).unwrap());
            assert_eq!((&m.ids, a.from), (&a.ids, 1));
            let trained: Vec<u32> = m.ids[m.from..].iter().map(|id| *id as u32).collect();
            let text = t.decode(&trained, true).unwrap();
            assert_eq!(text.trim_end_matches('\n'), last[mark].as_str().unwrap(), "{file} row {row}");
            assert!(trained.contains(&2), "the end is trained");
        }
    }
}

#[test]
fn the_folder_of_the_data_gives_its_two_files() {
    let files = DataFiles::open(tide_log_folder()).unwrap();
    assert!(files.train.name().ends_with("train.jsonl") && files.valid.unwrap().name().ends_with("valid.jsonl"));
}
