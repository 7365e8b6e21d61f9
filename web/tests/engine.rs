//! The engine in a worker, over the page's protocol: it trains within its budget, holds, stops, survives a lost device, and
//! what it writes is what the native engine writes.
#![cfg(target_arch = "wasm32")]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

mod page;

use page::{Page, tide_log, tiny_model};
use serde_json::{Value, json};
use wasm_bindgen_test::{console_log, wasm_bindgen_test, wasm_bindgen_test_configure};

wasm_bindgen_test_configure!(run_in_dedicated_worker);

fn train(budget: &str, steps: u64) -> Value {
    json!({ "command": "train", "run": { "budget": budget, "steps": steps, "save_every": 2, "batch_size": 1 } })
}

#[wasm_bindgen_test]
async fn training_keeps_its_budget_and_has_the_same_bits_at_every_one() {
    let mut page = Page::with_tide_log().await;
    let mut all = Vec::new();
    for budget in ["all", "33%", "floor"] {
        let ended = page.ask(train(budget, 3), &[]).await;
        let reply = ended.reply();
        let forecast = &ended.said("forecast").next().unwrap()["forecast"];
        console_log!(
            "{budget}: {:?}, peak {}, budget {}",
            ended.losses(),
            reply["peak_bytes"],
            forecast["budget_bytes"]
        );
        assert_eq!(reply["peak_bytes"], forecast["peak_bytes"], "measured is forecast");
        assert_eq!(reply["peak_by_category"], forecast["peak_by_category"]);
        assert!(reply["peak_bytes"].as_u64().unwrap() <= forecast["budget_bytes"].as_u64().unwrap());
        let adapter = page.ask(json!({ "command": "export-adapter" }), &[]).await;
        assert_eq!(adapter.files.len(), 2);
        all.push((ended.losses(), adapter.files));
    }
    assert!(all.iter().all(|run| *run == all[0]), "the bits differ among budgets");
    let memory = page.ask(json!({ "command": "memory" }), &[]).await;
    assert_eq!(memory.reply()["allocated"], json!({}), "nothing is left on the device");
}

#[wasm_bindgen_test]
async fn a_run_holds_goes_on_and_stops_with_what_it_reached() {
    let mut page = Page::with_tide_log().await;
    let id = page.post(&train("50%", 50), &[]);
    page.says(id, "step", 1).await;
    page.ask(json!({ "command": "pause" }), &[]).await.reply();
    page.says(id, "paused", 1).await;
    // The forecast of other settings does not wait for the run.
    page.ask(json!({ "command": "plan", "run": { "budget": "floor" } }), &[]).await.reply();
    page.ask(json!({ "command": "resume" }), &[]).await.reply();
    page.says(id, "paused", 2).await;
    page.says(id, "step", 3).await;
    page.ask(json!({ "command": "stop" }), &[]).await.reply();
    let ended = page.ended(id).await;
    let reply = ended.reply();
    assert_eq!(reply["stopped"], true);
    assert_eq!(reply["steps"], ended.losses().len() as u64);
    // It goes on from there, with the same settings.
    let more = json!({ "command": "train", "run": { "budget": "50%", "steps": 1, "save_every": 2, "batch_size": 1, "resume": true } });
    let more = page.ask(more, &[]).await;
    assert_eq!(more.reply()["steps"], reply["steps"].as_u64().unwrap() + 1);
}

#[wasm_bindgen_test]
async fn a_lost_device_is_opened_again_and_the_run_ends_with_the_bits_of_an_undisturbed_one() {
    let mut page = Page::with_tide_log().await;
    let undisturbed = page.ask(train("50%", 5), &[]).await;
    undisturbed.reply();
    let want = page.ask(json!({ "command": "export-adapter" }), &[]).await.files;
    let id = page.post(&train("50%", 5), &[]);
    page.says(id, "step", 3).await;
    page.ask(json!({ "command": "lose-device" }), &[]).await.reply();
    let ended = page.ended(id).await;
    assert_eq!(ended.reply()["steps"], 5);
    assert_eq!(ended.said("rebuilt").next().unwrap()["step"], 2);
    assert_eq!(ended.losses().last(), undisturbed.losses().last());
    assert!(page.ask(json!({ "command": "export-adapter" }), &[]).await.files == want, "the adapter differs");
}

