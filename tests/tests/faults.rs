//! G1, G2: whatever fails, at whatever place, ends in a typed error, gives the memory back, and leaves a session whose next step
//! has the same bits as if nothing had happened.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use ebbtide::compile::{Action, Budget, Options};
use ebbtide::graph::HookWhen;
use ebbtide::{Cancel, Catalog, Device, DeviceChoice, Error, Event, Graph, Outputs, Program, Session, Source};
use ebbtide_tests::engine::{
    self, Tampered, device, device_of, keep, keep_free_0, layer, once, random, same_step, session, wait,
};

const WIDTH: u64 = 64;
const ROWS: u64 = 16;

fn input() -> Vec<f32> {
    random(3, (ROWS * WIDTH) as usize, 1.0)
}

/// Four layers with hooks of all three moments between them.
fn program(catalog: &Catalog, by_hand: bool) -> Program {
    let mut g = Graph::new();
    let x = g.input("x", [ROWS, WIDTH]).unwrap();
    let mut h = x;
    for (i, segment) in catalog.segments().cloned().collect::<Vec<_>>().iter().enumerate() {
        h = if by_hand {
            g.with(segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?))).unwrap()
        } else {
            let (w, b) = (g.weight(segment, "w").unwrap(), g.weight(segment, "b").unwrap());
            g.matmul(h, w, Some(b)).unwrap()
        };
        let when = [HookWhen::Submitted, HookWhen::Done, HookWhen::Value][i % 3];
        h = g.hook(h, &format!("after {i}"), when, true).unwrap();
        h = g.unary(ebbtide::graph::Unary::Tanh, h).unwrap();
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

fn catalog() -> Catalog {
    engine::layers(4, WIDTH)
}

/// Every way of running that a failure can meet.
fn ways() -> Vec<(bool, Budget, Options)> {
    vec![
        (false, Budget::Floor, keep()),
        (true, Budget::Floor, once()),
        (false, Budget::Percent(75.0), keep()),
        (true, Budget::Floor, keep_free_0()),
        (false, Budget::Floor, keep_free_0()),
    ]
}

fn reference(device: &Device) -> Outputs {
    let catalog = catalog();
    engine::run(&mut session(device, &catalog, &program(&catalog, false), Budget::All, keep()), &input()).unwrap().0
}

fn step(session: &mut Session, cancel: &Cancel, events: &mut dyn ebbtide::EventSink) -> ebbtide::Result<Outputs> {
    wait(session.run(0, &[("x", bytemuck::cast_slice(&input()))], cancel, events))
}

/// After a failure: the memory is that of before, and the next step is as if nothing had happened.
fn settled(what: &str, session: &mut Session, baseline: u64, want: &Outputs) {
    let active = session.device().active_memory();
    assert_eq!(active, baseline, "{what}: bytes after the failure");
    let out =
        step(session, &Cancel::new(), &mut |_: Event| ()).unwrap_or_else(|e| panic!("{what}: the next step: {e}"));
    same_step(what, &out, want);
    assert_eq!(session.device().active_memory(), baseline, "{what}: bytes after the next step");
}

