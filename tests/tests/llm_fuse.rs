//! Adapters merged into models: the merged folder computes what base and adapter did, tied weights come apart where they
//! must, memory stays small, and a folder appears whole or not at all.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ebbtide::compile::Budget;
use ebbtide::llm::adapters::Adapter;
use ebbtide::llm::fuse::{FuseReport, Fusion, fuse};
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, hidden_gradients, inspect};
use ebbtide::weights::DType;
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::{Cancel, Catalog, Device, Outputs};
use ebbtide_tests::engine::{device, random, rss, same_bits, wait};
use ebbtide_tests::refs::{self, Tensors, close, largest, shifted, worst};

const BATCH: Bucket = Bucket { rows: 2, tokens: 32 };
/// The order of sums is another one when the product is added to the weight first.
const LOGITS: f32 = 2e-4;

fn open(folder: &Path) -> Model {
    Model::new(refs::config(&folder.join("config.json")), wait(Catalog::open(folder)).unwrap()).unwrap()
}

fn look(device: &Device, model: &Model, adapter: Option<&(Adapter, Vec<Vec<f32>>)>) -> Outputs {
    let ids = Tensors::read(refs::path("llama_tied").join("ref_f32.safetensors")).ints("input_ids");
    let program = [inspect(model, adapter.map(|a| &a.0), BATCH).unwrap()];
    let mut session = refs::session(device, model, &program, Budget::Percent(50.0));
    if let Some((adapter, values)) = adapter {
        wait(adapter.install(&mut session, values)).unwrap();
    }
    refs::run(&mut session, 0, &refs::mean_batch(model, BATCH, &ids, &shifted(&ids, 32)))
}

fn merge(
    model: &Model,
    folder: &Path,
    adapter: &Path,
    out: &Path,
    dtype: Option<DType>,
) -> ebbtide::Result<FuseReport> {
    let fusion = wait(Fusion::open(adapter, model))?;
    wait(fuse(model, folder, &fusion, out, dtype, &Cancel::new(), &mut |_, _| ()))
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_merged_model_computes_what_base_and_adapter_did_in_every_family_and_layout_of_files() {
    let (device, place) = (device(), tempfile::tempdir().unwrap());
    for (name, variant) in [
        ("llama_untied", "f32_sharded"),
        ("llama_tied", "f32"),
        ("qwen2", "f32"),
        ("gpt2", "f32"),
        ("gpt2", "f32_hub_style"),
    ] {
        for kind in ["lora_qv", "lora_all"] {
            let what = format!("{name} {variant} {kind}");
            let mut folder = refs::path(name).join(variant);
            if variant == "f32_hub_style" {
                folder = place.path().join("hub");
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join("model.safetensors"), refs::hub_style(name)).unwrap();
                std::fs::copy(refs::path(name).join("f32/config.json"), folder.join("config.json")).unwrap();
            }
            let (model, adapter) = (open(&folder), refs::path(name).join(kind).join("nonzero"));
            let out = place.path().join(&what);
            let report = merge(&model, &folder, &adapter, &out, None).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(report.files.len(), model.catalog().files().len(), "{what}");
            assert_eq!(report.files.len() > 1, out.join("model.safetensors.index.json").is_file(), "{what}");
            assert!(!report.untied && report.merged >= 4, "{what}: {report:?}");
            let merged = open(&out);
            assert_eq!(merged.config(), model.config(), "{what}");
            let known = wait(Adapter::open(&adapter, &model)).unwrap();
            let want = look(&device, &model, Some(&known)).f32("logits").unwrap();
            let got = look(&device, &merged, None).f32("logits").unwrap();
            close(&what, &got, &want, LOGITS);
            assert!(worst(&want, &look(&device, &model, None).f32("logits").unwrap()) > 100.0 * LOGITS, "{what}");
        }
    }
}

