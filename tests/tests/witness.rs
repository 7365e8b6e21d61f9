//! B1, B7: the process, not the ledger, says that weights many times larger than the budget never all lie in memory.
//!
//! Measured as resident memory on a software adapter, whose device memory is the process's. (A hard `RLIMIT_AS` cannot be used: Vulkan
//! drivers reserve address space far beyond what they touch.)
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebbtide::caps::AdapterClass;
use ebbtide::compile::Budget;
use ebbtide::{Catalog, Source};
use ebbtide_tests::engine::{self, chain, device, f32s, file, keep, random, rss, slow, wait};

/// What is allowed above the budget: further pipelines (a megabyte each), command buffers, the driver's own pages.
const ALLOWANCE: u64 = 16 << 20;

#[test]
fn weights_of_300_mib_run_in_64_mib_and_the_process_grows_by_no_more() {
    let device = device();
    assert_eq!(device.caps().class, AdapterClass::Software, "the witness needs device memory to be process memory");
    let (layers, width) = if slow(&device) { (20, 1024u64) } else { (75, 1024) };
    let folder = tempfile::tempdir().unwrap();
    let sources = (0..layers)
        .map(|i| {
            let path = folder.path().join(format!("l{i:02}.safetensors"));
            let w = random(i, (width * width) as usize, 0.05);
            std::fs::write(
                &path,
                file(&[f32s("w", &[width, width], &w), f32s("b", &[width], &vec![0.1; width as usize])]),
            )
            .unwrap();
            Source::open(&path).unwrap()
        })
        .collect();
    let catalog = wait(Catalog::from_sources(sources)).unwrap();
    let program = chain(&catalog, 4, width, false);
    let budget = 64u64 << 20;
    let set = engine::compiled(&device, &catalog, &program, Budget::Bytes(budget), keep());
    assert!(slow(&device) || set.weight_bytes > 4 * budget, "{} bytes of weights", set.weight_bytes);
    let planned = set.planned_peak();
    assert!(planned <= budget);
    // The driver's compiler is there before the baseline is taken.
    let small = engine::layers(2, 64);
    let mut warm = engine::session(&device, &small, &chain(&small, 4, 64, false), Budget::Floor, keep());
    engine::run(&mut warm, &random(1, 256, 1.0)).unwrap();
    drop(warm);
    device.reset_peak_memory();
    let (highest, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let baseline = rss();
    let watcher = {
        // The driver's compiler is there before the baseline is taken.
        let small = engine::layers(2, 64);
        let mut warm = engine::session(&device, &small, &chain(&small, 4, 64, false), Budget::Floor, keep());
        engine::run(&mut warm, &random(1, 256, 1.0)).unwrap();
        drop(warm);
        device.reset_peak_memory();
        let (highest, stop) = (highest.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stop.load(Ordering::Acquire) {
                highest.fetch_max(rss(), Ordering::AcqRel);
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        })
    };
    let mut session = wait(ebbtide::Session::new(&device, &catalog, set)).unwrap();
    let x = random(1, (4 * width) as usize, 1.0);
    for _ in 0..2 {
        let (out, _) = engine::run(&mut session, &x).unwrap();
        assert!(out.f32("loss").unwrap()[0].is_finite());
    }
    assert_eq!(device.peak_memory(), planned);
    stop.store(true, Ordering::Release);
    watcher.join().unwrap();
    let grown = highest.load(Ordering::Acquire).saturating_sub(baseline);
    println!("grew by {grown} bytes, planned {planned}, weights {}", session.set().weight_bytes);
    assert!(grown <= budget + ALLOWANCE, "the process grew by {grown} bytes for a budget of {budget}");
}
