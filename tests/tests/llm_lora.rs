//! Adapters train to the reference library's gradients, losses and weights, at every budget to the same bits, and their
//! files are PEFT's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ebbtide::compile::Budget;
use ebbtide::event::NoEvents;
use ebbtide::llm::adapters::{Adapter, LoraSpec, Targets, Values};
use ebbtide::llm::generate::Sampling;
use ebbtide::llm::generator::{Generator, Space};
use ebbtide::llm::models::Model;
use ebbtide::llm::programs::{Bucket, decode, evaluate, inspect, train};
use ebbtide::nn::{AdamW, Part};
use ebbtide::{Cancel, Device, Event};
use ebbtide_tests::engine::{device, wait};
use ebbtide_tests::refs::{self, Tensors, close, largest, model, shifted, worst};

const NAMES: [&str; 4] = ["llama_untied", "llama_tied", "qwen2", "gpt2"];
const ADAPTERS: [&str; 2] = ["lora_qv", "lora_all"];
const BATCH: Bucket = Bucket { rows: 2, tokens: 32 };
const LOSS: f32 = 2e-5;
const STEP_LOSS: f32 = 1e-4;
const GRADIENT: f32 = 3e-5;
const RATE: f64 = 1e-3;

fn adamw() -> AdamW {
    AdamW { weight_decay: 0.01, ..AdamW::default() }
}

fn open(name: &str, kind: &str, which: &str, model: &Model) -> (Adapter, Values) {
    wait(Adapter::open(&refs::path(name).join(kind).join(which), model))
        .unwrap_or_else(|e| panic!("{name} {kind}: {e}"))
}

/// Gradients of an adapter's parameters and the loss, by a step that does not update.
fn gradients(device: &Device, model: &Model, (adapter, values): &(Adapter, Values), ids: &[i32]) -> (f32, Values) {
    let program = [train(model, adapter, BATCH, &adamw(), Part::First).unwrap()];
    let mut session = refs::session(device, model, &program, Budget::Percent(50.0));
    wait(adapter.install(&mut session, values)).unwrap();
    let out = refs::run(&mut session, 0, &refs::mean_batch(model, BATCH, ids, &shifted(ids, 32)));
    let grads = wait(adapter.read_arrays(&mut session, |i| format!("gradients.{i}"))).unwrap();
    (out.f32("loss").unwrap()[0], grads)
}

/// Compares with the tensors `prefix` + PEFT's name; each within a share of its largest entry.
fn gradients_match(what: &str, adapter: &Adapter, got: &Values, want: &Tensors, prefix: &str) {
    for (p, g) in adapter.params().iter().zip(got) {
        let reference = want.f32(&format!("{prefix}base_model.model.{}", p.name));
        close(&format!("{what}, {}", p.name), g, &reference, GRADIENT * largest(&reference));
    }
}

#[test]
fn gradients_are_those_of_the_reference_for_an_adapter_in_use_and_at_the_first_step() {
    let device = device();
    for name in NAMES {
        let model = model(name, "f32");
        let ids = Tensors::read(refs::path(name).join("ref_f32.safetensors")).ints("input_ids");
        for kind in ADAPTERS {
            let folder = refs::path(name).join(kind);
            let nonzero = open(name, kind, "nonzero", &model);
            let want = Tensors::read(folder.join("nonzero.safetensors"));
            let (loss, grads) = gradients(&device, &model, &nonzero, &ids);
            close(&format!("{name} {kind}, loss"), &[loss], &want.f32("loss"), LOSS);
            gradients_match(&format!("{name} {kind} nonzero"), &nonzero.0, &grads, &want, "grad.");

            let train = Tensors::read(folder.join("train.safetensors"));
            let init = open(name, kind, "init", &model);
            let (_, grads) = gradients(&device, &model, &init, &train.ints("batches")[..64]);
            gradients_match(&format!("{name} {kind} step 0"), &init.0, &grads, &train, "grad_step0.");
        }
    }
}

