//! The steady state: streaming makes nothing. No buffer, bind group or pipeline, no memory of the process, no heap allocation of ours.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(unsafe_code, reason = "an allocator that counts is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebbtide::compile::Budget;
use ebbtide::{Cancel, Event, Outputs};
use ebbtide_tests::engine::{self, chain, device, keep, layers, once, random, rss, session, slow, wait};

/// Counts allocations outside of wgpu, on every thread of ours, while it is told to.
struct Counting;

static COUNT: AtomicBool = AtomicBool::new(false);
static OURS: AtomicU64 = AtomicU64::new(0);
/// Shows where an allocation came from, once.
static SHOWN: AtomicBool = AtomicBool::new(false);

fn note() {
    if COUNT.load(Ordering::Relaxed) && !ebbtide::gpu::in_foreign_code() {
        OURS.fetch_add(1, Ordering::Relaxed);
        if std::env::var_os("EBBTIDE_SHOW_ALLOCATION").is_some() && !SHOWN.swap(true, Ordering::Relaxed) {
            COUNT.store(false, Ordering::Relaxed);
            let trace = std::backtrace::Backtrace::force_capture();
            std::fs::write("/tmp/ebbtide-allocation.txt", trace.to_string()).unwrap();
            COUNT.store(true, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's contract.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: u64 = 48;
const ROWS: u64 = 8;

#[test]
fn a_step_allocates_nothing_of_ours() {
    let device = device();
    let catalog = layers(8, WIDTH);
    let x = random(1, (ROWS * WIDTH) as usize, 1.0);
    let inputs: [(&str, &[u8]); 1] = [("x", bytemuck::cast_slice(&x))];
    for (by_hand, budget, options) in
        [(false, Budget::Floor, keep()), (false, Budget::Percent(60.0), keep()), (true, Budget::Floor, once())]
    {
        let program = chain(&catalog, ROWS, WIDTH, by_hand);
        let mut session = session(&device, &catalog, &program, budget, options);
        session.on_hook(|_| Ok(()));
        let mut out = Outputs::default();
        let cancel = Cancel::new();
        let mut events = 0u64;
        let mut sink = |_: Event| events += 1;
        for step in 0..20 {
            if step == 2 {
                COUNT.store(true, Ordering::SeqCst);
            }
            wait(session.run_into(0, &inputs, &cancel, &mut sink, &mut out)).unwrap();
        }
        COUNT.store(false, Ordering::SeqCst);
        let ours = OURS.swap(0, Ordering::SeqCst);
        // `wait` is the test's own: one allocation a run.
        assert!(ours <= 18, "{ours} allocations in 18 steps, by hand {by_hand}, budget {budget}");
        assert!(out.loads > 0 && events > 0);
    }
}

#[test]
fn between_load_1000_and_load_10000_nothing_is_made_and_memory_stands_still() {
    let device = device();
    let catalog = layers(10, WIDTH);
    let program = chain(&catalog, ROWS, WIDTH, false);
    let mut session = session(&device, &catalog, &program, Budget::Floor, keep());
    let x = random(1, (ROWS * WIDTH) as usize, 1.0);
    let inputs: [(&str, &[u8]); 1] = [("x", bytemuck::cast_slice(&x))];
    let (mut out, cancel) = (Outputs::default(), Cancel::new());
    let read = |session: &ebbtide::Session| {
        let c = device.raw().get_internal_counters().hal;
        let objects = [
            c.buffers.read(),
            c.bind_groups.read(),
            c.compute_pipelines.read(),
            c.command_encoders.read(),
            c.buffer_memory.read(),
            c.memory_allocations.read(),
        ];
        let usage = device.ledger().usage();
        (objects, usage.made, usage.active.total(), usage.peak, device.pipeline_count(), session.bind_groups())
    };
    let (mut loads, mut early) = (0, None);
    let last = if slow(&device) { 3_000 } else { 10_000 };
    while loads < last {
        wait(session.run_into(0, &inputs, &cancel, &mut ebbtide::event::NoEvents, &mut out)).unwrap();
        loads += out.loads;
        if loads >= 1_000 && early.is_none() {
            early = Some((read(&session), rss()));
        }
    }
    let (early, rss_then) = early.unwrap();
    assert!(early.0[0] > 0 && early.0[1] > 0 && early.0[2] > 0, "the counters count: {early:?}");
    assert_eq!(read(&session), early, "buffers, bind groups, pipelines, encoders, bytes, allocations; ledger; ours");
    let drift = rss() as i64 - rss_then as i64;
    assert!(drift < 1 << 20, "the process grew by {drift} bytes");
    println!("drift {drift} bytes from load 1,000 to {loads}");
}

#[test]
fn the_counters_are_those_of_mlx() {
    let device = device();
    let catalog = layers(4, WIDTH);
    let program = chain(&catalog, ROWS, WIDTH, false);
    assert_eq!((device.active_memory(), device.peak_memory()), (0, 0));
    let mut first = session(&device, &catalog, &program, Budget::All, keep());
    let planned = first.set().planned_peak();
    engine::run(&mut first, &random(1, (ROWS * WIDTH) as usize, 1.0)).unwrap();
    assert_eq!((device.active_memory(), device.peak_memory()), (planned, planned));
    drop(first);
    assert_eq!((device.active_memory(), device.peak_memory()), (0, planned));
    device.reset_peak_memory();
    assert_eq!(device.peak_memory(), 0);
    let second = session(&device, &catalog, &program, Budget::Floor, keep());
    assert_eq!(device.peak_memory(), second.set().planned_peak());
    assert!(device.peak_memory() < planned);
}
