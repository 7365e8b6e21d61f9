//! The engine in its worker: takes requests, answers with messages, and holds everything that the page does not.
//!
//! Requests that need the engine are done one after the other; those that steer it (`pause`, `stop` …) are done at once,
//! whatever runs. Nothing here blocks: a run goes back to the worker's event loop whenever it waits for the GPU or a file, and
//! that is where steering reaches it.

mod errors;
mod material;
mod probe;
mod sample;
mod sessions;
mod train;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use ebbtide::event::{Event, EventSink};
use ebbtide::rt::Instant;
use ebbtide::{Cancel, Device, DeviceChoice, Error, Pass, Result};
use js_sys::{Array, Function, Object, Reflect, Uint8Array};
use wasm_bindgen::prelude::*;

use crate::protocol::{Command, EngineEvent, Message, Progress, Reply, Request, Timed};
use material::{Data, Material};
use train::Trained;

/// Milliseconds between two messages of events.
const TOGETHER: f64 = 120.0;

/// A file of a reply.
pub(crate) type Attachment = (String, Vec<u8>);

/// The engine, speaking the protocol of [`crate::protocol`].
#[wasm_bindgen]
pub struct Engine {
    bench: Rc<Bench>,
    queue: async_channel::Sender<(Request, Vec<web_sys::File>)>,
}

/// What all commands work on.
pub(crate) struct Bench {
    post: Function,
    began: Instant,
    device: RefCell<Option<Device>>,
    model: RefCell<Option<Rc<Material>>>,
    data: RefCell<Option<Rc<Data>>>,
    trained: RefCell<Option<Rc<Trained>>>,
    /// Stops what runs now.
    cancel: RefCell<Cancel>,
    pause: Pause,
    /// The budget at which all is resident, by the settings it was found for.
    all_bytes: RefCell<HashMap<String, u64>>,
}

/// Holds a run between two of its steps.
pub(crate) struct Pause {
    held: Cell<bool>,
    wake: (async_channel::Sender<()>, async_channel::Receiver<()>),
}

#[wasm_bindgen]
impl Engine {
    /// An engine that posts its messages by `post(message, transfer)`. The first one says that it is ready.
    #[wasm_bindgen(constructor)]
    pub fn new(post: Function) -> Engine {
        let bench = Rc::new(Bench {
            post,
            began: Instant::now(),
            device: RefCell::default(),
            model: RefCell::default(),
            data: RefCell::default(),
            trained: RefCell::default(),
            cancel: RefCell::default(),
            pause: Pause { held: Cell::new(false), wake: async_channel::bounded(1) },
            all_bytes: RefCell::default(),
        });
        let (queue, requests) = async_channel::unbounded();
        let worker = bench.clone();
        wasm_bindgen_futures::spawn_local(async move {
            while let Ok((request, files)) = requests.recv().await {
                *worker.cancel.borrow_mut() = Cancel::new();
                worker.pause.release();
                let result = worker.clone().perform(request, files).await;
                worker.end(result);
            }
        });
        bench.say(&Message::Ready { format: 1, version: env!("CARGO_PKG_VERSION").into() }, &[]);
        Engine { bench, queue }
    }

    /// Takes a request of the page, as it was posted.
    pub fn receive(&self, request: JsValue) {
        let id = Reflect::get(&request, &"id".into()).ok().and_then(|id| id.as_f64()).unwrap_or(0.0) as u32;
        match parse(&request) {
            Ok((request, files)) => {
                if let Some(result) = self.bench.at_once(&request) {
                    self.bench.end((id, result.map(|reply| (reply, Vec::new()))));
                } else if self.queue.try_send((request, files)).is_err() {
                    self.bench.end((id, Err(Error::Cancelled)));
                }
            }
            Err(error) => self.bench.end((id, Err(error))),
        }
    }
}

/// A request and the files beside it.
fn parse(request: &JsValue) -> Result<(Request, Vec<web_sys::File>)> {
    let invalid = |reason: String| Error::Invalid { what: "a request".into(), reason };
    let files = Reflect::get(request, &"files".into()).unwrap_or(JsValue::UNDEFINED);
    let files = if files.is_object() { Array::from(&files).to_vec() } else { Vec::new() };
    let files = files.into_iter().map(|f| f.dyn_into::<web_sys::File>());
    let files = files.collect::<Result<Vec<_>, _>>().map_err(|_| invalid("`files` holds what is no file".into()))?;
    let plain = Object::new();
    if let Some(object) = request.dyn_ref::<Object>() {
        Object::assign(&plain, object);
    }
    let _ = Reflect::delete_property(&plain, &"files".into());
    let text = js_sys::JSON::stringify(&plain).map_err(|_| invalid("it is no plain object".into()))?;
    let request = serde_json::from_str(&String::from(text)).map_err(|e| invalid(e.to_string()))?;
    Ok((request, files))
}