#[test]
fn out_of_memory_at_every_buffer_is_a_typed_error_and_leaves_nothing() {
    let free = device();
    let catalog = catalog();
    let want = reference(&free);
    for (by_hand, budget, options) in [(false, Budget::Percent(75.0), keep()), (true, Budget::Floor, keep_free_0())] {
        let program = program(&catalog, by_hand);
        // How many buffers a session and a step make.
        let before = free.ledger().usage().made;
        let mut plain = session(&free, &catalog, &program, budget, options);
        let made_by_new = free.ledger().usage().made - before;
        engine::run(&mut plain, &input()).unwrap();
        let made = free.ledger().usage().made - before;
        drop(plain);
        assert!(made_by_new > 4);
        for k in 0..made {
            let mut choice = DeviceChoice::from_env();
            choice.faults.out_of_memory_at = Some(k);
            let device = device_of(&choice);
            let set = engine::compiled(&device, &catalog, &program, budget, options);
            let made = wait(Session::new(&device, &catalog, set.clone()));
            let what = format!("{options:?}, buffer {k}");
            if k < made_by_new {
                let error = made.err().expect(&what);
                assert_eq!((error.code(), error.exit_status()), ("out-of-memory", 4), "{what}");
                assert_eq!(device.active_memory(), 0, "{what}");
                let mut again = wait(Session::new(&device, &catalog, set)).unwrap();
                same_step(&what, &engine::run(&mut again, &input()).unwrap().0, &want);
            } else {
                let mut session = made.unwrap();
                let baseline = device.active_memory();
                let error = engine::run(&mut session, &input()).expect_err(&what);
                assert_eq!(error.code(), "out-of-memory", "{what}");
                settled(&what, &mut session, baseline, &want);
            }
            assert_eq!(device.active_memory(), 0, "{what}");
        }
    }
}

#[test]
fn a_device_lost_in_mid_step_is_a_typed_error_and_the_ledger_is_at_its_baseline() {
    for (by_hand, budget, options) in ways() {
        for nth in [0, 2, 5] {
            let device = device();
            let catalog = catalog();
            let mut session = session(&device, &catalog, &program(&catalog, by_hand), budget, options);
            let (raw, count) = (device.clone(), Cell::new(0));
            session.on_hook(move |_| {
                if count.replace(count.get() + 1) == nth {
                    raw.raw().destroy();
                }
                Ok(())
            });
            let error = engine::run(&mut session, &input()).expect_err("the device is gone");
            assert_eq!((error.code(), error.exit_status()), ("device-lost", 4), "{error}");
            let again = engine::run(&mut session, &input()).expect_err("it stays gone");
            assert_eq!(again.code(), "device-lost", "{again}");
            drop(session);
            assert_eq!((device.active_memory(), device.ledger().usage().buffers), (0, 0));
            let set = engine::compiled(&device, &catalog, &program(&catalog, by_hand), budget, options);
            assert_eq!(wait(Session::new(&device, &catalog, set)).err().expect("gone").code(), "device-lost");
            assert_eq!(device.active_memory(), 0);
        }
    }
}

#[test]
fn a_failing_read_at_every_chunk_is_an_error_and_never_zeros() {
    let device = device();
    let want = reference(&device);
    // Reads left until the failure; negative: none fails.
    let left = Arc::new(AtomicI64::new(-1));
    let kind = Arc::new(AtomicU64::new(0));
    let sources = (0..4)
        .map(|i| {
            let (left, kind) = (left.clone(), kind.clone());
            Tampered::source(&format!("l{i:02}"), layer(100 + i, WIDTH), move |_, _| {
                if left.fetch_sub(1, Ordering::AcqRel) != 0 {
                    return None;
                }
                match kind.load(Ordering::Acquire) {
                    0 => Some(Err(std::io::Error::from_raw_os_error(5))),
                    1 => Some(Ok(0)),
                    _ => Some(Ok(usize::MAX)),
                }
            })
        })
        .collect();
    let catalog = wait(Catalog::from_sources(sources)).unwrap();
    for (by_hand, budget, options) in ways() {
        let mut session = session(&device, &catalog, &program(&catalog, by_hand), budget, options);
        let baseline = device.active_memory();
        let mut failures = 0;
        for n in 0.. {
            kind.store(n % 3, Ordering::Release);
            left.store(n as i64, Ordering::Release);
            let result = step(&mut session, &Cancel::new(), &mut |_: Event| ());
            let all_read = left.swap(-1, Ordering::AcqRel) >= 0;
            if all_read {
                same_step("no read failed", &result.unwrap(), &want);
                break;
            }
            let error = result.err().unwrap_or_else(|| panic!("read {n} failed and nobody noticed"));
            assert_eq!((error.code(), error.exit_status()), ("io", 2), "{error}");
            assert!(error.to_string().contains("l0"), "the file is named: {error}");
            failures += 1;
            settled(&format!("{options:?} {budget}, read {n}"), &mut session, baseline, &want);
        }
        assert!(failures >= 4, "{failures} reads");
    }
}

