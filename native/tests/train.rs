//! `ebbtide train` and `plan` from outside: killed, interrupted, resumed, refused, and held to their forecast.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod place;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use ebbtide::Catalog;
use place::{Place, json, text};
use serde_json::Value;

/// A folder with a small Llama of the references and its tokenizer, and some of the tide log.
struct Ground {
    place: Place,
    model: PathBuf,
    data: PathBuf,
}

impl Ground {
    fn new() -> Ground {
        let place = Place::new();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let model = place.0.path().join("model");
        std::fs::create_dir(&model).unwrap();
        for (from, name) in [
            ("refs/llama_tied/f32", "config.json"),
            ("refs/llama_tied/f32", "model.safetensors"),
            ("tokenizers/tiny512", "tokenizer.json"),
            ("tokenizers/tiny512", "tokenizer_config.json"),
        ] {
            std::fs::copy(fixtures.join(from).join(name), model.join(name)).unwrap();
        }
        let data = place.0.path().join("data");
        std::fs::create_dir(&data).unwrap();
        for (file, rows) in [("train.jsonl", 24), ("valid.jsonl", 4)] {
            let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tide-log").join(file);
            let all = std::fs::read_to_string(all).unwrap();
            let some: Vec<&str> = all.lines().take(rows).collect();
            std::fs::write(data.join(file), some.join("\n")).unwrap();
        }
        Ground { place, model, data }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.0.path().join(name)
    }

    fn args<'a>(&'a self, command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let mut args = vec![command, "--model", text(&self.model), "--data", text(&self.data)];
        if !more.contains(&"--max-seq-length") {
            args.extend(["--max-seq-length", "64"]);
        }
        args.extend(more);
        args
    }

    fn train(&self, more: &[&str]) -> Output {
        let out = self.place.run(&self.args("train", &[&["--json"], more].concat()));
        assert_eq!(out.status.code(), Some(0), "{more:?}: {}", String::from_utf8_lossy(&out.stderr));
        out
    }

    /// A training that writes events, to be ended by the test.
    fn start(&self, more: &[&str]) -> (Child, impl Iterator<Item = Value> + use<>) {
        let args = self.args("train", &[&["--json"], more].concat());
        let mut child = self.place.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()))
    }

    fn refused(&self, args: &[&str], status: i32, code: &str, word: &str) {
        let out = self.place.command(&self.args("train", args)).arg("--json").output().unwrap();
        let v = json(&out);
        let message = v["error"]["message"].as_str().unwrap();
        assert_eq!((out.status.code(), &v["error"]["code"]), (Some(status), &Value::from(code)), "{args:?}: {message}");
        assert!(message.contains(word), "{args:?}: {message}");
    }

    fn adapter(&self, folder: &str) -> Vec<u8> {
        std::fs::read(self.path(folder).join("adapter_model.safetensors")).unwrap()
    }
}

fn events(out: &Output, name: &str) -> Vec<Value> {
    let lines = std::str::from_utf8(&out.stdout).unwrap().lines();
    let all = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|v| v["event"] == name).collect()
}

fn numbers(events: &[Value], field: &str) -> Vec<f64> {
    events.iter().map(|v| v[field].as_f64().unwrap_or(f64::NAN)).collect()
}

/// Everything that makes a resumption hard: dropout, warm-up and decay, accumulation, shuffled rows, two lengths of them.
const HARD: [&str; 20] = [
    "--iters",
    "8",
    "--batch-size",
    "1",
    "--grad-accumulation-steps",
    "2",
    "--lora-dropout",
    "0.1",
    "--warmup",
    "3",
    "--lr-schedule",
    "cosine",
    "--learning-rate",
    "1e-2",
    "--weight-decay",
    "0.1",
    "--steps-per-eval",
    "0",
    "--save-every",
    "1",
];

