//! A2, A3: the host runs far ahead of a slow queue, reads are late at random, and no weight is overwritten while a kernel reads it.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebbtide::compile::{Budget, PlanSet, Ring};
use ebbtide::graph::Unary;
use ebbtide::{Cancel, Catalog, Event, Graph, Outputs, Program, Session};
use ebbtide_tests::engine;
use ebbtide_tests::engine::{Tampered, device, f32s, file, keep, keep_free_0, mix, same_bits, slow, wait};

const LAYERS: u64 = 50;
const WIDTH: u64 = 32;

/// Layers whose every weight is the constant of their number, read with random delays.
fn catalog(delay: &Arc<AtomicU64>) -> Catalog {
    let sources = (0..LAYERS).map(|i| {
        let constant = (i + 1) as f32 / (LAYERS as f32 * WIDTH as f32);
        let bytes = file(&[
            f32s("w", &[WIDTH, WIDTH], &vec![constant; (WIDTH * WIDTH) as usize]),
            f32s("b", &[WIDTH], &vec![i as f32; WIDTH as usize]),
        ]);
        let delay = delay.clone();
        Tampered::source(&format!("l{i:02}"), bytes, move |_, _| {
            let seed = delay.load(Ordering::Relaxed);
            if seed > 0 {
                let n = mix(delay.fetch_add(1, Ordering::Relaxed));
                // Every fourth read is late by up to 200 µs.
                if n.is_multiple_of(4) {
                    std::thread::sleep(Duration::from_micros(n / 4 % 200));
                }
            }
            None
        })
    });
    wait(Catalog::from_sources(sources.collect())).unwrap()
}

/// All layers, and in between a product that keeps the queue busy.
fn program(catalog: &Catalog, rows: u64, slow: u64, by_hand: bool) -> Program {
    let mut g = Graph::new();
    let x = g.input("x", [rows, WIDTH]).unwrap();
    let mut h = x;
    for (i, segment) in catalog.segments().cloned().collect::<Vec<_>>().iter().enumerate() {
        h = if by_hand {
            g.with(segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?))).unwrap()
        } else {
            let (w, b) = (g.weight(segment, "w").unwrap(), g.weight(segment, "b").unwrap());
            g.matmul(h, w, Some(b)).unwrap()
        };
        h = g.scale(h, 0.5).unwrap();
        if slow > 0 && i % 10 == 3 {
            let t = g.transpose(h).unwrap();
            let square = g.matmul(h, t, None).unwrap();
            let square = g.unary(Unary::Tanh, square).unwrap();
            let back = g.matmul(square, h, None).unwrap();
            let back = g.scale(back, 1e-6).unwrap();
            h = g.add(h, back).unwrap();
        }
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

fn step(session: &mut Session, x: &[f32], out: &mut Outputs) {
    wait(session.run_into(0, &[("x", bytemuck::cast_slice(x))], &Cancel::new(), &mut |_: Event| (), out)).unwrap();
}

/// The same set with a ring of so many chunks of so many bytes.
fn with_ring(set: &PlanSet, chunk: u64, chunks: u32) -> PlanSet {
    let mut set = set.clone();
    let before = set.table.upload.bytes();
    set.table.upload = Ring { chunk, chunks };
    set.planned.sub(ebbtide::compile::Category::Upload, before);
    set.planned.add(ebbtide::compile::Category::Upload, set.table.upload.bytes());
    set.budget = set.budget.max(set.planned_peak());
    set
}

fn compare(what: &str, got: &Outputs, want: &Outputs) {
    for name in ["loss", "grad.0"] {
        same_bits(&format!("{what}, {name}"), got.bytes(name).unwrap(), want.bytes(name).unwrap());
    }
}

#[test]
fn rings_of_one_two_and_three_chunks_stay_whole_over_200_repeats_with_late_reads_and_a_slow_queue() {
    let device = device();
    let delay = Arc::new(AtomicU64::new(0));
    let catalog = catalog(&delay);
    let repeats = if slow(&device) { 6 } else { 200 };
    let rows = 96;
    let program = program(&catalog, rows, 1, false);
    let x = engine::random(4, (rows * WIDTH) as usize, 1.0);
    let mut want = Outputs::default();
    step(&mut engine::session(&device, &catalog, &program, Budget::All, keep()), &x, &mut want);
    assert!(want.f32("loss").unwrap()[0].is_finite());
    let floor = engine::compiled(&device, &catalog, &program, Budget::Floor, keep());
    let room = floor.segments[0].device_bytes();
    delay.store(1, Ordering::Relaxed);
    // Chunks that hold a segment, and chunks of which a segment needs several.
    let cases = [(0, 8192, 1), (0, 1024, 1), (1, 4096, 2), (1, 1024, 2), (1, 8192, 3), (3, 512, 3)];
    for (ahead, chunk, chunks) in cases {
        let set = engine::compiled(&device, &catalog, &program, Budget::Bytes(floor.floor + ahead * room), keep());
        let mut session = wait(Session::new(&device, &catalog, with_ring(&set, chunk, chunks))).unwrap();
        let mut out = Outputs::default();
        for repeat in 0..repeats / cases.len() + 1 {
            step(&mut session, &x, &mut out);
            assert_eq!(out.loads, 2 * (LAYERS - 1 - ahead), "{ahead}");
            compare(&format!("{chunks} chunks of {chunk}, room for {}, repeat {repeat}", ahead + 1), &out, &want);
        }
    }
}

#[test]
fn a_queue_far_behind_the_host_reads_each_layers_own_weights() {
    // Big dispatches: the host would be many layers ahead if nothing held it.
    let device = device();
    let delay = Arc::new(AtomicU64::new(0));
    let catalog = catalog(&delay);
    let rows = if slow(&device) { 256 } else { 768 };
    let x = engine::random(4, (rows * WIDTH) as usize, 1.0);
    let mut want = Outputs::default();
    step(
        &mut engine::session(&device, &catalog, &program(&catalog, rows, 1, false), Budget::All, keep()),
        &x,
        &mut want,
    );
    for (by_hand, options) in [(false, keep()), (true, keep()), (true, keep_free_0())] {
        let program = program(&catalog, rows, 1, by_hand);
        let mut session = engine::session(&device, &catalog, &program, Budget::Floor, options);
        for repeat in 0..if slow(&device) { 1 } else { 3 } {
            let mut out = Outputs::default();
            step(&mut session, &x, &mut out);
            compare(&format!("by hand {by_hand}, {options:?}, repeat {repeat}"), &out, &want);
        }
    }
}