#[test]
fn reads_that_come_short_are_continued() {
    let device = device();
    let want = reference(&device);
    let sources = (0..4).map(|i| {
        let bytes = layer(100 + i, WIDTH);
        let copy = bytes.clone();
        Tampered::source(&format!("l{i:02}"), bytes, move |offset, buf| {
            let n = buf.len().min(1 + (offset as usize * 7) % 999);
            buf[..n].copy_from_slice(&copy[offset as usize..offset as usize + n]);
            Some(Ok(n))
        })
    });
    let catalog = wait(Catalog::from_sources(sources.collect())).unwrap();
    let mut session = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
    same_step("short reads", &engine::run(&mut session, &input()).unwrap().0, &want);
}

#[test]
fn a_reader_of_the_callers_that_panics_is_an_error_and_not_a_hang() {
    let device = device();
    let want = reference(&device);
    let armed = Arc::new(AtomicI64::new(-1));
    let sources = (0..4).map(|i| {
        let armed = armed.clone();
        Tampered::source(&format!("l{i:02}"), layer(100 + i, WIDTH), move |_, _| {
            assert!(armed.fetch_sub(1, Ordering::AcqRel) != 0, "injected by a test");
            None
        })
    });
    let catalog = wait(Catalog::from_sources(sources.collect())).unwrap();
    let mut session = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
    let baseline = device.active_memory();
    for n in [0, 3] {
        armed.store(n, Ordering::Release);
        let error = step(&mut session, &Cancel::new(), &mut |_: Event| ()).expect_err("the reader panicked");
        assert_eq!(error.code(), "io", "{error}");
        armed.store(-1, Ordering::Release);
        settled("a reader that panicked", &mut session, baseline, &want);
    }
}

#[test]
fn a_file_that_changes_between_steps_is_noticed_before_its_bytes_are_used() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let path = |i: u64| folder.path().join(format!("l{i:02}.safetensors"));
    type Change = fn(&std::path::Path, &[u8]);
    let changes: [(&str, Change); 4] = [
        ("cut by a byte", |p, b| std::fs::write(p, &b[..b.len() - 1]).unwrap()),
        ("cut to its header", |p, b| std::fs::write(p, &b[..200]).unwrap()),
        ("replaced", |p, b| {
            std::fs::write(p.with_extension("new"), b).unwrap();
            std::fs::rename(p.with_extension("new"), p).unwrap();
        }),
        ("gone", |p, _| std::fs::remove_file(p).unwrap()),
    ];
    for (what, change) in changes {
        for i in 0..4 {
            std::fs::write(path(i), layer(100 + i, WIDTH)).unwrap();
        }
        let sources = (0..4).map(|i| Source::open(path(i)).unwrap()).collect();
        let catalog = wait(Catalog::from_sources(sources)).unwrap();
        let mut session = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
        let baseline = device.active_memory();
        engine::run(&mut session, &input()).unwrap();
        change(&path(2), &layer(102, WIDTH));
        for _ in 0..2 {
            let error = engine::run(&mut session, &input()).expect_err(what);
            assert!(matches!(error, Error::SourceChanged { .. } | Error::Io { .. }), "{what}: {error}");
            assert!(what == "gone" || error.code() == "source-changed", "{what}: {error}");
            assert_eq!(device.active_memory(), baseline, "{what}");
        }
    }
}

#[test]
fn a_file_that_changes_in_the_middle_of_a_step_is_noticed_too() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let path = |i: u64| folder.path().join(format!("l{i:02}.safetensors"));
    (0..4).for_each(|i| std::fs::write(path(i), layer(100 + i, WIDTH)).unwrap());
    let catalog = wait(Catalog::from_sources((0..4).map(|i| Source::open(path(i)).unwrap()).collect())).unwrap();
    let mut session = session(&device, &catalog, &program(&catalog, true), Budget::Floor, once());
    let victim = path(3);
    session.on_hook(move |call| {
        if call.name == "after 1" {
            let bytes = std::fs::read(&victim).unwrap();
            std::fs::write(&victim, &bytes[..bytes.len() - 100]).unwrap();
        }
        Ok(())
    });
    let error = engine::run(&mut session, &input()).expect_err("cut short");
    assert_eq!((error.code(), error.exit_status()), ("source-changed", 1), "{error}");
}