#[test]
fn a_training_learns_keeps_its_forecast_and_tells_every_step_in_json() {
    let ground = Ground::new();
    let flags = [
        "--iters",
        "6",
        "--learning-rate",
        "1e-2",
        "--budget",
        "50%",
        "--sample-prompt",
        "Day 7.",
        "--sample-tokens",
        "4",
        "--steps-per-eval",
        "3",
    ];
    let out = ground.train(&[&flags[..], &["--adapter-path", "a", "--report", "page"]].concat());
    let steps = events(&out, "step");
    assert_eq!(numbers(&steps, "step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    for field in ["loss", "tokens_per_second", "streamed_bytes", "loads", "witness_bytes"] {
        assert!(numbers(&steps, field).iter().all(|x| *x > 0.0), "{field}: {steps:?}");
    }
    let plan = &events(&out, "plan")[0];
    assert_eq!(plan["format"], 1);
    for step in &steps {
        // Equal, not merely below.
        assert_eq!((&step["peak_bytes"], &step["planned_peak_bytes"]), (&plan["peak_bytes"], &plan["peak_bytes"]));
    }
    assert!(plan["peak_bytes"].as_u64() <= plan["budget_bytes"].as_u64());
    let parts: u64 = plan["peak_by_category"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
    assert_eq!(Some(parts), plan["peak_bytes"].as_u64());
    let losses = numbers(&events(&out, "eval"), "loss");
    assert!(losses.len() == 3 && losses[2] < losses[0], "{losses:?}");
    assert_eq!(events(&out, "sample").len(), 3);
    // What `plan` says of these flags is what `train` kept.
    let forecast = json(&ground.place.run(&ground.args("plan", &[&flags[..], &["--json"]].concat())));
    for field in ["floor_bytes", "peak_bytes", "peak_by_category", "weight_bytes", "resident_weights", "bytes_per_step"]
    {
        assert_eq!(forecast[field], plan[field], "{field}");
    }
    assert!(forecast["floor_set_by"].is_string() && forecast["loads_per_step"].as_u64() > Some(0));
    assert_eq!(forecast["seconds_estimated"], false, "the training was measured: {forecast}");
    // The page holds its charts and fetches nothing.
    let page = std::fs::read_to_string(ground.path("page/report.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 3);
    assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("href="));
    for word in ["budget", "allocated", "weights", "activations", "block.00", "validation"] {
        assert!(page.contains(word), "{word}");
    }
}

#[test]
fn a_training_killed_interrupted_and_resumed_ends_with_the_adapter_of_the_uninterrupted_one() {
    let ground = Ground::new();
    let run = |more: &[&str]| ground.train(&[&HARD[..], more].concat());
    let whole = run(&["--adapter-path", "whole", "--budget", "all"]);
    let want = ground.adapter("whole");

    // Killed at a step that differs from run to run, and resumed at another budget.
    let after = 2 + u64::from(std::process::id()) % 5;
    let (mut child, events_of) = ground.start(&[&HARD[..], &["--adapter-path", "killed", "--budget", "50%"]].concat());
    for event in events_of {
        if event["event"] == "saved" && event["step"].as_u64() == Some(after) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let rest = run(&["--adapter-path", "killed", "--resume", "killed", "--budget", "floor"]);
    let resumed = events(&rest, "resumed")[0]["step"].as_u64().unwrap();
    assert!(resumed >= after, "killed after step {after}, resumed after {resumed}");
    assert!(ground.adapter("killed") == want, "killed after step {after}: another adapter");
    let losses = numbers(&events(&whole, "step"), "loss");
    assert_eq!(numbers(&events(&rest, "step"), "loss"), losses[resumed as usize..]);

    // The weights alone, without the optimizer, end elsewhere: the comparison can fail.
    let cold = ["--adapter-path", "cold", "--resume-adapter-file", "stopped"];
    let stopped = ground.place.command(&ground.args("train", &[&HARD[..], &["--adapter-path", "stopped"]].concat()));
    interrupt(stopped, 4);
    let again = ground.place.command(&ground.args("train", &[&HARD[..], &cold].concat())).output().unwrap();
    assert_eq!(again.status.code(), Some(0), "{}", String::from_utf8_lossy(&again.stderr));
    assert!(ground.adapter("cold") != want);
    run(&["--adapter-path", "stopped", "--resume", "stopped/checkpoint.safetensors"]);
    assert!(ground.adapter("stopped") == want, "interrupted: another adapter");
}

/// Runs a training until this step and interrupts it as Ctrl-C does: it must save, say how to go on, and end with 130.
fn interrupt(mut command: std::process::Command, step: u64) {
    let mut child = command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let at = lines.by_ref().map(|l| serde_json::from_str::<Value>(&l.unwrap()).unwrap());
    let mut at = at.filter(|v| v["event"] == "step" && v["step"].as_u64() == Some(step));
    assert!(at.next().is_some(), "it ended before step {step}");
    drop(at);
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let rest: Vec<Value> = lines.map(|l| serde_json::from_str(&l.unwrap()).unwrap()).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    let saved = rest.iter().rfind(|v| v["event"] == "saved").expect("it saved");
    assert!(saved["step"].as_u64() >= Some(step));
    let how = rest.iter().find(|v| v["event"] == "note").and_then(|v| v["text"].as_str()).unwrap_or_default();
    assert!(how.contains("ebbtide train") && how.contains("--resume"), "{rest:?}");
    assert_eq!(rest.last().unwrap()["error"]["code"], "cancelled");
}

#[test]
fn a_save_that_is_killed_leaves_each_file_whole_old_or_new() {
    let ground = Ground::new();
    let small =
        ["--iters", "2", "--batch-size", "1", "--steps-per-eval", "0", "--save-every", "1", "--adapter-path", "a"];
    ground.train(&small);
    let long =
        ["--iters", "400", "--batch-size", "1", "--save-every", "1", "--steps-per-eval", "0", "--lora-rank", "8"];
    let mut last = 2;
    for round in 0..if std::env::var_os("EBBTIDE_LONG").is_some() { 20 } else { 4 } {
        // Over the very files that it resumes from.
        let resume = ["--adapter-path", "a", "--resume", "a"];
        let (mut child, mut events_of) = ground.start(&[&long[..], &resume].concat());
        assert!(events_of.any(|e| e["event"] == "saved"));
        let moment = (u64::from(std::process::id()) * 7919 + round * 104_729) % 300;
        std::thread::sleep(std::time::Duration::from_millis(moment));
        child.kill().unwrap();
        child.wait().unwrap();
        for (file, floats) in [("adapter_model.safetensors", 1), ("checkpoint.safetensors", 3)] {
            let catalog = pollster::block_on(Catalog::open(ground.path("a").join(file))).unwrap();
            let bytes: u64 = catalog.weights().iter().map(|w| w.bytes()).sum();
            // q_proj and v_proj of four blocks, rank 8.
            assert_eq!(bytes, floats * 4 * 4 * (8 * (64 + 64) + 8 * (64 + 32)), "{file} in round {round}");
        }
        let catalog = pollster::block_on(Catalog::open(ground.path("a/checkpoint.safetensors"))).unwrap();
        let step: u64 = catalog.files()[0].header.metadata["step"].parse().unwrap();
        assert!(step > last, "round {round}: {step} after {last}");
        last = step;
    }
    let values = pollster::block_on(Catalog::open(ground.path("a/adapter_model.safetensors"))).unwrap();
    for weight in values.weights() {
        let bytes = pollster::block_on(values.read(values.find(weight.name()).unwrap())).unwrap();
        let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(values.iter().all(|x| x.abs() < 10.0) && values.iter().any(|x| *x != 0.0), "{}", weight.name());
    }
}

#[test]
fn a_checkpoint_of_other_rows_batches_adapter_or_base_is_refused_by_its_flag() {
    let ground = Ground::new();
    let base =
        ["--iters", "1", "--batch-size", "2", "--steps-per-eval", "0", "--budget", "floor", "--adapter-path", "a"];
    ground.train(&base);
    // Saved with most layers evicted: every tensor of the adapter, in its shape.
    let catalog = pollster::block_on(Catalog::open(ground.path("a/adapter_model.safetensors"))).unwrap();
    let shapes: Vec<(&str, &[u64])> = catalog.weights().iter().map(|w| (w.name(), w.shape.as_slice())).collect();
    assert_eq!(shapes.len(), 16);
    for (name, shape) in shapes {
        let out = if name.contains("q_proj") { 64 } else { 32 };
        assert_eq!(shape, if name.contains("lora_A") { [8, 64] } else { [out, 8] }, "{name}");
    }
    let go_on = ["--iters", "2", "--adapter-path", "b", "--resume", "a"];
    let refused = |more: &[&str], word: &str, code: &str| {
        let args = [&go_on[..], more].concat();
        ground.refused(&args, 2, code, word);
    };
    refused(&["--batch-size", "1"], "--batch-size", "invalid");
    refused(&["--batch-size", "2", "--grad-accumulation-steps", "2"], "--grad-accumulation-steps", "invalid");
    refused(&["--batch-size", "2", "--max-seq-length", "32"], "--data", "invalid");
    refused(&["--batch-size", "2", "--no-shuffle"], "--no-shuffle", "invalid");
    refused(&["--batch-size", "2", "--lora-rank", "4"], "another adapter", "format");
    let done = ["--iters", "1", "--adapter-path", "b", "--resume", "a", "--batch-size", "2"];
    ground.refused(&done, 2, "invalid", "--iters");
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/refs/llama_untied/f32");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(other.join(file), ground.model.join(file)).unwrap();
    }
    refused(&["--batch-size", "2"], "another base", "format");
    assert!(!ground.path("b").exists());
}

#[test]
fn what_cannot_be_is_refused_before_any_gpu_work() {
    let ground = Ground::new();
    // A GPU that is not there would be an error of its own, with status 4.
    let refused = |more: &[&str], status, code, word: &str| {
        let args = [&["--device", "no such adapter", "--iters", "2"], more].concat();
        ground.refused(&args, status, code, word);
    };
    let floor = json(&ground.place.run(&ground.args("plan", &["--budget", "floor", "--json"])));
    let below = (floor["floor_bytes"].as_u64().unwrap() - 1).to_string();
    refused(&["--budget", &below], 3, "budget-below-floor", floor["floor_bytes"].to_string().as_str());
    refused(&["--learning-rate", "nan"], 2, "invalid", "--learning-rate");
    refused(&["--lr-schedule", "step"], 2, "invalid", "--lr-schedule");
    refused(&["--warmup", "3"], 2, "invalid", "--warmup");
    refused(&["--layers", "2..9"], 2, "invalid", "--layers");
    refused(&["--num-layers", "9"], 2, "invalid", "--num-layers");
    refused(&["--lora-targets", "lm_head"], 2, "invalid", "lm_head");
    refused(&["--max-seq-length", "1"], 2, "invalid", "--max-seq-length");
    refused(&["--batch-size", "0"], 2, "invalid", "--batch-size");
    refused(&["--mask-prompt"], 2, "format", "train.jsonl:1");
    refused(&["--adapter-path", text(&ground.model)], 2, "invalid", "--adapter-path");
    refused(&["--resume", "nowhere"], 2, "io", "nowhere");
    refused(&["--sample-prompt", "x", "--sample-tokens", "4000"], 2, "invalid", "--sample-prompt");
    std::fs::create_dir(ground.path("there")).unwrap();
    std::fs::write(ground.path("there/adapter_config.json"), "{}").unwrap();
    refused(&["--adapter-path", "there"], 2, "invalid", "--overwrite");
    // And without anything wrong it is the GPU.
    refused(&[], 4, "no-adapter", "no such adapter");
}

#[test]
fn a_plan_is_a_table_or_one_line_and_says_when_its_time_is_a_guess() {
    let ground = Ground::new();
    let out = ground.place.run(&["plan", "--model", text(&ground.model), "--batch-size", "2", "--json"]);
    assert_eq!(out.status.code(), Some(0));
    let lines: Vec<Value> =
        std::str::from_utf8(&out.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        lines.iter().map(|l| l["budget"].as_str().unwrap()).collect::<Vec<_>>(),
        ["floor", "25%", "50%", "75%", "all"]
    );
    // There is one floor, and one thing that sets it.
    assert!(lines.iter().all(|l| ["floor_bytes", "floor_set_by"].iter().all(|f| l[*f] == lines[0][*f])), "{lines:?}");
    let reads = numbers(&lines, "bytes_per_step");
    assert!(reads.windows(2).all(|w| w[0] >= w[1]) && reads[4] == 0.0, "{reads:?}");
    assert!(lines.iter().all(|l| l["seconds_estimated"] == true && l["seconds_per_step"].as_f64() > Some(0.0)));
    let table = ground.place.run(&ground.args("plan", &[]));
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("time/step") && table.contains("guess") && table.contains("set by"), "{table}");
}

/// A Llama-like model of zeros: the file has holes, so it takes no disk, and every byte is read all the same.
#[cfg(target_os = "linux")]
fn sparse_model(folder: &Path, blocks: u64, hidden: u64) -> u64 {
    let mut tensors: Vec<(String, Vec<u64>)> = vec![("model.embed_tokens.weight".into(), vec![512, hidden])];
    for l in 0..blocks {
        let mut add =
            |name: &str, shape: &[u64]| tensors.push((format!("model.layers.{l}.{name}.weight"), shape.to_vec()));
        for name in ["q", "k", "v", "o"] {
            add(&format!("self_attn.{name}_proj"), &[hidden, hidden]);
        }
        add("mlp.gate_proj", &[4 * hidden, hidden]);
        add("mlp.up_proj", &[4 * hidden, hidden]);
        add("mlp.down_proj", &[hidden, 4 * hidden]);
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
    }
    tensors.push(("model.norm.weight".into(), vec![hidden]));
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let end = at + 4 * shape.iter().product::<u64>();
        header.insert(name, serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend(header.bytes());
    let file = folder.join("model.safetensors");
    std::fs::write(&file, &start).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(start.len() as u64 + at).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks,
        "num_attention_heads": 8, "intermediate_size": 4 * hidden, "vocab_size": 512, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    at
}

#[test]
#[cfg(target_os = "linux")]
fn with_the_forecast_and_200_mib_a_model_of_four_times_the_limit_is_trained() {
    let ground = Ground::new();
    let weights = sparse_model(&ground.model, 64, 512);
    let row = ground.place.write("row.jsonl", b"{\"text\": \"abc\"}");
    let shape = ["--batch-size", "1", "--max-seq-length", "4", "--iters", "1", "--budget", "floor"];
    let flags = [&["--model", text(&ground.model), "--train-data", text(&row)], &shape[..]].concat();
    let plan = json(&ground.place.run(&[&["plan", "--json"], &flags[..]].concat()));
    let limit = plan["peak_bytes"].as_u64().unwrap() + (200 << 20);
    assert!(weights >= 4 * limit, "{weights} bytes of weights, a limit of {limit}");
    // The limit is on all private memory that can be written: heaps, stacks, mappings, and a software adapter's buffers.
    let script = format!("ulimit -d {} && exec \"$@\"", limit >> 10);
    let train = ground.place.command(&[&["train", "--json"], &flags[..]].concat());
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", &script, "sh"]).arg(train.get_program()).args(train.get_args());
    limited.current_dir(ground.place.0.path()).env("EBBTIDE_CACHE", ground.path("cache"));
    let out = limited.output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let step = &events(&out, "step")[0];
    assert_eq!(step["peak_bytes"], plan["peak_bytes"]);
    assert_eq!(step["streamed_bytes"], plan["bytes_per_step"]);
    assert!(step["witness_bytes"].as_u64().unwrap() <= limit);
}

#[test]
fn the_demo_trains_and_leaves_an_adapter_a_report_and_a_command_that_can_be_repeated() {
    let place = Place::new();
    let out = place.run(&["demo", "--iters", "1", "--out", "shown"]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&out.stderr));
    for word in ["Before training", "After training", "exactly as forecast", "held at a time", "adapter", "report"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    for file in ["adapter/adapter_config.json", "adapter/checkpoint.safetensors", "report.html", "model/config.json"] {
        assert!(place.0.path().join("shown").join(file).is_file(), "{file}");
    }
    let command = said.lines().find_map(|l| l.trim().strip_prefix("ebbtide train ")).unwrap();
    assert!(command.contains("--budget 25%"), "{command}");
}

#[test]
#[ignore = "takes a minute; the long suite runs it"]
fn the_whole_demo_learns_the_log() {
    let place = Place::new();
    let out = place.run(&["demo"]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let said = String::from_utf8(out.stdout).unwrap();
    let losses: Vec<f64> =
        said.lines().filter_map(|l| l.split("validation loss ").nth(1)?.split(' ').next()?.parse().ok()).collect();
    assert!(losses.len() == 2 && losses[1] < losses[0] - 1.5, "{losses:?}");
}