/// Losses of 20 steps over the four batches, the values after them, and the loss of the reference's batch then.
fn train_20(
    device: &Device,
    model: &Model,
    init: &(Adapter, Values),
    train_file: &Tensors,
    ids: &[i32],
    budget: Budget,
) -> (Vec<f32>, Values, f32) {
    let (adapter, values) = init;
    let programs =
        [train(model, adapter, BATCH, &adamw(), Part::Whole).unwrap(), evaluate(model, Some(adapter), BATCH).unwrap()];
    let mut session = refs::session(device, model, &programs, budget);
    wait(adapter.install(&mut session, values)).unwrap();
    let batches = train_file.ints("batches");
    let mut losses = Vec::new();
    for step in 0..20 {
        let ids = &batches[step % 4 * 64..][..64];
        let mut batch = refs::mean_batch(model, BATCH, ids, &shifted(ids, 32));
        batch.hyper(&adamw().hyper(RATE, step as u64 + 1));
        losses.push(refs::run(&mut session, 0, &batch).f32("loss").unwrap()[0]);
    }
    let eval = refs::run(&mut session, 1, &refs::mean_batch(model, BATCH, ids, &shifted(ids, 32)));
    (losses, wait(adapter.values(&mut session)).unwrap(), eval.f32("loss").unwrap()[0])
}

