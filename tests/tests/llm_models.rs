//! Models give what the reference library gives, from every kind of file, to the same bits at every budget.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ebbtide::compile::Budget;
use ebbtide::event::NoEvents;
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, Inputs, decode, evaluate, hidden_gradients, inspect, prefill};
use ebbtide::{Cancel, Catalog, Device, Source};
use ebbtide_tests::engine::{device, f32s, file, same_bits, wait};
use ebbtide_tests::refs::{self, Tensors, close, largest, model, shifted};

/// Tolerances that the references support (their README).
const LOGITS: f32 = 2e-4;
const LOSS: f32 = 2e-5;
const GRADIENT: f32 = 3e-5;

const NAMES: [&str; 4] = ["llama_untied", "llama_tied", "qwen2", "gpt2"];
const BUDGETS: [Budget; 3] = [Budget::All, Budget::Percent(50.0), Budget::Floor];
const BATCH: Bucket = Bucket { rows: 2, tokens: 32 };

/// Logits and loss of a variant at each budget against a file of references; what they are.
fn check(device: &Device, name: &str, variant: &str, reference: &str) -> Vec<u8> {
    let model = model(name, variant);
    let want = Tensors::read(refs::path(name).join(reference));
    let ids = Tensors::read(refs::path(name).join("ref_f32.safetensors")).ints("input_ids");
    let batch = refs::mean_batch(&model, BATCH, &ids, &shifted(&ids, 32));
    let program = [inspect(&model, None, BATCH).unwrap()];
    let mut first: Option<Vec<u8>> = None;
    for budget in BUDGETS {
        let out = refs::run(&mut refs::session(device, &model, &program, budget), 0, &batch);
        let what = format!("{name}/{variant} at {budget}");
        close(&format!("{what}, logits"), &out.f32("logits").unwrap(), &want.f32("logits"), LOGITS);
        close(&format!("{what}, loss"), &out.f32("loss").unwrap(), &want.f32("loss"), LOSS);
        let names: Vec<String> = (0..=model.blocks()).map(|i| format!("hidden.{i}")).collect();
        for hidden in names.iter().filter(|n| want.names().any(|w| w == n.as_str())) {
            let reference = want.f32(hidden);
            close(&format!("{what}, {hidden}"), &out.f32(hidden).unwrap(), &reference, LOGITS);
        }
        let all: Vec<u8> = [out.bytes("logits").unwrap(), out.bytes("loss").unwrap()].concat();
        match &first {
            Some(first) => same_bits(&what, &all, first),
            None => first = Some(all),
        }
    }
    first.unwrap()
}

#[test]
fn every_model_in_every_dtype_gives_the_logits_hidden_states_and_loss_of_the_reference_at_every_budget() {
    let device = device();
    for name in NAMES {
        for dtype in ["f32", "bf16", "f16"] {
            check(&device, name, dtype, &format!("ref_{dtype}.safetensors"));
        }
    }
}

#[test]
fn shards_and_keys_without_a_prefix_are_the_same_model_to_the_bit() {
    let device = device();
    for (name, other) in [("llama_untied", "f32_sharded"), ("gpt2", "f32_hub_style")] {
        let one = check(&device, name, "f32", "ref_f32.safetensors");
        same_bits(other, &check(&device, name, other, "ref_f32.safetensors"), &one);
    }
}

#[test]
fn both_styles_of_configuration_say_the_same() {
    for name in NAMES {
        let (new, old) = (refs::path(name).join("f32/config.json"), refs::path(name).join("config_v4_style.json"));
        assert_eq!(format!("{:?}", refs::config(&new)), format!("{:?}", refs::config(&old)), "{name}");
    }
}

#[test]
fn masked_tokens_do_not_count() {
    let device = device();
    for name in NAMES {
        let model = model(name, "f32");
        let want = Tensors::read(refs::path(name).join("ref_f32.safetensors"));
        let batch = refs::mean_batch(&model, BATCH, &want.ints("input_ids"), &shifted(&want.ints("labels_masked"), 32));
        let program = [evaluate(&model, None, BATCH).unwrap()];
        let mut first: Option<Vec<u8>> = None;
        for budget in BUDGETS {
            let out = refs::run(&mut refs::session(&device, &model, &program, budget), 0, &batch);
            close(name, &out.f32("loss").unwrap(), &want.f32("loss_masked"), LOSS);
            let bits = out.bytes("loss").unwrap().to_vec();
            assert_eq!(first.get_or_insert(bits.clone()), &bits, "{name} at {budget}");
        }
    }
}

#[test]
fn gradients_of_hidden_states_are_those_of_the_reference() {
    let device = device();
    for name in NAMES {
        let model = model(name, "f32");
        let want = Tensors::read(refs::path(name).join("ref_f32.safetensors"));
        let ids = want.ints("input_ids");
        let batch = refs::mean_batch(&model, BATCH, &ids, &shifted(&ids, 32));
        let program = [hidden_gradients(&model, None, BATCH).unwrap()];
        let run = |budget| refs::run(&mut refs::session(&device, &model, &program, budget), 0, &batch);
        let (all, floor) = (run(Budget::All), run(Budget::Floor));
        for i in 0..=model.blocks() {
            let (grad, reference) = (format!("grad.{i}"), want.f32(&format!("grad_hidden.{i}")));
            let tolerance = GRADIENT * largest(&reference);
            close(&format!("{name} {grad}"), &all.f32(&grad).unwrap(), &reference, tolerance);
            same_bits(&format!("{name} {grad} at the floor"), floor.bytes(&grad).unwrap(), all.bytes(&grad).unwrap());
        }
    }
}

