//! Memory in the browser, seen from outside: the ledger against a count of the API's own buffers, chunks against the ring, the
//! heaps over many steps.
#![cfg(target_arch = "wasm32")]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

mod page;

use ebbtide::rt::pause;
use page::{Page, file, tide_log};
use serde_json::json;
use wasm_bindgen_test::{console_log, wasm_bindgen_test, wasm_bindgen_test_configure};

// The browser tells its heap's size to windows only.
wasm_bindgen_test_configure!(run_in_browser);

/// Wraps the API: bytes of buffers that exist, the most there were; the largest piece that was read from a file or written to a
/// buffer at once, and whether one of the latter lay in wasm memory.
const WITNESS: &str = "
    self.seen = { bytes: 0, peak: 0, buffers: 0, mapped: 0, largest: 0, wasm: 0 };
    const live = new WeakMap();
    const create = GPUDevice.prototype.createBuffer;
    GPUDevice.prototype.createBuffer = function (descriptor) {
      const buffer = create.call(this, descriptor);
      live.set(buffer, descriptor.size);
      seen.bytes += descriptor.size;
      seen.buffers += 1;
      seen.mapped += descriptor.mappedAtCreation ? 1 : 0;
      seen.peak = Math.max(seen.peak, seen.bytes);
      return buffer;
    };
    const destroy = GPUBuffer.prototype.destroy;
    GPUBuffer.prototype.destroy = function () {
      if (live.has(this)) {
        seen.bytes -= live.get(this);
        seen.buffers -= 1;
        live.delete(this);
      }
      return destroy.call(this);
    };
    const read = Blob.prototype.arrayBuffer;
    Blob.prototype.arrayBuffer = async function () {
      const bytes = await read.call(this);
      seen.largest = Math.max(seen.largest, bytes.byteLength);
      return bytes;
    };
    const write = GPUQueue.prototype.writeBuffer;
    GPUQueue.prototype.writeBuffer = function (buffer, offset, data, from, size) {
      seen.largest = Math.max(seen.largest, size ?? data.byteLength);
      if (data.buffer === self.wasmOfTheTest.buffer) seen.wasm += 1;
      return write.call(this, buffer, offset, data, from, size);
    };
";

/// Steps before the first look, and from it to the second: two hundred in the long suite.
const WARM: usize = 20;
const STEPS: usize = if option_env!("EBBTIDE_LONG").is_some() { 200 } else { 30 };

fn number(expression: &str) -> f64 {
    js_sys::eval(expression).unwrap().as_f64().unwrap_or_else(|| panic!("{expression} is no number"))
}

/// The heap after collection, where the browser lets tests collect and tells it exactly.
async fn heap() -> f64 {
    for _ in 0..3 {
        js_sys::eval("gc()").expect("web/webdriver.json has to expose gc");
        pause(20).await;
    }
    number("performance.memory.usedJSHeapSize")
}

#[wasm_bindgen_test]
async fn the_ledger_is_what_the_api_made_chunks_are_the_rings_and_the_heaps_stand_still_over_many_steps() {
    js_sys::Reflect::set(&js_sys::global(), &"wasmOfTheTest".into(), &wasm_bindgen::memory()).unwrap();
    js_sys::eval(&format!("(() => {{ {WITNESS} }})()")).unwrap();
    let mut page = Page::new();
    // A model of the references: two hundred steps of it take a minute on SwiftShader.
    let model = [
        file("config.json", include_bytes!("../../tests/fixtures/refs/llama_tied/f32/config.json")),
        file("model.safetensors", include_bytes!("../../tests/fixtures/refs/llama_tied/f32/model.safetensors")),
        file("tokenizer.json", &byte_tokenizer()),
    ];
    page.ask(json!({ "command": "open", "model": { "from": "files" } }), &model).await.reply();
    let data = json!({ "command": "data", "data": { "from": "files" }, "options": { "max_seq_length": 16 } });
    page.ask(data, &tide_log()).await.reply();
    js_sys::eval("seen.largest = 0").unwrap();
    let run = json!({ "budget": "floor", "steps": WARM + STEPS + 2, "batch_size": 1, "save_every": 10 });
    let id = page.post(&json!({ "command": "train", "run": run }), &[]);
    let memory = async |page: &mut Page| page.ask(json!({ "command": "memory" }), &[]).await.reply().clone();
    page.says(id, "forecast", 1).await;
    page.only_count();
    page.counts("step", WARM).await;
    let (before, heap_before) = (memory(&mut page).await, heap().await);
    assert_eq!(
        number("seen.bytes"),
        before["allocated"].as_object().unwrap().values().map(|v| v.as_f64().unwrap()).sum::<f64>()
    );
    assert_eq!(number("seen.buffers"), before["buffers"].as_f64().unwrap());
    page.counts("step", WARM + STEPS).await;
    let (after, heap_after) = (memory(&mut page).await, heap().await);
    assert_eq!(before["wasm_bytes"], after["wasm_bytes"], "wasm memory grew");
    assert_eq!(before["buffers_made"], after["buffers_made"], "a step made a buffer");
    console_log!("heap {heap_before} → {heap_after}, wasm {}", after["wasm_bytes"]);
    // What is left is noise of the browser's own: compilers, promises not yet collected.
    assert!(heap_after < heap_before + 400e3, "the heap grew from {heap_before} to {heap_after}");
    let ended = page.ended(id).await;
    let reply = ended.reply();
    assert_eq!(number("seen.peak"), reply["peak_bytes"].as_f64().unwrap(), "the API's peak is the ledger's");
    assert_eq!((number("seen.bytes"), number("seen.mapped")), (0.0, 0.0), "something is left, or was mapped when made");
    let chunk = ended.said("forecast").next().unwrap()["forecast"]["peak_by_category"]["upload"].as_f64().unwrap();
    assert!(number("seen.largest") <= chunk, "{} bytes at once, the ring has {chunk}", number("seen.largest"));
    assert_eq!(number("seen.wasm"), 0.0, "weights went through wasm memory");
    assert!(after["in_flight_peak_bytes"].as_f64().unwrap() <= chunk);
}

/// A tokenizer of bytes, for models that have none.
fn byte_tokenizer() -> Vec<u8> {
    let alphabet = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}').chain('\u{100}'..='\u{143}');
    let mut vocabulary: serde_json::Map<String, serde_json::Value> =
        alphabet.enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    let end = vocabulary.len();
    vocabulary.insert("<|end|>".into(), end.into());
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let special = json!({ "id": end, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true });
    let model = json!({ "type": "BPE", "vocab": vocabulary, "merges": [] });
    let tokenizer = json!({ "version": "1.0", "added_tokens": [special], "pre_tokenizer": bytes, "decoder": bytes, "model": model });
    serde_json::to_vec(&tokenizer).unwrap()
}
