//! The engine's session in a real browser: the first founding program streams, and training keeps its bits.
//!
//! Here nothing is mapped and nothing is polled: chunks go through `writeBuffer`, and waiting is the browser's word.
#![cfg(target_arch = "wasm32")]
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)] // a failing test may panic

#[path = "../../core/examples/common/mod.rs"]
mod common;

use ebbtide::compile::Options;
use ebbtide::event::NoEvents;
use ebbtide::{Budget, Cancel, Catalog, Device, DeviceChoice, Event, Graph, Program, Session, compile_with};
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