#[test]
fn twenty_steps_give_the_losses_weights_and_final_loss_of_the_reference_and_the_same_bits_at_every_budget() {
    let device = device();
    for name in NAMES {
        let model = model(name, "f32");
        let ids = Tensors::read(refs::path(name).join("ref_f32.safetensors")).ints("input_ids");
        for kind in ADAPTERS {
            let what = format!("{name} {kind}");
            let reference = Tensors::read(refs::path(name).join(kind).join("train.safetensors"));
            let init = open(name, kind, "init", &model);
            let run = |budget| train_20(&device, &model, &init, &reference, &ids, budget);
            let (losses, values, eval) = run(Budget::All);
            close(&format!("{what}, losses"), &losses, &reference.f32("losses"), STEP_LOSS);
            close(&format!("{what}, final loss"), &[eval], &reference.f32("final_eval_loss"), STEP_LOSS);
            let (_, last) = open(name, kind, "final", &model);
            let (got, want) = (values.concat(), last.concat());
            let square: f64 = got.iter().zip(&want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
            let rms = (square / got.len() as f64).sqrt();
            let near = got.iter().zip(&want).filter(|(g, w)| (*g - *w).abs() <= 1e-4).count();
            assert!(rms <= 1e-5 || near * 100 >= got.len() * 99, "{what}: rms {rms}, worst {}", worst(&got, &want));
            for budget in [Budget::Percent(50.0), Budget::Floor] {
                assert!((losses.clone(), values.clone(), eval) == run(budget), "{what}: other bits at {budget}");
            }
        }
    }
}

#[test]
fn a_saved_adapter_opens_to_the_same_values_and_its_files_are_as_peft_writes_them() {
    let dir = tempfile::tempdir().unwrap();
    for name in NAMES {
        let model = model(name, "f32");
        for kind in ADAPTERS {
            let (adapter, values) = open(name, kind, "final", &model);
            let folder = dir.path().join(name).join(kind);
            adapter.save(&folder, &values, "../../f32").unwrap();
            let (again, read) = wait(Adapter::open(&folder, &model)).unwrap();
            assert_eq!((adapter.spec(), &values), (again.spec(), &read));
            let stored = |p: &std::path::Path| std::fs::read(p.join("adapter_model.safetensors")).unwrap();
            let (ours, theirs) = (stored(&folder), stored(&refs::path(name).join(kind).join("final")));
            assert!(ours == theirs, "{name} {kind}: the file differs from PEFT's");
            let text = |p: &std::path::Path| std::fs::read_to_string(p.join("adapter_config.json")).unwrap();
            let theirs: serde_json::Value =
                serde_json::from_str(&text(&refs::path(name).join(kind).join("final"))).unwrap();
            let ours: serde_json::Value = serde_json::from_str(&text(&folder)).unwrap();
            for (field, value) in ours.as_object().unwrap() {
                assert_eq!(*value, theirs[field], "{name} {kind}: {field}");
            }
        }
    }
}

/// The folder that [`saves_for_ever`] writes.
const SAVED: &str = "EBBTIDE_TEST_SAVED";

#[test]
#[ignore = "the child of the test below, which kills it"]
fn saves_for_ever() {
    let Some(folder) = std::env::var_os(SAVED).map(std::path::PathBuf::from) else { return };
    let model = model("llama_tied", "f32");
    // Over the very files it was read from.
    let (adapter, values) = wait(Adapter::open(&folder, &model)).unwrap();
    for i in 0u32.. {
        let next: Values = values.iter().map(|v| vec![i as f32; v.len()]).collect();
        adapter.save(&folder, &next, "base").unwrap();
    }
}

#[test]
fn an_adapter_saved_over_itself_is_whole_whenever_the_process_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let model = model("llama_tied", "f32");
    let (adapter, values) = open("llama_tied", "lora_all", "final", &model);
    adapter.save(folder.path(), &values, "base").unwrap();
    let mut saved = 0;
    for round in 0..12 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saves_for_ever", "--ignored"])
            .env(SAVED, folder.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(60 + 17 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let (again, now) = wait(Adapter::open(folder.path(), &model)).unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_eq!(again.spec(), adapter.spec());
        if now != values {
            saved += 1;
            let first = now[0][0];
            assert!(now.iter().flatten().all(|x| *x == first), "round {round}: a mixture of two");
        }
    }
    assert!(saved > 0, "the child never came to save");
}

#[test]
fn adapters_are_swapped_and_removed_on_a_base_that_stays_evicted() {
    let device = device();
    let model = model("llama_tied", "f32");
    let ids = Tensors::read(refs::path("llama_tied").join("ref_f32.safetensors")).ints("input_ids");
    let batch = refs::mean_batch(&model, BATCH, &ids, &shifted(&ids, 32));
    let folder = refs::path("llama_tied").join("lora_qv");
    let (adapter, nonzero) = open("llama_tied", "lora_qv", "nonzero", &model);
    let (_, last) = open("llama_tied", "lora_qv", "final", &model);
    let program = [inspect(&model, Some(&adapter), BATCH).unwrap()];
    let mut session = refs::session(&device, &model, &program, Budget::Floor);
    let mut loss = |values: Option<&Values>| {
        match values {
            Some(values) => wait(adapter.install(&mut session, values)).unwrap(),
            None => wait(adapter.remove(&mut session)).unwrap(),
        }
        refs::run(&mut session, 0, &batch).f32("loss").unwrap()
    };
    let want = |file: &str, name: &str| Tensors::read(folder.join(file)).f32(name);
    close("in use", &loss(Some(&nonzero)), &want("nonzero.safetensors", "loss"), LOSS);
    close("another", &loss(Some(&last)), &want("train.safetensors", "final_eval_loss"), LOSS);
    close("none", &loss(None), &want("../ref_f32.safetensors", "loss"), LOSS);
    let first = loss(Some(&nonzero));
    assert_eq!(first, loss(Some(&nonzero)));
}

const PROMPT: [i32; 11] = [5, 9, 200, 31, 7, 11, 13, 17, 19, 23, 29];

fn generator(device: &Device, budget: Budget, adapters: &[(&str, &str)], first: Option<&str>) -> Generator {
    let model = model("llama_tied", "f32");
    let known = |(kind, which): &(&str, &str)| (format!("{kind} {which}"), open("llama_tied", kind, which, &model));
    let adapters = adapters.iter().map(known).collect();
    let space = Space { budget, context: 48, chunk: 16 };
    wait(Generator::with(device, model, space, adapters, first)).unwrap()
}

fn greedy_text(generator: &mut Generator, prompt: &[i32]) -> Vec<i32> {
    let (greedy, cancel) = (Sampling::default(), Cancel::new());
    wait(generator.write(prompt, 16, &[], &greedy, &cancel, &mut NoEvents, &mut |_| true)).unwrap()
}

#[test]
fn adapters_of_any_rank_and_layers_are_loaded_swapped_and_removed_under_one_budget() {
    let device = device();
    let all = [("lora_qv", "nonzero"), ("lora_qv", "final"), ("lora_all", "nonzero")];
    let names = all.map(|(kind, which)| format!("{kind} {which}"));
    let alone = |name: Option<&str>| greedy_text(&mut generator(&device, Budget::Percent(50.0), &all, name), &PROMPT);
    let want: Vec<_> = names.iter().map(|n| alone(Some(n.as_str()))).collect();
    let bare = alone(None);
    assert!(want.iter().all(|w| *w != bare) && want[0] != want[1] && want[1] != want[2], "they must differ to tell");

    device.reset_peak_memory();
    let mut one = generator(&device, Budget::Floor, &all, None);
    let mut planned = one.set().unwrap().planned_peak();
    for i in [0, 1, 2, 0, 2, 1] {
        wait(one.select(Some(&names[i]))).unwrap();
        planned = planned.max(one.set().unwrap().planned_peak());
        assert_eq!(greedy_text(&mut one, &PROMPT), want[i], "{}", names[i]);
    }
    wait(one.remove(&names[1])).unwrap();
    assert_eq!((one.active(), one.adapters().count()), (None, 2));
    assert_eq!(greedy_text(&mut one, &PROMPT), bare);
    assert!(wait(one.select(Some(&names[1]))).unwrap_err().to_string().contains("lora_qv final"));
    assert_eq!(device.peak_memory(), planned, "two sets were there at once");
}

#[test]
fn a_text_that_goes_on_is_read_from_where_it_differs_and_is_that_of_a_fresh_start() {
    let device = device();
    let first = "lora_qv final";
    let mut talk = generator(&device, Budget::Percent(50.0), &[("lora_qv", "final")], Some(first));
    let answer = greedy_text(&mut talk, &PROMPT);
    let longer: Vec<i32> = PROMPT.iter().chain(&answer[..9]).chain(&[77, 78]).copied().collect();
    let mut runs = 0;
    let mut count = |e: Event| runs += u32::from(matches!(e, Event::RunStart { .. }));
    let (greedy, cancel) = (Sampling::default(), Cancel::new());
    let text = wait(talk.write(&longer, 16, &[], &greedy, &cancel, &mut count, &mut |_| true)).unwrap();
    assert_eq!(runs, 16, "two tokens are new: one run for them and one for each token but the last");
    let mut fresh = generator(&device, Budget::All, &[("lora_qv", "final")], Some(first));
    assert_eq!(greedy_text(&mut fresh, &longer), text);
    // What was cancelled is not taken for read.
    let stop = Cancel::new();
    stop.cancel();
    let refused = wait(talk.write(&PROMPT, 16, &[], &greedy, &stop, &mut NoEvents, &mut |_| true));
    assert_eq!(refused.unwrap_err().code(), "cancelled");
    assert_eq!(greedy_text(&mut talk, &longer), text);
}

#[test]
fn a_first_adapter_changes_nothing_and_its_numbers_do_not_depend_on_the_other_targets() {
    let model = model("llama_tied", "f32");
    let spec =
        |targets: &str, blocks| LoraSpec { targets: Targets::parse(targets).unwrap(), blocks, ..LoraSpec::default() };
    let all = Adapter::new(&model, spec("all-linear", None)).unwrap();
    assert_eq!((all.sites().len(), all.trainable()), (4 * 7, 35_840));
    let some = Adapter::new(&model, spec("v_proj,mlp.up_proj", Some(2..4))).unwrap();
    assert_eq!(some.sites().len(), 4);
    let (of_all, of_some) = (all.initial(7), some.initial(7));
    for (p, v) in some.params().iter().zip(&of_some) {
        let at = all.params().iter().position(|q| q.name == p.name).unwrap();
        assert_eq!(&of_all[at], v, "{}", p.name);
        if p.name.ends_with("lora_B.weight") {
            assert!(v.iter().all(|x| *x == 0.0));
        } else {
            let bound = 1.0 / (p.shape.dims()[1] as f32).sqrt();
            let square = v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32;
            assert!(largest(v) <= bound && largest(v) > 0.9 * bound, "{}", p.name);
            assert!((square - bound * bound / 3.0).abs() < 0.2 * bound * bound / 3.0, "{}: not uniform", p.name);
        }
    }
    assert_ne!(all.initial(8), of_all);
}

#[test]
fn targets_that_nothing_answers_to_and_layers_that_are_not_there_are_refused() {
    let model = model("llama_tied", "f32");
    let refused = |targets: &str, blocks| {
        let spec = LoraSpec { targets: Targets::parse(targets).unwrap(), blocks, ..LoraSpec::default() };
        Adapter::new(&model, spec).unwrap_err().to_string()
    };
    assert!(refused("q_proj,c_attn", None).contains("`c_attn`"));
    assert!(refused("proj", None).contains("`proj`"), "part of a name is no name");
    assert!(refused("lm_head", None).contains("pieces"));
    assert!(refused("q_proj", Some(2..5)).contains('4'));
    assert!(Targets::parse(" , ").is_err());
}

#[test]
fn fields_that_change_the_result_are_refused_by_name() {
    let model = model("llama_tied", "f32");
    let folder = refs::path("llama_tied").join("lora_qv/final");
    let text = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let weights = wait(ebbtide::Catalog::open(folder.join("adapter_model.safetensors"))).unwrap();
    let read = |field: &str, value: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[field] = value;
        wait(Adapter::read("adapter_config.json", &config.to_string(), &weights, &model))
    };
    for (field, value) in [
        ("use_dora", serde_json::json!(true)),
        ("rank_pattern", serde_json::json!({ "q_proj": 4 })),
        ("alpha_pattern", serde_json::json!({ "q_proj": 4 })),
        ("modules_to_save", serde_json::json!(["lm_head"])),
        ("bias", serde_json::json!("all")),
        ("lora_bias", serde_json::json!(true)),
        ("layer_replication", serde_json::json!([[0, 2]])),
        ("exclude_modules", serde_json::json!(["v_proj"])),
        ("peft_type", serde_json::json!("IA3")),
        ("task_type", serde_json::json!("SEQ_CLS")),
        ("init_lora_weights", serde_json::json!("pissa")),
        ("target_modules", serde_json::json!(".*q_proj")),
        ("something_new", serde_json::json!(3)),
        ("r", serde_json::json!("8")),
    ] {
        let error = read(field, value).unwrap_err();
        assert!(error.to_string().contains(field), "{field}: {error}");
    }
    assert!(read("use_rslora", true.into()).unwrap().0.spec().scale() > 5.6);
    // An adapter for fewer layers leaves tensors over: whose they are nobody says.
    let error = read("layers_to_transform", serde_json::json!([0, 1])).unwrap_err();
    assert!(error.to_string().contains("layers.2"), "{error}");
    assert!(read("r", 4.into()).unwrap_err().to_string().contains("lora_A"));
}