#[test]
fn another_dtype_is_the_rounding_of_every_tensor_and_the_configuration_says_so() {
    let place = tempfile::tempdir().unwrap();
    let folder = refs::path("llama_tied").join("f32");
    let (model, adapter) = (open(&folder), refs::path("llama_tied").join("lora_all/final"));
    let wide = place.path().join("wide");
    merge(&model, &folder, &adapter, &wide, None).unwrap();
    let full = Tensors::read(wide.join("model.safetensors"));
    for (dtype, name) in [(DType::F16, "float16"), (DType::BF16, "bfloat16")] {
        let out = place.path().join(name);
        merge(&model, &folder, &adapter, &out, Some(dtype)).unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["dtype"], name);
        let catalog = wait(Catalog::open(&out)).unwrap();
        assert!(catalog.weights().iter().all(|w| w.dtype == dtype));
        for tensor in full.names() {
            let narrow = |v: &f32| match dtype {
                DType::F16 => half::f16::from_f32(*v).to_le_bytes(),
                _ => half::bf16::from_f32(*v).to_le_bytes(),
            };
            let want: Vec<u8> = full.f32(tensor).iter().flat_map(narrow).collect();
            assert!(wait(catalog.read(catalog.find(tensor).unwrap())).unwrap() == want, "{tensor} as {dtype}");
        }
    }
    // What does not fit is an error that names the tensor, and leaves nothing.
    let text = std::fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let loud = place.path().join("loud");
    std::fs::create_dir(&loud).unwrap();
    std::fs::copy(adapter.join("adapter_model.safetensors"), loud.join("adapter_model.safetensors")).unwrap();
    std::fs::write(loud.join("adapter_config.json"), text.replace("\"lora_alpha\": 16", "\"lora_alpha\": 16e9"))
        .unwrap();
    let before = files(place.path());
    let error = merge(&model, &folder, &loud, &place.path().join("never"), Some(DType::F16)).unwrap_err();
    assert!(error.to_string().contains("_proj.weight") && error.to_string().contains("F16"), "{error}");
    assert_eq!(files(place.path()), before);
}

/// An adapter of head, table of tokens and q_proj, in PEFT's format: its matrices by name.
fn outer_adapter(folder: &Path, targets: &[&str], more: serde_json::Value) -> BTreeMap<String, Vec<f32>> {
    let mut tensors: Vec<(String, [u64; 2])> = Vec::new();
    if targets.contains(&"lm_head") {
        tensors.push(("lm_head.lora_A.weight".into(), [4, 64]));
        tensors.push(("lm_head.lora_B.weight".into(), [512, 4]));
    }
    if targets.contains(&"embed_tokens") {
        tensors.push(("model.embed_tokens.lora_embedding_A".into(), [4, 512]));
        tensors.push(("model.embed_tokens.lora_embedding_B".into(), [64, 4]));
    }
    if targets.contains(&"q_proj") {
        for block in 0..4 {
            tensors.push((format!("model.layers.{block}.self_attn.q_proj.lora_A.weight"), [4, 64]));
            tensors.push((format!("model.layers.{block}.self_attn.q_proj.lora_B.weight"), [64, 4]));
        }
    }
    let mut values = BTreeMap::new();
    for (i, (name, [n, m])) in tensors.iter().enumerate() {
        values.insert(name.clone(), random(900 + i as u64, (n * m) as usize, 0.2));
    }
    let data: Vec<(TensorSpec, &[u8])> = tensors
        .iter()
        .map(|(n, shape)| {
            let spec = TensorSpec::new(format!("base_model.model.{n}"), DType::F32, shape.to_vec());
            (spec, bytemuck::cast_slice(&values[n]))
        })
        .collect();
    std::fs::create_dir_all(folder).unwrap();
    let bytes = write(Vec::new(), "adapter", &data, &BTreeMap::new()).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
    let mut config = serde_json::json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets });
    config.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    values
}

/// x `[n, in]` through A `[4, in]` and B `[out, 4]`, times the scale of 2.
fn low(x: &[f32], a: &[f32], b: &[f32], input: usize, output: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for x in x.chunks(input) {
        let inner: Vec<f32> = a.chunks(input).map(|a| a.iter().zip(x).map(|(a, x)| a * x).sum()).collect();
        all.extend((0..output).map(|o| 2.0 * b[o * 4..][..4].iter().zip(&inner).map(|(b, i)| b * i).sum::<f32>()));
    }
    all
}