/// How a command ended.
type End = (u32, Result<(Reply, Vec<Attachment>)>);

impl Bench {
    /// Posts a message.
    fn say(&self, message: &Message, files: &[Attachment]) {
        let Ok(text) = serde_json::to_string(message) else { return };
        let Ok(object) = js_sys::JSON::parse(&text) else { return };
        let transfer = Array::new();
        if !files.is_empty() {
            let list = Array::new();
            for (name, bytes) in files {
                let bytes = Uint8Array::from(bytes.as_slice());
                transfer.push(&bytes.buffer());
                let file = Object::new();
                let _ = Reflect::set(&file, &"name".into(), &name.into());
                let _ = Reflect::set(&file, &"bytes".into(), &bytes);
                list.push(&file);
            }
            let _ = Reflect::set(&object, &"files".into(), &list);
        }
        // Fails only when the page is gone.
        let _ = self.post.call2(&JsValue::UNDEFINED, &object, &transfer);
    }

    fn end(&self, (id, result): End) {
        match result {
            Ok((reply, files)) => self.say(&Message::Done { id, reply }, &files),
            Err(error) => self.say(&Message::Failed { id, error: errors::info(&error) }, &[]),
        }
    }

    /// Posts something of a command that still runs.
    pub fn progress(&self, id: u32, progress: Progress) {
        self.say(&Message::Progress { id, progress }, &[]);
    }

    pub fn phase(&self, id: u32, words: &str) {
        self.progress(id, Progress::Phase { phase: words.into() });
    }

    /// Milliseconds since the worker began.
    fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e3
    }

    /// The token that `stop` sets.
    pub fn cancel(&self) -> Cancel {
        self.cancel.borrow().clone()
    }

    /// The device, opened if it is not open.
    pub async fn device(&self) -> Result<Device> {
        let open = self.device.borrow().clone();
        if let Some(device) = open {
            return Ok(device);
        }
        let device = Device::open(&DeviceChoice::default()).await?;
        *self.device.borrow_mut() = Some(device.clone());
        Ok(device)
    }

    /// Lets a lost device go, so that the next command opens another.
    pub fn forget_lost(&self, error: &Error) {
        if matches!(error, Error::DeviceLost { .. }) {
            *self.device.borrow_mut() = None;
        }
    }

    pub fn model(&self) -> Result<Rc<Material>> {
        self.model.borrow().clone().ok_or_else(|| missing("model"))
    }

    pub fn data(&self) -> Result<Rc<Data>> {
        self.data.borrow().clone().ok_or_else(|| missing("data"))
    }

    pub fn trained(&self) -> Option<Rc<Trained>> {
        self.trained.borrow().clone()
    }

    /// What is done at once, whatever runs.
    fn at_once(&self, request: &Request) -> Option<Result<Reply>> {
        match &request.command {
            Command::Pause => self.pause.held.set(true),
            Command::Resume => self.pause.release(),
            Command::Stop => {
                self.cancel.borrow().cancel();
                self.pause.wake();
            }
            Command::LoseDevice => {
                if let Some(device) = &*self.device.borrow() {
                    device.raw().destroy();
                }
            }
            Command::Memory => return Some(Ok(self.memory())),
            Command::Plan { run } => return Some(self.plan(run)),
            _ => return None,
        }
        Some(Ok(Reply::Ok))
    }

    fn memory(&self) -> Reply {
        let usage = self.device.borrow().as_ref().map(|d| d.ledger().usage()).unwrap_or_default();
        let pages = wasm_bindgen::memory().unchecked_into::<js_sys::WebAssembly::Memory>().buffer();
        let flight = ebbtide::rt::flight();
        Reply::Memory {
            allocated: train::by_category(&usage.active),
            peak_bytes: usage.peak,
            buffers: usage.buffers,
            buffers_made: usage.made,
            wasm_bytes: pages.unchecked_into::<js_sys::ArrayBuffer>().byte_length().into(),
            in_flight_bytes: flight.bytes,
            in_flight_peak_bytes: flight.peak,
        }
    }

    async fn perform(self: Rc<Bench>, Request { id, command }: Request, files: Vec<web_sys::File>) -> End {
        let plain = |reply| (reply, Vec::new());
        let result = match command {
            Command::OpenDevice => self.describe_device().await.map(plain),
            Command::Open { model } => self.open(id, &model, &files).await.map(plain),
            Command::Copy => self.copy(id).await.map(plain),
            Command::KeptModels => self.kept_models().await.map(plain),
            Command::DeleteModel { name } => self.delete_model(&name).await.map(plain),
            Command::Data { data, options } => self.read_data(&data, &options, &files).await.map(plain),
            Command::Train { run } => self.train(id, &run).await.map(plain),
            Command::Sample { sample } => self.sample(id, &sample).await.map(plain),
            Command::SaveSession { name } => self.save_session(&name).await.map(plain),
            Command::Sessions => self.sessions().await.map(plain),
            Command::OpenSession { name } => self.open_session(id, &name).await.map(plain),
            Command::DeleteSession { name } => self.delete_session(&name).await.map(plain),
            Command::ExportAdapter => self.export(),
            Command::Probe { probe } => self.probe(id, &probe).await.map(plain),
            // Those that were done at once.
            Command::Pause | Command::Resume | Command::Stop | Command::Memory | Command::LoseDevice => {
                Ok(plain(Reply::Ok))
            }
            Command::Plan { run } => self.plan(&run).map(plain),
        };
        if let Err(error) = &result {
            self.forget_lost(error);
        }
        (id, result)
    }

    async fn describe_device(&self) -> Result<Reply> {
        let device = self.device().await?;
        Ok(Reply::Device { rows: crate::device::rows(&device) })
    }
}