#[test]
fn a_hook_that_fails_or_panics_at_every_call_leaves_the_session_as_it_was() {
    let device = device();
    let want = reference(&device);
    let catalog = catalog();
    for (by_hand, budget, options) in ways() {
        let mut session = session(&device, &catalog, &program(&catalog, by_hand), budget, options);
        let baseline = device.active_memory();
        let (at, seen) = (Rc::new(Cell::new(usize::MAX)), Rc::new(Cell::new(0)));
        let (a, s) = (at.clone(), seen.clone());
        let panics = Rc::new(Cell::new(false));
        let p = panics.clone();
        session.on_hook(move |call| {
            let n = s.replace(s.get() + 1);
            if n == a.get() {
                assert!(!p.get(), "injected by a test");
                return Err(Error::Hook { hook: call.name.into(), reason: "injected".into() });
            }
            Ok(())
        });
        for n in 0..8 {
            for panicking in [false, true] {
                panics.set(panicking);
                seen.set(0);
                at.set(n);
                let what = format!("{options:?} {budget}, call {n}, panic {panicking}");
                let result = catch_unwind(AssertUnwindSafe(|| step(&mut session, &Cancel::new(), &mut |_: Event| ())));
                at.set(usize::MAX);
                if panicking {
                    // The future was dropped in the middle of the run.
                    assert!(result.is_err(), "{what}");
                    let out = step(&mut session, &Cancel::new(), &mut |_: Event| ()).unwrap();
                    same_step(&what, &out, &want);
                    assert_eq!(device.active_memory(), baseline, "{what}");
                } else {
                    let error = result.unwrap().expect_err(&what);
                    assert_eq!((error.code(), error.exit_status()), ("hook", 1));
                    settled(&what, &mut session, baseline, &want);
                }
            }
        }
        // The last failing run and the one after it.
        assert_eq!(seen.get(), 16, "four hooks, forward and backward");
    }
}

#[test]
fn cancelling_at_every_event_and_every_hook_leaves_the_session_as_it_was() {
    let device = device();
    let want = reference(&device);
    let catalog = catalog();
    for (by_hand, budget, options) in ways() {
        let mut session = session(&device, &catalog, &program(&catalog, by_hand), budget, options);
        let baseline = device.active_memory();
        let token: Rc<RefCell<(Cancel, i64)>> = Rc::new(RefCell::new((Cancel::new(), -1)));
        let t = token.clone();
        let tick = move || {
            let mut t = t.borrow_mut();
            t.1 -= 1;
            if t.1 == -1 {
                t.0.cancel();
            }
        };
        let in_hook = tick.clone();
        session.on_hook(move |_| {
            in_hook();
            Ok(())
        });
        let mut cancelled = 0;
        for n in 0..10_000 {
            let cancel = Cancel::new();
            *token.borrow_mut() = (cancel.clone(), n);
            let mut sink = |_: Event| tick();
            let result = step(&mut session, &cancel, &mut sink);
            let what = format!("{options:?} {budget}, cancelled at {n}");
            match result {
                Err(error) => {
                    assert_eq!((error.code(), error.exit_status()), ("cancelled", 130), "{what}");
                    cancelled += 1;
                    token.borrow_mut().1 = i64::MAX;
                    settled(&what, &mut session, baseline, &want);
                }
                // Cancelled too late to matter: the step is done and whole.
                Ok(out) => same_step(&what, &out, &want),
            }
            if token.borrow().1 >= 0 && token.borrow().1 < 10_000 {
                break;
            }
        }
        assert!(cancelled >= 10, "{cancelled}");
    }
}