#[test]
fn an_adapter_of_head_or_embedding_unties_a_tied_model_and_changes_no_more_than_it_says() {
    let (device, place) = (device(), tempfile::tempdir().unwrap());
    let folder = refs::path("llama_tied").join("f32");
    let model = open(&folder);
    let base = look(&device, &model, None);
    let ids = Tensors::read(refs::path("llama_tied").join("ref_f32.safetensors")).ints("input_ids");
    for targets in [&["lm_head"][..], &["embed_tokens"], &["embed_tokens", "lm_head", "q_proj"]] {
        let what = targets.join("+");
        let adapter = place.path().join(format!("adapter {what}"));
        let values = outer_adapter(&adapter, targets, serde_json::json!({}));
        // Streaming an adapted head is refused, with the way out.
        let refused = wait(Adapter::open(&adapter, &model)).unwrap_err().to_string();
        assert!(refused.contains("ebbtide fuse"), "{refused}");

        let out = place.path().join(&what);
        let report = merge(&model, &folder, &adapter, &out, None).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(report.untied);
        let merged = open(&out);
        assert!(!merged.config().tied && model.config().tied);
        let tensors = Tensors::read(out.join("model.safetensors"));
        let table = Tensors::read(folder.join("model.safetensors")).f32("model.embed_tokens.weight");
        let (head, embed) = (tensors.f32("lm_head.weight"), tensors.f32("model.embed_tokens.weight"));
        // What is not adapted stays to the bit.
        assert_eq!(head == table, !targets.contains(&"lm_head"), "{what}");
        assert_eq!(embed == table, !targets.contains(&"embed_tokens"), "{what}");

        let got = look(&device, &merged, None);
        let h = got.f32("hidden.4").unwrap();
        if targets.contains(&"embed_tokens") {
            let (a, b) =
                (&values["model.embed_tokens.lora_embedding_A"], &values["model.embed_tokens.lora_embedding_B"]);
            let one_hot = |id: &i32| (0..512).map(|i| f32::from(u8::from(i == *id))).collect::<Vec<_>>();
            let x: Vec<f32> = ids.iter().flat_map(one_hot).collect();
            let added = low(&x, a, b, 512, 64);
            let want: Vec<f32> = base.f32("hidden.0").unwrap().iter().zip(&added).map(|(h, d)| h + d).collect();
            close(&format!("{what}, embedded"), &got.f32("hidden.0").unwrap(), &want, 1e-6);
        }
        // The head on its own input: the base's table, and the adapter's part where it has one.
        let mut want: Vec<f32> = Vec::new();
        for h in h.chunks(64) {
            want.extend(table.chunks(64).map(|w| w.iter().zip(h).map(|(w, h)| f64::from(w * h)).sum::<f64>() as f32));
        }
        if targets.contains(&"lm_head") {
            let added = low(&h, &values["lm_head.lora_A.weight"], &values["lm_head.lora_B.weight"], 64, 512);
            want.iter_mut().zip(&added).for_each(|(w, d)| *w += d);
            assert!(largest(&added) > 100.0 * LOGITS);
        }
        close(&format!("{what}, logits"), &got.f32("logits").unwrap(), &want, LOGITS);
        if targets == ["lm_head"] {
            assert_eq!(h, base.f32("hidden.4").unwrap(), "only the head is another");
        }
    }
}

#[test]
fn a_tied_weight_is_one_weight_and_trains_as_its_explicit_copy_does() {
    let (device, place) = (device(), tempfile::tempdir().unwrap());
    let folder = refs::path("llama_tied").join("f32");
    let tied = open(&folder);
    // An adapter that adds nothing makes the explicit copy.
    let adapter = place.path().join("adapter");
    outer_adapter(&adapter, &["lm_head"], serde_json::json!({ "lora_alpha": 0 }));
    merge(&tied, &folder, &adapter, &place.path().join("copy"), None).unwrap();
    let copy = open(&place.path().join("copy"));
    assert_eq!(tied.embedding().unwrap(), tied.head().unwrap());
    assert_ne!(copy.embedding().unwrap(), copy.head().unwrap());
    assert_eq!(tied.catalog().weights().len() + 1, copy.catalog().weights().len());
    let ids = Tensors::read(refs::path("llama_tied").join("ref_f32.safetensors")).ints("input_ids");
    let run = |model: &Model, budget| {
        let program = [hidden_gradients(model, None, BATCH).unwrap()];
        let mut session = refs::session(&device, model, &program, budget);
        let counted = session.set().weight_bytes;
        (refs::run(&mut session, 0, &refs::mean_batch(model, BATCH, &ids, &shifted(&ids, 32))), counted)
    };
    for budget in [Budget::Floor, Budget::All] {
        let ((a, of_tied), (b, of_copy)) = (run(&tied, budget), run(&copy, budget));
        assert_eq!(of_tied, of_copy, "the head is counted once, and rows of the table come from the file");
        for name in ["loss", "grad.0", "grad.2", "grad.4"] {
            same_bits(&format!("{name} at {budget}"), a.bytes(name).unwrap(), b.bytes(name).unwrap());
        }
    }
}

#[test]
fn what_an_adapter_of_head_and_embedding_does_not_say_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let model = open(&refs::path("llama_tied").join("f32"));
    let refused = |more: serde_json::Value| {
        let folder = place.path().join("adapter");
        outer_adapter(&folder, &["lm_head"], more);
        wait(Fusion::open(&folder, &model)).unwrap_err().to_string()
    };
    assert!(refused(serde_json::json!({ "ensure_weight_tying": true })).contains("ensure_weight_tying"));
    assert!(refused(serde_json::json!({ "target_modules": ["lm_head", "nothing"] })).contains("nothing"));
    assert!(refused(serde_json::json!({ "target_modules": ["lm_head", "embed_tokens"] })).contains("lora_embedding_A"));
    assert!(refused(serde_json::json!({ "modules_to_save": ["lm_head"] })).contains("modules_to_save"));
    assert!(refused(serde_json::json!({ "r": 8 })).contains("lora_A"));
}

