//! What the engine's tests share: an adapter, weights made in memory, small programs, and the process as a witness.
//!
//! Everything goes through the public API, as a caller of the library would. A missing adapter is a loud failure: `device()`
//! panics with what `Device::open` said.

use std::collections::BTreeMap;
use std::sync::Arc;

use ebbtide::compile::{self, Budget, Options};
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::weights::{DType, ReadAt};
use ebbtide::{
    Cancel, Catalog, Device, DeviceChoice, Event, Graph, Outputs, Pass, PlanSet, Program, Result, Session, Source,
    Tensor,
};

/// Runs a future on this thread.
pub fn wait<T>(future: impl Future<Output = T>) -> T {
    pollster::block_on(future)
}

/// The adapter that the environment names; panics when there is none.
pub fn device() -> Device {
    device_of(&DeviceChoice::from_env())
}

/// The adapter of a choice; panics when there is none.
pub fn device_of(choice: &DeviceChoice) -> Device {
    wait(Device::open(choice)).expect("the engine's tests need a GPU adapter: `cargo xtask test` sets one up")
}

/// Whether the adapter is the slow one, on which a test may do less of the same.
pub fn slow(device: &Device) -> bool {
    device.caps().adapter.contains("SwiftShader")
}

/// Numbers between -scale and scale, the same on every machine (SplitMix64 of a counter).
pub fn random(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    (0..n as u64).map(|i| (mix(seed << 32 | i) >> 40) as f32 / (1u64 << 23) as f32 * scale - scale).collect()
}

/// A hash of a number.
pub fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A tensor of a file to be made.
#[derive(Clone, Debug)]
pub struct Data {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// An f32 tensor.
pub fn f32s(name: &str, shape: &[u64], values: &[f32]) -> Data {
    assert_eq!(shape.iter().product::<u64>(), values.len() as u64);
    Data { name: name.into(), dtype: DType::F32, shape: shape.into(), bytes: bytemuck::cast_slice(values).to_vec() }
}

/// The bytes of a safetensors file, written by the library.
pub fn file(tensors: &[Data]) -> Vec<u8> {
    let specs: Vec<(TensorSpec, &[u8])> = tensors
        .iter()
        .map(|t| (TensorSpec::new(t.name.as_str(), t.dtype, t.shape.clone()), t.bytes.as_slice()))
        .collect();
    write(Vec::new(), "made", &specs, &BTreeMap::new()).unwrap()
}

/// The bytes of a safetensors file with its tensors in the given order and its header as long as it happens to be, so that data
/// lies at odd offsets.
pub fn odd_file(tensors: &[Data]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes.len();
        entries.push(format!(
            r#""{}":{{"dtype":"{}","shape":{:?},"data_offsets":[{at},{end}]}}"#,
            t.name, t.dtype, t.shape
        ));
        at = end;
    }
    let mut header = format!("{{{}}}", entries.join(","));
    while header.len() % 2 == 0 {
        header.push(' ');
    }
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.bytes());
    tensors.iter().for_each(|t| out.extend(&t.bytes));
    out
}

/// A catalog of files in memory, each a segment of its name.
pub fn catalog(files: &[(&str, Vec<u8>)]) -> Catalog {
    let sources = files.iter().map(|(name, bytes)| Source::memory(*name, bytes.clone())).collect();
    wait(Catalog::from_sources(sources)).unwrap()
}

/// The content of a layer: a square weight `w` and a bias `b`, in this many columns.
pub fn layer(seed: u64, width: u64) -> Vec<u8> {
    let scale = 1.5 / (width as f32).sqrt();
    file(&[
        f32s("w", &[width, width], &random(seed * 2, (width * width) as usize, scale)),
        f32s("b", &[width], &random(seed * 2 + 1, width as usize, 0.5)),
    ])
}

/// Layers of these widths' content, by name `l00`, `l01` …
pub fn layers(count: u64, width: u64) -> Catalog {
    let files: Vec<(String, Vec<u8>)> = (0..count).map(|i| (format!("l{i:02}"), layer(100 + i, width))).collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    catalog(&files)
}

/// `tanh(x · w + b)` through every segment of the catalog in turn, its mean, and the gradient with respect to x.
pub fn chain(catalog: &Catalog, rows: u64, width: u64, by_hand: bool) -> Program {
    let mut g = Graph::new();
    let x = g.input("x", [rows, width]).unwrap();
    let mut h = x;
    let segments: Vec<_> = catalog.segments().cloned().collect();
    for segment in &segments {
        h = if by_hand {
            g.with(segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?))).unwrap()
        } else {
            let (w, b) = (g.weight(segment, "w").unwrap(), g.weight(segment, "b").unwrap());
            g.matmul(h, w, Some(b)).unwrap()
        };
        h = g.unary(ebbtide::graph::Unary::Tanh, h).unwrap();
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

/// How a program is lowered: the set keeps weights between runs.
pub fn keep() -> Options {
    Options::default()
}

/// How a program is lowered: the set runs one plan once.
pub fn once() -> Options {
    Options { once: true, ..Options::default() }
}