#[wasm_bindgen_test]
async fn what_the_page_gets_wrong_is_an_error_with_code_and_fields() {
    let mut page = Page::new();
    let error = |ended: page::Ended| ended.result.unwrap_err();
    assert_eq!(error(page.ask(json!({ "command": "train" }), &[]).await)["code"], "not-found");
    assert_eq!(error(page.ask(json!({ "command": "fly" }), &[]).await)["code"], "invalid");
    let mut broken = tiny_model();
    broken[4] = page::file("model.safetensors", &[0xff; 100]);
    let open = json!({ "command": "open", "model": { "from": "files" } });
    let format = error(page.ask(open.clone(), &broken).await);
    assert_eq!((&format["code"], &format["fields"]["file"]), (&json!("format"), &json!("model.safetensors")));
    page.ask(open, &tiny_model()).await.reply();
    page.ask(json!({ "command": "data", "data": { "from": "files" } }), &tide_log()).await.reply();
    let plan = error(page.ask(json!({ "command": "plan", "run": { "budget": "1000" } }), &[]).await);
    assert_eq!((&plan["code"], &plan["fields"]["asked"]), (&json!("budget-below-floor"), &json!(1000)));
    assert!(plan["fields"]["floor"].as_u64().unwrap() > 1000);
}

#[wasm_bindgen_test]
async fn a_kept_session_opens_with_its_data_and_goes_on() {
    let mut page = Page::with_tide_log().await;
    // A copy of the model in the browser's own file system, so that the session can be opened by itself.
    let copy = page.ask(json!({ "command": "copy" }), &[]).await;
    assert_eq!(copy.reply()["model"]["weight_bytes"], 5_116_800);
    assert!(copy.said("copied").count() > 5);
    let first = page.ask(train("50%", 2), &[]).await;
    first.reply();
    let adapter = page.ask(json!({ "command": "export-adapter" }), &[]).await.files;
    page.ask(json!({ "command": "save-session", "name": "a test" }), &[]).await.reply();
    drop(page);
    let mut page = Page::new();
    let sessions = page.ask(json!({ "command": "sessions" }), &[]).await;
    assert_eq!(sessions.reply()["sessions"][0]["name"], "a test");
    let opened = page.ask(json!({ "command": "open-session", "name": "a test" }), &[]).await;
    assert_eq!(opened.reply()["session"]["steps"], 2);
    assert_eq!(opened.reply()["losses"].as_array().unwrap().len(), 2);
    assert!(page.ask(json!({ "command": "export-adapter" }), &[]).await.files == adapter);
    let more = json!({ "command": "train", "run": { "budget": "floor", "steps": 1, "save_every": 2, "batch_size": 1, "resume": true } });
    assert_eq!(page.ask(more, &[]).await.reply()["steps"], 3);
    let left = page.ask(json!({ "command": "delete-session", "name": "a test" }), &[]).await;
    assert_eq!(left.reply()["sessions"], json!([]));
    let name = opened.reply()["model"]["name"].clone();
    let open = page.ask(json!({ "command": "delete-model", "name": name }), &[]).await;
    assert_eq!(open.result.unwrap_err()["code"], "invalid", "an open model is not deleted");
    page.ask(json!({ "command": "open", "model": { "from": "files" } }), &tiny_model()).await.reply();
    let kept = page.ask(json!({ "command": "kept-models" }), &[]).await;
    assert!(kept.reply()["models"].as_array().unwrap().iter().any(|m| m["name"] == name));
    let kept = page.ask(json!({ "command": "delete-model", "name": name }), &[]).await;
    assert!(kept.reply()["models"].as_array().unwrap().iter().all(|m| m["name"] != name));
}

#[wasm_bindgen_test]
async fn the_first_founding_program_runs_in_the_page_at_its_floor_to_the_bits_of_the_resident_one() {
    let mut page = Page::new();
    let mut sums = Vec::new();
    for (budget, manual, lines, loads) in [("all", false, 4, 2), ("floor", false, 78, 39), ("floor", true, 80, 40)] {
        let probe = json!({ "program": "stream", "budget": budget, "rounds": 10, "manual": manual });
        let ended = page.ask(json!({ "command": "probe", "probe": probe }), &[]).await;
        let reply = ended.reply();
        assert_eq!(reply["trace"].as_array().unwrap().len(), lines, "{:?}", reply["trace"]);
        assert_eq!(reply["figures"]["loads"], loads);
        assert_eq!(reply["figures"]["peak_bytes"], reply["figures"]["planned_peak_bytes"]);
        sums.push(reply["grad_sha256"].clone());
    }
    assert!(sums.iter().all(|s| *s == sums[0]));
}