#[test]
fn a_run_that_was_cancelled_before_it_began_does_no_work() {
    let device = device();
    let catalog = catalog();
    let mut session = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
    let cancel = Cancel::new();
    cancel.cancel();
    let mut events: Vec<Event> = Vec::new();
    for _ in 0..2 {
        let error = step(&mut session, &cancel, &mut events).err().unwrap();
        assert_eq!(error.code(), "cancelled");
    }
    assert_eq!(engine::loads(&events), 0);
}

#[test]
fn an_event_sink_that_panics_leaves_the_session_usable() {
    let device = device();
    let want = reference(&device);
    let catalog = catalog();
    for (by_hand, budget, options) in ways() {
        let mut session = session(&device, &catalog, &program(&catalog, by_hand), budget, options);
        let baseline = device.active_memory();
        for n in 0..8 {
            let mut left = n;
            let mut sink = |_: Event| {
                left -= 1;
                assert!(left != -1, "injected by a test");
            };
            let _ = catch_unwind(AssertUnwindSafe(|| step(&mut session, &Cancel::new(), &mut sink)));
            let out = step(&mut session, &Cancel::new(), &mut |_: Event| ()).unwrap();
            same_step(&format!("{options:?} {budget}, event {n}"), &out, &want);
            assert_eq!(device.active_memory(), baseline);
        }
    }
}

#[test]
fn a_session_dropped_while_a_slow_read_is_under_way_is_safe_and_gives_everything_back() {
    let device = device();
    for n in 0..6 {
        let slow = Arc::new(AtomicI64::new(0));
        let sources = (0..4).map(|i| {
            let slow = slow.clone();
            Tampered::source(&format!("l{i:02}"), layer(100 + i, WIDTH), move |_, buf| {
                if slow.load(Ordering::Acquire) != 0 {
                    // Writes into the chunk for as long as the read lasts, as a disk does.
                    for _ in 0..20 {
                        buf.fill(7);
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                }
                None
            })
        });
        let catalog = wait(Catalog::from_sources(sources.collect())).unwrap();
        let budget = if n % 2 == 0 { Budget::Floor } else { Budget::Percent(80.0) };
        let mut session = session(
            &device,
            &catalog,
            &program(&catalog, n % 3 == 0),
            budget,
            if n % 3 == 0 { once() } else { keep() },
        );
        slow.store(1, Ordering::Release);
        session.on_hook(|_| panic!("injected by a test"));
        assert!(catch_unwind(AssertUnwindSafe(|| engine::run(&mut session, &input()))).is_err());
        drop(session);
        assert_eq!(device.active_memory(), 0);
    }
    let catalog = catalog();
    let want = reference(&device);
    let mut next = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
    same_step("after sessions dropped in mid-read", &engine::run(&mut next, &input()).unwrap().0, &want);
}

#[test]
fn wrong_inputs_are_refused_before_anything_is_done() {
    let device = device();
    let catalog = catalog();
    let mut session = session(&device, &catalog, &program(&catalog, false), Budget::Floor, keep());
    let x = input();
    let bytes: &[u8] = bytemuck::cast_slice(&x);
    let mut events: Vec<Event> = Vec::new();
    for (plan, inputs, code) in [
        (0, vec![], "not-found"),
        (0, vec![("y", bytes)], "not-found"),
        (0, vec![("x", bytes), ("y", bytes)], "not-found"),
        (0, vec![("x", &bytes[4..])], "shape"),
        (1, vec![("x", bytes)], "not-found"),
    ] {
        let error = wait(session.run(plan, &inputs, &Cancel::new(), &mut events)).err().unwrap();
        assert_eq!((error.code(), error.exit_status()), (code, 2), "{error}");
    }
    assert!(events.is_empty());
    let reads = session.set().plans[0].actions.iter().filter(|a| matches!(a, Action::Load { .. })).count();
    assert_eq!(engine::run(&mut session, &x).unwrap().0.loads, reads as u64);
}