#[test]
fn dropout_is_the_same_at_every_budget_and_differs_from_step_to_step_only() {
    let device = device();
    let model = model("qwen2", "f32");
    let ids = Tensors::read(refs::path("qwen2").join("ref_f32.safetensors")).ints("input_ids");
    let (_, values) = open("qwen2", "lora_all", "nonzero", &model);
    let spec = LoraSpec { dropout: 0.25, seed: 3, targets: Targets::AllLinear, ..LoraSpec::default() };
    let adapter = Adapter::new(&model, spec).unwrap();
    let program = [train(&model, &adapter, BATCH, &adamw(), Part::First).unwrap()];
    let run = |budget: Budget, step: u32| {
        let mut session = refs::session(&device, &model, &program, budget);
        wait(adapter.install(&mut session, &values)).unwrap();
        let mut batch = refs::mean_batch(&model, BATCH, &ids, &shifted(&ids, 32));
        batch.dropout(&[11, 12], step);
        let loss = refs::run(&mut session, 0, &batch).f32("loss").unwrap();
        (loss, wait(adapter.read_arrays(&mut session, |i| format!("gradients.{i}"))).unwrap())
    };
    let first = run(Budget::All, 1);
    assert!(first == run(Budget::Floor, 1), "recomputation drew another mask");
    assert!(first.0 != run(Budget::All, 2).0);
    assert!(decode(&model, Some(&adapter), 16).is_ok(), "generation asks for no row ids");
}