/// A model of one wide block in a folder of its own.
fn made(place: &Path, vocabulary: u64) -> PathBuf {
    let folder = place.join(format!("made {vocabulary}"));
    std::fs::create_dir(&folder).unwrap();
    let d = 64;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": vocabulary, "tie_word_embeddings": true,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let square = |name: &str| (format!("model.layers.0.{name}.weight"), vec![d, d]);
    let mut tensors: Vec<(String, Vec<u64>)> = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        .iter()
        .chain(&["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])
        .map(|n| square(n))
        .collect();
    tensors.push(("model.layers.0.input_layernorm.weight".into(), vec![d]));
    tensors.push(("model.layers.0.post_attention_layernorm.weight".into(), vec![d]));
    tensors.push(("model.norm.weight".into(), vec![d]));
    tensors.push(("model.embed_tokens.weight".into(), vec![vocabulary, d]));
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, s)| vec![0x3c; s.iter().product::<u64>() as usize * 2]).collect();
    let data: Vec<(TensorSpec, &[u8])> = tensors
        .iter()
        .zip(&bytes)
        .map(|((n, s), b)| (TensorSpec::new(n.clone(), DType::F16, s.clone()), b.as_slice()))
        .collect();
    let file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    write(file, "model", &data, &BTreeMap::new()).unwrap();
    folder
}

#[test]
fn host_memory_does_not_grow_with_the_model_and_no_device_is_needed() {
    let place = tempfile::tempdir().unwrap();
    let folder = made(place.path(), 512 * 1024);
    let model = open(&folder);
    let adapter = place.path().join("adapter");
    let spec = ebbtide::llm::adapters::LoraSpec::default();
    let empty = Adapter::new(&model, spec).unwrap();
    empty.save(&adapter, &empty.initial(1), "base").unwrap();
    let fusion = wait(Fusion::open(&adapter, &model)).unwrap();
    let (before, mut most) = (rss(), 0);
    let mut watch = |_, _| most = rss().max(most);
    let out = place.path().join("out");
    wait(fuse(&model, &folder, &fusion, &out, Some(DType::F32), &Cancel::new(), &mut watch)).unwrap();
    let size = std::fs::metadata(out.join("model.safetensors")).unwrap().len();
    assert!(size > 128 << 20);
    assert!(most - before < 16 << 20, "{} bytes more for {size} written", most - before);
}

#[test]
fn a_folder_appears_whole_or_not_at_all_and_is_never_written_over() {
    let place = tempfile::tempdir().unwrap();
    let folder = refs::path("llama_untied").join("f32_sharded");
    let model = open(&folder);
    let fusion = wait(Fusion::open(&refs::path("llama_untied").join("lora_qv/final"), &model)).unwrap();
    // Cancelled at any time, nothing is left: neither the folder nor its beginnings.
    let mut marks = 0;
    wait(fuse(&model, &folder, &fusion, &place.path().join("a"), None, &Cancel::new(), &mut |_, _| marks += 1))
        .unwrap();
    for stop in [1, marks / 2, marks - 1] {
        let (cancel, mut seen) = (Cancel::new(), 0);
        let mut until = |_, _| {
            seen += 1;
            if seen == stop {
                cancel.cancel();
            }
        };
        let out = place.path().join("b");
        let error = wait(fuse(&model, &folder, &fusion, &out, None, &cancel, &mut until)).unwrap_err();
        assert_eq!(error.code(), "cancelled");
        assert_eq!(files(place.path()), ["a"]);
    }
    // What is there stays as it is: a folder, a file, the model itself, a link that leads nowhere.
    std::fs::write(place.path().join("file"), b"mine").unwrap();
    let before = std::fs::read(place.path().join("a/model-00001-of-00005.safetensors")).unwrap();
    let mut taken = vec!["a", "file"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", place.path().join("link")).unwrap();
        taken.push("link");
    }
    for name in taken {
        let out = place.path().join(name);
        let error = wait(fuse(&model, &folder, &fusion, &out, None, &Cancel::new(), &mut |_, _| ())).unwrap_err();
        assert_eq!(error.code(), "invalid", "{name}: {error}");
    }
    assert!(before == std::fs::read(place.path().join("a/model-00001-of-00005.safetensors")).unwrap());
    assert_eq!(std::fs::read(place.path().join("file")).unwrap(), b"mine");
    let nowhere = place.path().join("no/such/place");
    assert!(wait(fuse(&model, &folder, &fusion, &nowhere, None, &Cancel::new(), &mut |_, _| ())).is_err());
}
