//! The command line from outside: exit statuses, JSON, and nothing left behind.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod place;

use place::{Place, json, text};
use serde_json::Value;

/// A safetensors file of zeros.
fn zeros(tensors: &[(&str, &str, &[u64])]) -> Vec<u8> {
    let (mut entries, mut at) = (Vec::new(), 0u64);
    for (name, dtype, shape) in tensors {
        let size = shape.iter().product::<u64>() * if *dtype == "F32" { 4 } else { 2 };
        entries
            .push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{}]}}"#, at + size));
        at += size;
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.bytes());
    out.resize(out.len() + at as usize, 0);
    out
}

#[test]
fn the_json_object_has_every_field_and_the_figures_agree() {
    let place = Place::new();
    let out = place.run(&["probe", "stream", "--budget", "floor", "--manual", "--json"]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let v = json(&out);
    let fields = [
        "trace",
        "loss",
        "finite",
        "grad_sha256",
        "peak_bytes",
        "planned_peak_bytes",
        "peak_by_category",
        "floor_bytes",
        "loads",
        "evictions",
        "streamed_bytes",
        "adapter",
        "witness",
    ];
    for field in fields {
        assert!(!v[field].is_null(), "{field}");
    }
    for field in ["what", "baseline_bytes", "peak_bytes"] {
        assert!(v["witness"].get(field).is_some(), "witness.{field}");
    }
    assert_eq!(v["trace"].as_array().unwrap().len(), 80);
    assert_eq!(v["trace"][0], "forward_load(down.safetensors)");
    assert_eq!((v["loads"].as_u64(), v["evictions"].as_u64()), (Some(40), Some(40)));
    assert_eq!(v["peak_bytes"], v["planned_peak_bytes"]);
    assert!(v["peak_bytes"].as_u64().unwrap() <= 74_000);
    let sum: u64 = v["peak_by_category"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
    assert_eq!(Some(sum), v["peak_bytes"].as_u64());
    assert_eq!(v["grad_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(v["finite"], true);
}

#[test]
fn the_gradient_is_one_at_every_budget_and_way() {
    let place = Place::new();
    let digest = |args: &[&str]| {
        let out = place.run(&[&["probe", "stream", "--json"], args].concat());
        assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        json(&out)["grad_sha256"].as_str().unwrap().to_string()
    };
    let want = digest(&[]);
    for args in [
        &["--budget", "floor"] as &[&str],
        &["--budget", "floor", "--manual"],
        &["--budget", "floor", "--keep-free-0"],
        &["--budget", "50%"],
        &["--budget", "148000"],
        &["--budget", "auto"],
    ] {
        assert_eq!(digest(args), want, "{args:?}");
    }
}

#[test]
fn from_22_rounds_on_the_report_says_not_finite_and_exits_0() {
    let place = Place::new();
    let out = place.run(&["probe", "stream", "--rounds", "60", "--budget", "floor", "--json"]);
    assert_eq!(out.status.code(), Some(0));
    let v = json(&out);
    assert_eq!(v["finite"], false);
    assert!(v["loss"].is_null() && v.get("loss").is_some());
}

#[test]
fn a_budget_below_the_floor_exits_3_and_names_the_floor() {
    let place = Place::new();
    let floor = json(&place.run(&["probe", "stream", "--budget", "floor", "--json"]))["floor_bytes"].as_u64().unwrap();
    let out = place.run(&["probe", "stream", "--budget", &(floor - 1).to_string(), "--json"]);
    assert_eq!(out.status.code(), Some(3));
    let v = json(&out);
    assert_eq!(v["error"]["code"], "budget-below-floor");
    assert!(v["error"]["message"].as_str().unwrap().contains(&floor.to_string()));
    assert_eq!(place.run(&["probe", "stream", "--budget", &floor.to_string()]).status.code(), Some(0));
}

#[test]
fn bad_budgets_and_flags_exit_2() {
    let place = Place::new();
    for budget in ["", "-1", "many", "101%", "12 parsecs", "1.5", "99999999999999999999", "NaN%"] {
        let out = place.run(&["probe", "stream", "--json", &format!("--budget={budget}")]);
        assert_eq!(out.status.code(), Some(2), "budget `{budget}`");
        assert_eq!(json(&out)["error"]["code"], "invalid", "budget `{budget}`");
    }
    for args in
        [&["--rounds", "0"] as &[&str], &["--rounds", "x"], &["--down", "d"], &["--nonsense"], &["--rounds", "-3"]]
    {
        let out = place.run(&[&["probe", "stream"], args].concat());
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(out.stdout.is_empty() && !out.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn bad_files_and_shapes_exit_2_and_name_the_file() {
    let place = Place::new();
    let w = |n, m| -> [u64; 4] { [1, 1, n, m] };
    let down = place.write("down.safetensors", &zeros(&[("w", "F32", &w(48, 64)), ("b", "F32", &w(1, 64))]));
    let up = place.write("up.safetensors", &zeros(&[("w", "F32", &w(64, 48)), ("b", "F32", &w(1, 48))]));
    let good = place.run(&["probe", "stream", "--down", text(&down), "--up", text(&up), "--budget", "floor", "--json"]);
    assert_eq!(good.status.code(), Some(0), "{}", String::from_utf8_lossy(&good.stderr));
    assert_eq!(json(&good)["loss"], 0.0);

    let whole = std::fs::read(&up).unwrap();
    let cases: [(&str, Vec<u8>); 8] = [
        ("swapped.safetensors", zeros(&[("w", "F32", &w(48, 64)), ("b", "F32", &w(1, 48))])),
        ("halves.safetensors", zeros(&[("w", "BF16", &w(64, 48)), ("b", "BF16", &w(1, 48))])),
        ("nameless.safetensors", zeros(&[("v", "F32", &w(64, 48)), ("b", "F32", &w(1, 48))])),
        ("short.safetensors", whole[..whole.len() - 1].to_vec()),
        ("long.safetensors", [&whole[..], &[0]].concat()),
        ("empty.safetensors", vec![]),
        ("noise.safetensors", vec![0xff; 300]),
        ("none.safetensors", zeros(&[])),
    ];
    for (name, bytes) in cases {
        let bad = place.write(name, &bytes);
        let out = place.run(&["probe", "stream", "--down", text(&down), "--up", text(&bad), "--json"]);
        assert_eq!(out.status.code(), Some(2), "{name}: {}", String::from_utf8_lossy(&out.stdout));
        let v = json(&out);
        assert!(["format", "not-found"].contains(&v["error"]["code"].as_str().unwrap()), "{name}: {v}");
    }
    let gone = place.0.path().join("gone.safetensors");
    for args in [["--x", text(&gone)], ["--x", text(&up)]] {
        let out = place.run(&[&["probe", "stream", "--json"], &args[..]].concat());
        assert_eq!(out.status.code(), Some(2), "{args:?}");
    }
    let out = place.run(&["probe", "stream", "--json", "--down", text(&gone), "--up", text(&up)]);
    assert_eq!((out.status.code(), &json(&out)["error"]["code"]), (Some(2), &Value::from("io")));
    let out = place.run(&["probe", "stream", "--json", "--device", "no such adapter"]);
    assert_eq!((out.status.code(), &json(&out)["error"]["code"]), (Some(4), &Value::from("no-adapter")));
}

#[test]
fn the_result_file_is_safetensors_and_an_unwritable_place_leaves_nothing() {
    let place = Place::new();
    let result = place.0.path().join("result.safetensors");
    let out = place.run(&["probe", "stream", "--budget", "floor", "--json", "--out", text(&result)]);
    assert_eq!(out.status.code(), Some(0));
    let bytes = std::fs::read(&result).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    assert_eq!(header["grad_x"]["shape"], serde_json::json!([1, 3, 32, 48]));
    assert_eq!(header["loss"]["dtype"], "F32");
    let at: Vec<usize> = serde_json::from_value(header["loss"]["data_offsets"].clone()).unwrap();
    let loss = f32::from_le_bytes(bytes[8 + n + at[0]..8 + n + at[1]].try_into().unwrap());
    assert_eq!(json(&out)["loss"].as_f64().unwrap() as f32, loss);
    let nowhere = place.0.path().join("no/folder/result.safetensors");
    let out = place.run(&["probe", "stream", "--budget", "floor", "--json", "--out", text(&nowhere)]);
    assert_eq!((out.status.code(), &json(&out)["error"]["code"]), (Some(2), &Value::from("io")));
    let left: Vec<_> = std::fs::read_dir(place.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn an_output_never_overwrites_an_input() {
    let place = Place::new();
    let down = place.write("down.safetensors", &zeros(&[("w", "F32", &[1, 1, 48, 64]), ("b", "F32", &[1, 1, 1, 64])]));
    let up = place.write("up.safetensors", &zeros(&[("w", "F32", &[1, 1, 64, 48]), ("b", "F32", &[1, 1, 1, 48])]));
    let before = std::fs::read(&down).unwrap();
    let link = place.0.path().join("link.safetensors");
    std::fs::hard_link(&down, &link).unwrap();
    for out in [&down, &up, &link] {
        let args = ["probe", "stream", "--down", text(&down), "--up", text(&up), "--rounds", "1", "--json", "--out"];
        let run = place.run(&[&args[..], &[text(out)]].concat());
        assert_eq!((run.status.code(), &json(&run)["error"]["code"]), (Some(2), &Value::from("invalid")));
    }
    assert!(std::fs::read(&down).unwrap() == before, "the weights were overwritten");
}

#[test]
fn wrong_usage_with_json_is_one_object_and_exits_2() {
    let place = Place::new();
    for args in [
        &["probe", "stream", "--json", "--rounds", "0"][..],
        &["inspect", "--json"],
        &["probe", "stream", "--json", "--bogus"],
    ] {
        let run = place.run(args);
        assert_eq!((run.status.code(), &json(&run)["error"]["code"]), (Some(2), &Value::from("usage")), "{args:?}");
    }
    let run = place.run(&["probe", "stream", "--json", "--budget", "-5"]);
    assert_eq!((run.status.code(), &json(&run)["error"]["code"]), (Some(2), &Value::from("invalid")));
}
