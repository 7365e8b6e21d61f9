//! A page without a picture: posts requests to an engine in this same worker and gathers its messages.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use ebbtide::rt::pause;
use ebbtide_web::Engine;
use js_sys::{Array, JSON, Object, Reflect, Uint8Array};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

/// A message: its plain part, and the files beside it.
type Heard = (Value, Vec<(String, Vec<u8>)>);

/// An engine and what it said.
pub struct Page {
    engine: Engine,
    heard: Rc<RefCell<Vec<Heard>>>,
    last: u32,
    /// How often each kind of progress came while none was kept.
    counts: Rc<RefCell<Option<BTreeMap<String, usize>>>>,
    _post: Closure<dyn FnMut(JsValue, JsValue)>,
}

/// How a command ended.
pub struct Ended {
    /// The reply, or the error.
    pub result: Result<Value, Value>,
    /// What was said before.
    pub progress: Vec<Value>,
    /// The reply's files.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Ended {
    /// The reply of a command that has to end well.
    pub fn reply(&self) -> &Value {
        self.result.as_ref().unwrap_or_else(|e| panic!("{e}"))
    }

    /// What was said of a kind.
    pub fn said<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.progress.iter().filter(move |p| p["progress"] == kind)
    }

    /// Losses of the steps.
    pub fn losses(&self) -> Vec<f64> {
        self.said("step").map(|p| p["step"]["loss"].as_f64().unwrap()).collect()
    }
}

/// A file of the browser.
pub fn file(name: &str, bytes: &[u8]) -> web_sys::File {
    let parts = Array::of1(&Uint8Array::from(bytes));
    web_sys::File::new_with_u8_array_sequence(&parts, name).unwrap()
}

/// The demo's model as files of the visitor.
pub fn tiny_model() -> Vec<web_sys::File> {
    macro_rules! asset {
        ($name:literal) => {
            file($name, include_bytes!(concat!("../../../native/assets/tiny-shakespeare-llama/", $name)))
        };
    }
    vec![
        asset!("config.json"),
        asset!("generation_config.json"),
        asset!("tokenizer.json"),
        asset!("tokenizer_config.json"),
        asset!("model.safetensors"),
    ]
}

/// Some of the demo's data as a file of the visitor: SwiftShader on two cores is slow.
pub fn tide_log() -> Vec<web_sys::File> {
    let text = include_str!("../../../native/assets/tide-log/train.jsonl");
    let some: String = text.split_inclusive('\n').take(16).collect();
    vec![file("train.jsonl", some.as_bytes())]
}

impl Page {
    /// A page whose engine is ready.
    pub fn new() -> Page {
        let heard: Rc<RefCell<Vec<Heard>>> = Rc::default();
        let to = heard.clone();
        let counts: Rc<RefCell<Option<BTreeMap<String, usize>>>> = Rc::default();
        let count = counts.clone();
        let post = Closure::new(move |message: JsValue, _: JsValue| {
            let progress = Reflect::get(&message, &"progress".into()).unwrap();
            if let Some(counts) = &mut *count.borrow_mut()
                && progress.is_object()
            {
                let kind = Reflect::get(&progress, &"progress".into()).unwrap().as_string().unwrap();
                *counts.entry(kind).or_insert(0) += 1;
                return;
            }
            let files = Reflect::get(&message, &"files".into()).unwrap();
            let files = if files.is_undefined() { Array::new() } else { Array::from(&files) };
            let get = |of: &JsValue, name: &str| Reflect::get(of, &name.into()).unwrap();
            let files = files
                .iter()
                .map(|f| (get(&f, "name").as_string().unwrap(), Uint8Array::new(&get(&f, "bytes")).to_vec()));
            let files = files.collect();
            Reflect::delete_property(message.unchecked_ref::<Object>(), &"files".into()).unwrap();
            let text = String::from(JSON::stringify(&message).unwrap());
            to.borrow_mut().push((serde_json::from_str(&text).unwrap(), files));
        });
        let engine = Engine::new(post.as_ref().unchecked_ref::<js_sys::Function>().clone());
        assert_eq!(heard.borrow_mut().remove(0).0["message"], "ready");
        Page { engine, heard, last: 0, counts, _post: post }
    }

    /// From now on progress is counted and not kept, so that what the test gathers is no memory of the engine's.
    pub fn only_count(&self) {
        *self.counts.borrow_mut() = Some(BTreeMap::new());
    }

    /// Waits until progress of a kind was counted so many times.
    pub async fn counts(&self, kind: &str, times: usize) {
        while self.counts.borrow().as_ref().is_none_or(|c| c.get(kind).is_none_or(|n| *n < times)) {
            pause(10).await;
        }
    }

    /// Posts a command; gives its number.
    pub fn post(&mut self, command: &Value, files: &[web_sys::File]) -> u32 {
        self.last += 1;
        let request = JSON::parse(&command.to_string()).unwrap();
        Reflect::set(&request, &"id".into(), &self.last.into()).unwrap();
        if !files.is_empty() {
            let list: Array = files.iter().collect();
            Reflect::set(&request, &"files".into(), &list).unwrap();
        }
        self.engine.receive(request);
        self.last
    }

    /// Waits until a command has ended.
    pub async fn ended(&self, id: u32) -> Ended {
        let end = |m: &Heard| m.0["id"] == id && (m.0["message"] == "done" || m.0["message"] == "failed");
        while !self.heard.borrow().iter().any(end) {
            pause(5).await;
        }
        let mut heard = self.heard.borrow_mut();
        let (own, others): (Vec<Heard>, Vec<Heard>) = heard.drain(..).partition(|m| m.0["id"] == id);
        *heard = others;
        let mut progress: Vec<Value> = own.iter().map(|(m, _)| m["progress"].clone()).collect();
        progress.pop();
        let (last, files) = own.into_iter().next_back().unwrap();
        let result = if last["message"] == "done" { Ok(last["reply"].clone()) } else { Err(last["error"].clone()) };
        Ended { result, progress, files }
    }

    /// Waits until a command that runs has said this, so many times.
    pub async fn says(&self, id: u32, kind: &str, times: usize) {
        let of = |m: &Heard| m.0["id"] == id && m.0["progress"]["progress"] == kind;
        let end = |m: &Heard| m.0["id"] == id && (m.0["message"] == "done" || m.0["message"] == "failed");
        while self.heard.borrow().iter().filter(|m| of(m)).count() < times {
            assert!(
                !self.heard.borrow().iter().any(end),
                "it ended without `{kind}`: {:?}",
                self.heard.borrow().last()
            );
            pause(2).await;
        }
    }

    /// Posts a command and waits for its end.
    pub async fn ask(&mut self, command: Value, files: &[web_sys::File]) -> Ended {
        let id = self.post(&command, files);
        self.ended(id).await
    }

    /// A page with the demo's model and data.
    pub async fn with_tide_log() -> Page {
        let mut page = Page::new();
        page.ask(json!({ "command": "open", "model": { "from": "files" } }), &tiny_model()).await.reply();
        let data = json!({ "command": "data", "data": { "from": "files" }, "options": { "max_seq_length": 32 } });
        page.ask(data, &tide_log()).await.reply();
        page
    }
}
