//! The engine's session in a real browser: the first founding program streams, and training keeps its bits.
//!
//! Here nothing is mapped and nothing is polled: chunks go through `writeBuffer`, and waiting is the browser's word.
#![cfg(target_arch = "wasm32")]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

#[path = "../../core/examples/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use ebbtide::compile::Options;
use ebbtide::event::NoEvents;
use ebbtide::nn::embedding_rows;
use ebbtide::rt::{Sink, Waiting, pause};
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::weights::{DType, Fetch};
use ebbtide::{Budget, Cancel, Catalog, Device, DeviceChoice, Event, Graph, Program, Session, Source, compile_with};
use futures_util::future::{Either, select};
use wasm_bindgen_test::{wasm_bindgen_test, wasm_bindgen_test_configure};

wasm_bindgen_test_configure!(run_in_browser);

fn founding_program(catalog: &Catalog, rounds: usize) -> Program {
    let mut g = Graph::new();
    let x = g.input("x", [96, 48]).unwrap();
    let mut h = x;
    for _ in 0..rounds {
        for name in ["down", "up"] {
            let segment = catalog.segment(name).unwrap();
            let (w, b) = (g.weight(&segment, "w").unwrap(), g.weight(&segment, "b").unwrap());
            h = g.matmul(h, w, Some(b)).unwrap();
        }
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

#[wasm_bindgen_test]
async fn the_founding_program_streams_within_its_floor_to_the_bits_of_the_resident_run() {
    let catalog = common::catalog().await.unwrap();
    let device = Device::open(&DeviceChoice::default()).await.unwrap();
    let x = common::numbers(3, 96 * 48);
    let once = Options { once: true, ..Options::default() };
    let mut results = Vec::new();
    for (budget, loads) in [(Budget::All, 2), (Budget::Floor, 39)] {
        let set = compile_with(&[founding_program(&catalog, 10)], &catalog, device.caps(), budget, once).unwrap();
        let planned = set.planned_peak();
        let before = device.active_memory();
        device.reset_peak_memory();
        let mut session = Session::new(&device, &catalog, set).await.unwrap();
        let mut events: Vec<Event> = Vec::new();
        let input: [(&str, &[u8]); 1] = [("x", bytemuck::cast_slice(&x))];
        let out = session.run(0, &input, &Cancel::new(), &mut events).await.unwrap();
        assert_eq!(out.loads, loads);
        assert_eq!(events.iter().filter(|e| matches!(e, Event::Load { .. })).count() as u64, loads);
        assert_eq!(device.peak_memory() - before, planned, "planned is what was measured");
        results.push(out.bytes("grad.0").unwrap().to_vec());
        // A second run of the same session, to see that the rings come round.
        let again = session.run(0, &input, &Cancel::new(), &mut NoEvents).await.unwrap();
        assert!(again.bytes("grad.0").unwrap() == results[results.len() - 1]);
        drop(session);
        assert_eq!(device.active_memory(), before);
    }
    assert!(results[0] == results[1], "equal to the bit");
}

/// Bytes that come only after a turn of the browser's event loop, as those of its files do.
struct Slow(String, Vec<u8>);

impl Fetch for Slow {
    fn name(&self) -> &str {
        &self.0
    }

    fn len(&self) -> u64 {
        self.1.len() as u64
    }

    fn fetch<'a>(&'a self, offset: u64, mut sink: Sink<'a>) -> Waiting<'a, ebbtide::Result<()>> {
        Box::pin(async move {
            pause(5).await;
            let from = offset as usize;
            sink.put(0, &self.1[from..from + sink.len()]);
            Ok(())
        })
    }
}

/// A table of 64 rows whose rows a program reads by their numbers, and doubles.
async fn rows_of_a_slow_table(device: &Device) -> (Session, Vec<f32>) {
    let values = common::numbers(5, 64 * 32);
    let tensors = [(TensorSpec::new("table", DType::F32, [64, 32]), bytemuck::cast_slice(&values))];
    let file = write(Vec::new(), "table", &tensors, &BTreeMap::new()).unwrap();
    let source = Source::waiting(Arc::new(Slow("table.safetensors".into(), file)));
    let catalog = Catalog::from_sources(vec![source]).await.unwrap();
    let mut g = Graph::new();
    let ids = g.input_i32("ids", [40]).unwrap();
    let rows = embedding_rows(&mut g, &catalog.segment("table").unwrap(), "table", ids).unwrap();
    let twice = g.add(rows, rows).unwrap();
    let program = g.outputs(&[("twice", twice)]).unwrap();
    let set = compile_with(&[program], &catalog, device.caps(), Budget::Floor, Options::default()).unwrap();
    (Session::new(device, &catalog, set).await.unwrap(), values)
}

#[wasm_bindgen_test]
async fn a_run_that_is_dropped_while_rows_are_read_takes_no_chunk_of_the_ring_with_it() {
    let device = Device::open(&DeviceChoice::default()).await.unwrap();
    let (mut session, values) = rows_of_a_slow_table(&device).await;
    let ids: Vec<i32> = (0..40).map(|i| (i * 7) % 64).collect();
    let input: [(&str, &[u8]); 1] = [("ids", bytemuck::cast_slice(&ids))];
    for _ in 0..3 {
        let cancel = Cancel::new();
        let mut events = NoEvents;
        let run = pin!(session.run(0, &input, &cancel, &mut events));
        let other = pin!(pause(1));
        assert!(matches!(select(run, other).await, Either::Right(_)), "the run was to be dropped before its end");
    }
    let out = session.run(0, &input, &Cancel::new(), &mut NoEvents).await.unwrap();
    let want: Vec<f32> = ids.iter().flat_map(|id| &values[*id as usize * 32..][..32]).map(|v| 2.0 * v).collect();
    assert!(out.f32("twice").unwrap() == want);
    assert_eq!(ebbtide::rt::flight().bytes, 0, "nothing is on its way any more");
}

#[wasm_bindgen_test]
async fn a_mapping_that_the_browser_refuses_is_an_error_and_not_an_endless_wait() {
    let device = Device::open(&DeviceChoice::default()).await.unwrap();
    let (mut session, _) = rows_of_a_slow_table(&device).await;
    let ids = [3i32; 40];
    let input: [(&str, &[u8]); 1] = [("ids", bytemuck::cast_slice(&ids))];
    js_sys::eval(
        "self.mapAsyncOfTheBrowser = GPUBuffer.prototype.mapAsync;
         GPUBuffer.prototype.mapAsync = () => Promise.reject(new DOMException('refused by a test', 'OperationError'));",
    )
    .unwrap();
    let refused = session.run(0, &input, &Cancel::new(), &mut NoEvents).await;
    js_sys::eval("GPUBuffer.prototype.mapAsync = self.mapAsyncOfTheBrowser;").unwrap();
    assert_eq!(refused.unwrap_err().code(), "gpu");
    // The session lives on.
    session.run(0, &input, &Cancel::new(), &mut NoEvents).await.unwrap();
}