/// How a program is lowered: `keep_free: 0`.
pub fn keep_free_0() -> Options {
    Options { once: true, keep_free_0: true, ..Options::default() }
}

/// Compiles one program for a device.
pub fn compiled(device: &Device, catalog: &Catalog, program: &Program, budget: Budget, options: Options) -> PlanSet {
    compile::compile_with(std::slice::from_ref(program), catalog, device.caps(), budget, options).unwrap()
}

/// A session of one program.
pub fn session(device: &Device, catalog: &Catalog, program: &Program, budget: Budget, options: Options) -> Session {
    let set = compiled(device, catalog, program, budget, options);
    wait(Session::new(device, catalog, set)).unwrap()
}

/// One run with the input `x`; the outputs and what happened.
pub fn run(session: &mut Session, x: &[f32]) -> Result<(Outputs, Vec<Event>)> {
    let mut events = Vec::new();
    let out = wait(session.run(0, &[("x", bytemuck::cast_slice(x))], &Cancel::new(), &mut events))?;
    Ok((out, events))
}

/// Loads among events.
pub fn loads(events: &[Event]) -> usize {
    events.iter().filter(|e| matches!(e, Event::Load { .. })).count()
}

/// The lines of the founding program's trace.
pub fn trace(events: &[Event]) -> Vec<String> {
    let pass = |p: &Pass| if *p == Pass::Forward { "forward" } else { "backward" };
    events
        .iter()
        .filter_map(|e| match e {
            Event::Load { segment, pass: p, .. } => Some(format!("{}_load({segment}.safetensors)", pass(p))),
            Event::Evict { segment, pass: p } => Some(format!("{}_unload({segment}.safetensors)", pass(p))),
            _ => None,
        })
        .collect()
}

/// A fixture of `tests/fixtures`.
pub fn fixture(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

/// The founding program over any catalog of segments with `w` and `b`: `x·w + b` through all in turn, for some rounds.
pub fn founding(catalog: &Catalog, rounds: u32, by_hand: bool) -> Program {
    let segments: Vec<_> = catalog.segments().cloned().collect();
    let mut g = Graph::new();
    let x = g.input("x", [1, 3, 32, 48]).unwrap();
    let mut h = x;
    for _ in 0..rounds {
        for segment in &segments {
            h = if by_hand {
                g.with(segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?))).unwrap()
            } else {
                let (w, b) = (g.weight(segment, "w").unwrap(), g.weight(segment, "b").unwrap());
                g.matmul(h, w, Some(b)).unwrap()
            };
        }
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

/// Resident memory of this process in bytes.
pub fn rss() -> u64 {
    of_status("VmRSS:")
}

/// The most resident memory that this process ever had.
pub fn highest_rss() -> u64 {
    of_status("VmHWM:")
}

fn of_status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Fails with the first five differing words, unless two outputs have the same bits.
pub fn same_bits(what: &str, got: &[u8], want: &[u8]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let words = |b: &[u8]| b.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect::<Vec<_>>();
    let (g, w) = (words(got), words(want));
    let bad: Vec<_> = (0..g.len()).filter(|i| g[*i].to_bits() != w[*i].to_bits()).collect();
    let shown: Vec<_> = bad.iter().take(5).map(|i| (i, g[*i], w[*i])).collect();
    assert!(bad.is_empty(), "{what}: {} of {} words differ; (index, got, want): {shown:?}", bad.len(), g.len());
}

/// Fails unless two runs gave the same bits in `loss` and `grad.0`.
pub fn same_step(what: &str, got: &Outputs, want: &Outputs) {
    for name in ["loss", "grad.0"] {
        same_bits(&format!("{what}, {name}"), got.bytes(name).unwrap(), want.bytes(name).unwrap());
    }
}

/// What a test does to one read: delays it, or fails it.
pub type Tamper = dyn Fn(u64, &mut [u8]) -> Option<std::io::Result<usize>> + Send + Sync;

/// A file in memory whose reads a test can delay, shorten or fail.
pub struct Tampered {
    name: String,
    bytes: Vec<u8>,
    tamper: Box<Tamper>,
}

impl Tampered {
    /// A source that asks `tamper` first at every read.
    pub fn source(
        name: &str,
        bytes: Vec<u8>,
        tamper: impl Fn(u64, &mut [u8]) -> Option<std::io::Result<usize>> + Send + Sync + 'static,
    ) -> Source {
        Source::custom(Arc::new(Tampered { name: name.into(), bytes, tamper: Box::new(tamper) }))
    }
}

impl ReadAt for Tampered {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        if let Some(result) = (self.tamper)(offset, buf) {
            return result;
        }
        let from = self.bytes.get(offset as usize..).unwrap_or_default();
        let n = from.len().min(buf.len());
        buf[..n].copy_from_slice(&from[..n]);
        Ok(n)
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// A tensor that any graph accepts at this place: for mutations that need another value.
pub fn other_tensor(shape: &[u64]) -> Tensor {
    let mut g = Graph::new();
    g.input("first", shape).unwrap();
    g.input("second", shape).unwrap()
}