/// Tokens by greedy decoding: the prompt in parts of eight places, then one at a time.
fn greedy(device: &Device, model: &Model, prompt: &[i32], count: usize, budget: Budget) -> Vec<i32> {
    let programs = [prefill(model, None, 8, 48).unwrap(), decode(model, None, 48).unwrap()];
    let mut session = refs::session(device, model, &programs, budget);
    let mut step = |plan: usize, start: usize, ids: &[i32]| {
        let bucket = if plan == 1 { 1 } else { 8 };
        let inputs = Inputs::text(model, bucket, 48, start as u64, ids).unwrap();
        let logits = refs::run(&mut session, plan, &inputs).f32("logits").unwrap();
        (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as i32
    };
    let mut next = 0;
    // Another text first: what it leaves in the cache is not seen.
    step(0, 0, &[7, 7, 7, 7, 7, 7, 7, 7]);
    for (i, part) in prompt.chunks(5).enumerate() {
        next = step(0, 5 * i, part);
    }
    let mut new = vec![next];
    while new.len() < count {
        next = step(1, prompt.len() + new.len() - 1, &[next]);
        new.push(next);
    }
    new
}

#[test]
fn greedy_continuations_with_a_cache_are_those_of_the_reference_also_for_a_second_text() {
    let device = device();
    let ints =
        |v: &serde_json::Value| v.as_array().unwrap().iter().map(|x| x.as_i64().unwrap() as i32).collect::<Vec<_>>();
    for name in NAMES {
        let meta = refs::json(&format!("{name}/meta.json"));
        let (prompt, want) = (ints(&meta["greedy"]["prompt"]), ints(&meta["greedy"]["new_ids"]));
        let model = model(name, "f32");
        for budget in BUDGETS {
            assert_eq!(greedy(&device, &model, &prompt, want.len(), budget), want, "{name} at {budget}");
        }
    }
}

fn tensors_of(name: &str) -> Vec<ebbtide_tests::engine::Data> {
    let path = refs::path(name).join("f32/model.safetensors");
    let (all, catalog) = (Tensors::read(path.clone()), wait(Catalog::open(path)).unwrap());
    all.names().map(|n| f32s(n, &catalog.weight(catalog.find(n).unwrap()).shape, &all.f32(n))).collect()
}

fn refused(name: &str, tensors: &[ebbtide_tests::engine::Data]) -> (String, String) {
    let config = refs::config(&refs::path(name).join("f32/config.json"));
    let catalog = wait(Catalog::from_sources(vec![Source::memory("model.safetensors", file(tensors))])).unwrap();
    let error = Model::new(config, catalog).unwrap_err();
    (error.code().to_string(), error.to_string())
}

#[test]
fn tensors_that_are_missing_unknown_contradicting_or_of_another_shape_are_refused_by_name() {
    let all = tensors_of("llama_tied");
    let without: Vec<_> = all.iter().filter(|t| !t.name.ends_with("2.mlp.up_proj.weight")).cloned().collect();
    let (code, text) = refused("llama_tied", &without);
    assert!(code == "format" && text.contains("model.layers.2.mlp.up_proj.weight"), "{text}");

    let extra = |name: &str| [all.clone(), vec![f32s(name, &[512, 64], &vec![0.5; 512 * 64])]].concat();
    let (code, text) = refused("llama_tied", &extra("lm_head.weight"));
    assert!(code == "format" && text.contains("lm_head.weight") && text.contains("tie_word_embeddings"), "{text}");
    let (_, text) = refused("llama_tied", &extra("model.layers.4.self_attn.q_proj.weight"));
    assert!(text.contains("model.layers.4.self_attn.q_proj.weight"), "{text}");
    let (_, text) = refused("llama_tied", &extra("model.layers.1.self_attn.q_proj.bias"));
    assert!(text.contains("model.layers.1.self_attn.q_proj.bias"), "{text}");

    let mut odd = all.clone();
    let tensor = odd.iter_mut().find(|t| t.name == "model.layers.0.self_attn.k_proj.weight").unwrap();
    tensor.shape = vec![64, 32];
    let (_, text) = refused("llama_tied", &odd);
    assert!(text.contains("k_proj.weight") && text.contains("[64, 32]") && text.contains("[32, 64]"), "{text}");

    let headless: Vec<_> = tensors_of("llama_untied").into_iter().filter(|t| t.name != "lm_head.weight").collect();
    let (_, text) = refused("llama_untied", &headless);
    assert!(text.contains("lm_head.weight"), "{text}");
}

#[test]
fn an_id_outside_the_vocabulary_and_a_text_beyond_the_positions_are_refused() {
    let model = model("gpt2", "f32");
    assert!(evaluate(&model, None, Bucket { rows: 1, tokens: 129 }).unwrap_err().to_string().contains("128"));
    assert!(prefill(&model, None, 8, 129).is_err());
    assert!(Inputs::text(&model, 8, 16, 12, &[1; 5]).is_err());
    let device = device();
    let mut session = refs::session(
        &device,
        &model,
        &[evaluate(&model, None, Bucket { rows: 1, tokens: 2 }).unwrap()],
        Budget::Floor,
    );
    let inputs = Inputs::batch(&model, Bucket { rows: 1, tokens: 2 }, &[3, 512], &[1, -1], &[1.0, 0.0]).unwrap();
    let plan = session.set().plans[0].clone();
    let named = inputs.of_plan(&plan);
    let result = wait(session.run(0, &named, &Cancel::new(), &mut NoEvents));
    assert!(result.unwrap_err().to_string().contains("512"));
}