fn missing(what: &'static str) -> Error {
    Error::NotFound { what, name: "open".into(), hint: Some(format!("open a {what} first")) }
}

impl Pause {
    fn wake(&self) {
        let _ = self.wake.0.try_send(());
    }

    fn release(&self) {
        self.held.set(false);
        self.wake();
    }
}

/// Gathers the engine's events of a command and posts them, a few tenths of a second at once.
pub(crate) struct Sink {
    bench: Rc<Bench>,
    id: u32,
    device: Device,
    waiting: Vec<Timed>,
    last: f64,
    held: HashMap<String, u64>,
}

impl Sink {
    pub fn new(bench: &Rc<Bench>, id: u32, device: &Device) -> Sink {
        let last = bench.now();
        Sink { bench: bench.clone(), id, device: device.clone(), waiting: Vec::new(), last, held: HashMap::new() }
    }

    pub fn say(&mut self, progress: Progress) {
        self.flush();
        self.bench.progress(self.id, progress);
    }

    pub fn flush(&mut self) {
        self.last = self.bench.now();
        if !self.waiting.is_empty() {
            let events = std::mem::take(&mut self.waiting);
            self.bench.progress(self.id, Progress::Events { events });
        }
    }
}

impl EventSink for Sink {
    fn event(&mut self, event: Event) {
        let Some(event) = plain(&event) else { return };
        match &event {
            EngineEvent::Load { segment, bytes, .. } => _ = self.held.insert(segment.clone(), *bytes),
            EngineEvent::Evict { segment, .. } => _ = self.held.remove(segment),
            _ => {}
        }
        let at = self.bench.now();
        let (allocated, weights_held) = (self.device.active_memory(), self.held.values().sum());
        self.waiting.push(Timed { at, event, allocated, weights_held });
        if at - self.last > TOGETHER {
            self.flush();
        }
    }
}

/// The events of running plans, as the page reads them.
fn plain(event: &Event) -> Option<EngineEvent> {
    let name = |pass: &Pass| match pass {
        Pass::Forward => "forward".to_string(),
        Pass::Backward => "backward".to_string(),
    };
    Some(match event {
        Event::RunStart { program } => EngineEvent::RunStart { program: program.to_string() },
        Event::Load { segment, pass, bytes } => {
            EngineEvent::Load { segment: segment.to_string(), pass: name(pass), bytes: *bytes }
        }
        Event::Evict { segment, pass } => EngineEvent::Evict { segment: segment.to_string(), pass: name(pass) },
        Event::RunEnd { program, loads, evictions, streamed_bytes } => EngineEvent::RunEnd {
            program: program.to_string(),
            loads: *loads,
            evictions: *evictions,
            streamed_bytes: *streamed_bytes,
        },
        _ => return None,
    })
}
