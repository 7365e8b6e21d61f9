//! `verify` refuses every plan that is broken in one place: a weight freed one action early, a load outside its window, a slot too
//! small, memory that does not add up.
//!
//! Plans are real ones; each test breaks one thing and names the action at which the break must be found. The last test removes and
//! swaps every single load and eviction of a set of plans by machine, and runs what is still accepted: it must be the same step.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::caps::Caps;
use ebbtide::compile::{Action, Binding, Budget, Content, Options, PlanSet, SlotId, compile_with, verify};
use ebbtide::error::Error;
use ebbtide_tests::engine::{self, chain, keep, keep_free_0, layers, once, random, same_step, wait};

const WIDTH: u64 = 64;
const ROWS: u64 = 8;

fn caps() -> Caps {
    Caps::webgpu_defaults()
}

fn set_of(layers_: u64, by_hand: bool, room: u64, options: Options) -> PlanSet {
    let catalog = layers(layers_, WIDTH);
    let program = chain(&catalog, ROWS, WIDTH, by_hand);
    let compile = |budget| compile_with(std::slice::from_ref(&program), &catalog, &caps(), budget, options).unwrap();
    let floor = compile(Budget::Floor);
    compile(Budget::Bytes(floor.floor + room * floor.segments[0].device_bytes()))
}

/// By hand, automatic at the floor, automatic with prefetch, automatic once, `keep_free: 0` both ways.
fn sets() -> Vec<(&'static str, PlanSet)> {
    vec![
        ("by hand", set_of(4, true, 0, once())),
        ("floor", set_of(4, false, 0, keep())),
        ("prefetch", set_of(4, false, 1, keep())),
        ("once", set_of(4, false, 1, once())),
        ("keep_free: 0 by hand", set_of(4, true, 0, keep_free_0())),
        ("keep_free: 0", set_of(4, false, 0, keep_free_0())),
    ]
}

fn check(set: &PlanSet) -> Result<(), Error> {
    verify(&set.plans[0], set, &caps(), true)
}

/// Breaks a set and requires that the break is found, at this action where one is given.
fn refused(what: &str, set: &PlanSet, at: Option<usize>, break_it: impl FnOnce(&mut PlanSet)) {
    check(set).expect("the plan is valid before it is broken");
    let mut broken = set.clone();
    break_it(&mut broken);
    match check(&broken) {
        Err(Error::Plan { action, reason }) => {
            if let Some(at) = at {
                assert_eq!(action, at, "{what}: found at another place ({reason})");
            }
        }
        other => panic!("{what}: {other:?}"),
    }
}

fn loads(set: &PlanSet) -> Vec<usize> {
    (0..set.plans[0].actions.len()).filter(|i| matches!(set.plans[0].actions[*i], Action::Load { .. })).collect()
}

fn evicts(set: &PlanSet) -> Vec<usize> {
    (0..set.plans[0].actions.len()).filter(|i| matches!(set.plans[0].actions[*i], Action::Evict { .. })).collect()
}

fn slot_of(action: &Action) -> Option<(u32, SlotId)> {
    match action {
        Action::Load { segment, slot, .. } | Action::Evict { segment, slot, .. } => Some((*segment, *slot)),
        _ => None,
    }
}

fn reads_segment(action: &Action, segment: u32, slot: SlotId) -> bool {
    let Action::Dispatch { bindings, .. } = action else {
        return false;
    };
    bindings.iter().any(|b| b.slot == slot && matches!(b.content, Content::Weight { segment: s, .. } if s == segment))
}

/// Removes an action and keeps every index into the list right.
fn remove(set: &mut PlanSet, at: usize) {
    let plan = &mut set.plans[0];
    plan.actions.remove(at);
    let at = at as u32;
    plan.fills.retain(|f| *f != at);
    plan.fills.iter_mut().filter(|f| **f > at).for_each(|f| *f -= 1);
    for action in &mut plan.actions {
        if let Action::Load { by, .. } = action
            && *by > at
        {
            *by -= 1;
        }
    }
    if plan.updates_from > at {
        plan.updates_from -= 1;
    }
}

/// Exchanges two neighbours; windows stay where they were.
fn swap(set: &mut PlanSet, at: usize) {
    let plan = &mut set.plans[0];
    plan.actions.swap(at, at + 1);
    let (a, b) = (at as u32, at as u32 + 1);
    for f in &mut plan.fills {
        *f = if *f == a {
            b
        } else if *f == b {
            a
        } else {
            *f
        };
    }
    // The ring's order is by the action that needs the bytes: made again, as the planner would, so that only the swap is wrong.
    let key = |f: &u32| match &plan.actions[*f as usize] {
        Action::Load { by, .. } => (*by, *f),
        _ => (*f, *f),
    };
    let mut fills = plan.fills.clone();
    fills.sort_by_key(key);
    plan.fills = fills;
}

fn with_bindings(set: &mut PlanSet, at: usize, change: impl FnOnce(&mut Vec<Binding>)) {
    let Action::Dispatch { bindings, .. } = &mut set.plans[0].actions[at] else { panic!("action {at} is no dispatch") };
    let mut list = bindings.to_vec();
    change(&mut list);
    *bindings = list.into();
}

/// The dispatches that read a weight.
fn readers(set: &PlanSet) -> Vec<usize> {
    let is = |a: &Action| matches!(a, Action::Dispatch { bindings, .. } if bindings.iter().any(|b| matches!(b.content, Content::Weight { .. })));
    (0..set.plans[0].actions.len()).filter(|i| is(&set.plans[0].actions[*i])).collect()
}

#[test]
fn real_plans_are_accepted() {
    for (what, set) in sets() {
        check(&set).unwrap_or_else(|e| panic!("{what}: {e}"));
        verify(&set.to_home, &set, &caps(), false).unwrap();
    }
}

#[test]
fn a_weight_freed_one_action_early_is_found_at_its_reader() {
    for (what, set) in sets() {
        for at in evicts(&set) {
            let (segment, slot) = slot_of(&set.plans[0].actions[at]).unwrap();
            let Some(reader) = (0..at).rev().find(|i| reads_segment(&set.plans[0].actions[*i], segment, slot)) else {
                continue;
            };
            refused(&format!("{what}: eviction {at} before reader {reader}"), &set, None, |s| {
                for i in (reader..at).rev() {
                    swap(s, i);
                }
            });
            if reader + 1 == at {
                refused(&format!("{what}: eviction {at} one action early"), &set, Some(at), |s| swap(s, at - 1));
            }
        }
    }
}

#[test]
fn a_dropped_load_is_found_at_the_first_reader_or_at_home() {
    for (what, set) in sets() {
        for at in loads(&set) {
            let (segment, slot) = slot_of(&set.plans[0].actions[at]).unwrap();
            let actions = &set.plans[0].actions;
            let next = (at + 1..actions.len()).find(|i| {
                reads_segment(&actions[*i], segment, slot)
                    || matches!(&actions[*i], Action::Evict { slot: s, .. } if *s == slot)
            });
            refused(
                &format!("{what}: load {at} dropped"),
                &set,
                next.map(|n| n - 1).or(Some(actions.len() - 1)),
                |s| remove(s, at),
            );
        }
    }
}

#[test]
fn a_window_that_ends_after_its_first_reader_is_found_there() {
    for (what, set) in sets() {
        for at in loads(&set) {
            let actions = &set.plans[0].actions;
            let (segment, slot) = slot_of(&actions[at]).unwrap();
            let Some(reader) = (at + 1..actions.len()).find(|i| reads_segment(&actions[*i], segment, slot)) else {
                continue;
            };
            refused(&format!("{what}: load {at} by {}", reader + 1), &set, Some(reader), |s| {
                if let Action::Load { by, .. } = &mut s.plans[0].actions[at] {
                    *by = reader as u32 + 1;
                }
            });
            refused(&format!("{what}: load {at} by nothing"), &set, Some(at), |s| {
                if let Action::Load { by, .. } = &mut s.plans[0].actions[at] {
                    *by = at as u32;
                }
            });
            refused(&format!("{what}: load {at} ends after the plan"), &set, None, |s| {
                let end = s.plans[0].actions.len() as u32;
                if let Action::Load { by, .. } = &mut s.plans[0].actions[at] {
                    *by = end + 1;
                }
            });
        }
    }
}

#[test]
fn a_window_opened_over_a_reader_of_the_slots_last_content_is_found_at_the_load() {
    let mut tried = 0;
    for (what, set) in sets() {
        for at in loads(&set) {
            let actions = &set.plans[0].actions;
            let (_, slot) = slot_of(&actions[at]).unwrap();
            // The slot's last reader before the load; the load is moved before it and the eviction left behind.
            let last = (0..at).rev().find(|i| {
                matches!(&actions[*i], Action::Dispatch { bindings, .. } if bindings.iter().any(|b| b.slot == slot))
            });
            let Some(last) = last else { continue };
            tried += 1;
            refused(&format!("{what}: load {at} moved before {last}"), &set, Some(last), |s| {
                for i in (last..at).rev() {
                    swap(s, i);
                }
            });
        }
    }
    assert!(tried > 10);
}

#[test]
fn a_binding_that_is_moved_resized_or_misaligned_is_found_where_it_is() {
    for (what, set) in sets() {
        let at = readers(&set)[1];
        let weight = |b: &Binding| matches!(b.content, Content::Weight { .. });
        type Change = fn(&mut Binding);
        let changes: [(&str, Change); 7] = [
            ("256 further", |b| b.offset += 256),
            ("4 further", |b| b.offset += 4),
            ("four bytes more", |b| b.size += 4),
            ("four bytes less", |b| b.size -= 4),
            ("nothing", |b| b.size = 0),
            ("another buffer", |b| b.buffer += 1),
            ("past the end of numbers", |b| b.offset = u64::MAX - 255),
        ];
        for (how, change) in changes {
            refused(&format!("{what}: weight, {how}"), &set, Some(at), |s| {
                with_bindings(s, at, |list| change(list.iter_mut().find(|b| weight(b)).unwrap()));
            });
            if how != "four bytes less" {
                refused(&format!("{what}: value, {how}"), &set, Some(at), |s| {
                    with_bindings(s, at, |list| change(list.iter_mut().find(|b| !weight(b)).unwrap()));
                });
            }
        }
        refused(&format!("{what}: a slot that does not exist"), &set, Some(at), |s| {
            with_bindings(s, at, |list| list[0].slot = SlotId(9999));
        });
        refused(&format!("{what}: another slot"), &set, Some(at), |s| {
            let all = s.table.slots.len() as u32;
            with_bindings(s, at, |list| {
                let b = list.iter_mut().find(|b| weight(b)).unwrap();
                b.slot = SlotId((b.slot.0 + 1) % all);
            });
        });
        refused(&format!("{what}: a binding less"), &set, Some(at), |s| {
            with_bindings(s, at, |list| {
                list.pop();
            });
        });
        refused(&format!("{what}: a weight is written"), &set, Some(at), |s| {
            with_bindings(s, at, |list| list.iter_mut().find(|b| weight(b)).unwrap().write = true);
        });
    }
}

#[test]
fn an_output_in_the_slot_of_an_input_is_found() {
    for (what, set) in sets() {
        for at in readers(&set) {
            refused(&format!("{what}: dispatch {at}"), &set, Some(at), |s| {
                with_bindings(s, at, |list| {
                    let from = list.iter().find(|b| !b.write && matches!(b.content, Content::Value(_))).unwrap().slot;
                    list.iter_mut().find(|b| b.write).unwrap().slot = from;
                });
            });
        }
    }
}

#[test]
fn a_slot_smaller_than_its_segment_or_its_value_is_found() {
    for (what, set) in sets() {
        for slot in 0..set.table.slots.len() {
            refused(&format!("{what}: slot {slot} four bytes smaller"), &set, None, |s| {
                s.table.slots[slot].buffers[0] -= 4
            });
            // What only the prologue makes may grow until the prologue's sum is the highest.
            if set.options.keep_free_0 || !set.table.slots[slot].dynamic {
                refused(&format!("{what}: slot {slot} larger"), &set, None, |s| s.table.slots[slot].buffers[0] += 256);
            }
            refused(&format!("{what}: slot {slot} without bytes"), &set, None, |s| s.table.slots[slot].buffers[0] = 0);
        }
    }
}

#[test]
fn memory_that_does_not_add_up_is_found() {
    for (what, set) in sets() {
        refused(&format!("{what}: the budget a byte below the peak"), &set, None, |s| s.budget = s.planned_peak() - 1);
        refused(&format!("{what}: an upload chunk more"), &set, None, |s| s.table.upload.chunks += 1);
        refused(&format!("{what}: a larger readback chunk"), &set, None, |s| s.table.readback.chunk += 4);
        refused(&format!("{what}: a larger uniform buffer"), &set, None, |s| s.table.uniforms += 256);
        refused(&format!("{what}: a smaller uniform buffer"), &set, None, |s| s.table.uniforms -= 256);
        refused(&format!("{what}: parameters missing"), &set, None, |s| {
            let short = s.uniforms.len() - 16;
            s.uniforms.truncate(short);
        });
        refused(&format!("{what}: a slot that nobody planned"), &set, None, |s| {
            let slot = s.table.slots.iter().find(|s| !s.dynamic).unwrap().clone();
            s.table.slots.push(slot);
        });
        refused(&format!("{what}: no upload ring"), &set, None, |s| s.table.upload.chunks = 0);
        refused(&format!("{what}: a buffer above 128 MiB"), &set, None, |s| {
            let slot = s.table.slots.iter_mut().find(|s| s.category == ebbtide::compile::Category::Weights).unwrap();
            slot.buffers[0] = (128 << 20) + 4;
        });
    }
}

#[test]
fn a_grid_or_parameters_outside_the_caps_are_found_where_they_are() {
    for (what, set) in sets() {
        let at = readers(&set)[0];
        let change = |s: &mut PlanSet, f: &dyn Fn(&mut [u32; 2], &mut u32)| {
            if let Action::Dispatch { grid, params, .. } = &mut s.plans[0].actions[at] {
                f(grid, params);
            }
        };
        refused(&format!("{what}: 70,000 workgroups"), &set, Some(at), |s| change(s, &|g, _| g[0] = 70_000));
        refused(&format!("{what}: 70,000 rows of workgroups"), &set, Some(at), |s| change(s, &|g, _| g[1] = 70_000));
        refused(&format!("{what}: no workgroups"), &set, Some(at), |s| change(s, &|g, _| g[1] = 0));
        refused(&format!("{what}: misaligned parameters"), &set, Some(at), |s| change(s, &|_, p| *p += 16));
        refused(&format!("{what}: parameters past the end"), &set, Some(at), |s| change(s, &|_, p| *p = 1 << 20));
    }
}

#[test]
fn a_read_before_its_write_is_found_at_the_read() {
    for (what, set) in sets() {
        let actions = &set.plans[0].actions;
        let mut tried = 0;
        for at in 0..actions.len() - 1 {
            // A neighbour that reads what this one writes.
            let written: Vec<Content> = match &actions[at] {
                Action::Dispatch { bindings, .. } => bindings.iter().filter(|b| b.write).map(|b| b.content).collect(),
                Action::Upload { to, .. } => vec![to.content],
                _ => continue,
            };
            let Action::Dispatch { bindings, .. } = &actions[at + 1] else {
                continue;
            };
            if bindings.iter().any(|b| !b.write && written.contains(&b.content)) {
                tried += 1;
                refused(&format!("{what}: {at} after {}", at + 1), &set, Some(at), |s| swap(s, at));
                refused(&format!("{what}: {at} dropped"), &set, None, |s| remove(s, at));
            }
        }
        assert!(tried >= 3, "{what}: {tried}");
    }
}

#[test]
fn a_wrong_home_is_found() {
    for (what, set) in sets() {
        if set.home.is_empty() {
            // A set that keeps nothing: a home that is claimed is not there at the end.
            refused(&format!("{what}: a home"), &set, None, |s| {
                s.home.push((SlotId(s.table.slots.len() as u32 - 1), 0))
            });
            continue;
        }
        refused(&format!("{what}: another segment"), &set, None, |s| s.home[0].1 += 1);
        refused(&format!("{what}: another slot"), &set, None, |s| s.home[0].0 = SlotId(0));
        refused(&format!("{what}: no home"), &set, None, |s| s.home.clear());
        refused(&format!("{what}: a slot that does not exist"), &set, None, |s| s.home[0].0 = SlotId(9999));
        let error = verify(&set.plans[0], &set, &caps(), false).unwrap_err();
        assert_eq!(error.code(), "plan", "{what}: empty slots at entry");
        // The way home must lead there.
        let mut broken = set.clone();
        broken.to_home.actions.pop();
        broken.to_home.fills.pop();
        assert!(verify(&broken.to_home, &broken, &caps(), false).is_err());
    }
}

#[test]
fn dynamic_slots_that_are_made_or_freed_at_the_wrong_time_are_found() {
    for (what, set) in sets().into_iter().filter(|(_, s)| s.options.keep_free_0) {
        let actions = set.plans[0].actions.clone();
        for (at, action) in actions.iter().enumerate() {
            match action {
                Action::Free { .. } => {
                    refused(&format!("{what}: free {at} before its eviction"), &set, Some(at - 1), |s| swap(s, at - 1));
                    refused(&format!("{what}: free {at} dropped"), &set, None, |s| remove(s, at));
                    // One action late, the next slot stands beside it: the peak is not the planned one.
                    if matches!(actions.get(at + 1), Some(Action::Alloc { .. })) {
                        refused(&format!("{what}: free {at} late"), &set, None, |s| swap(s, at));
                    }
                }
                Action::Alloc { .. } => {
                    refused(&format!("{what}: alloc {at} dropped"), &set, Some(at), |s| remove(s, at));
                    refused(&format!("{what}: alloc {at} after its load"), &set, Some(at), |s| swap(s, at));
                }
                _ => {}
            }
        }
        let dynamic = set.table.slots.iter().position(|s| s.dynamic).unwrap();
        refused(&format!("{what}: a dynamic slot that is not"), &set, None, |s| s.table.slots[dynamic].dynamic = false);
        let fixed = set.table.slots.iter().position(|s| !s.dynamic).unwrap();
        refused(&format!("{what}: a static slot that is dynamic"), &set, None, |s| s.table.slots[fixed].dynamic = true);
    }
}

#[test]
fn another_order_of_the_ring_is_found() {
    for (what, set) in sets() {
        for i in 0..set.plans[0].fills.len() - 1 {
            refused(&format!("{what}: fills {i}"), &set, None, |s| s.plans[0].fills.swap(i, i + 1));
        }
        refused(&format!("{what}: a fill less"), &set, None, |s| {
            s.plans[0].fills.pop();
        });
        refused(&format!("{what}: a fill twice"), &set, None, |s| {
            let first = s.plans[0].fills[0];
            s.plans[0].fills.push(first);
        });
    }
}

#[test]
fn a_session_refuses_a_broken_set_before_it_makes_a_buffer() {
    let device = engine::device();
    let catalog = layers(4, WIDTH);
    let program = chain(&catalog, ROWS, WIDTH, false);
    let made = device.ledger().usage().made;
    let set = engine::compiled(&device, &catalog, &program, Budget::Floor, keep());
    let mut broken = set.clone();
    remove(&mut broken, loads(&set)[0]);
    let mut not_home = set;
    not_home.to_home.actions.clear();
    not_home.to_home.fills.clear();
    for set in [broken, not_home] {
        let error = wait(ebbtide::Session::new(&device, &catalog, set)).err().expect("refused");
        assert_eq!((error.code(), error.exit_status()), ("plan", 1));
    }
    assert_eq!(device.ledger().usage().made, made);
}

/// Every single load and eviction of each plan removed, moved one place up or down, or given another window: refused, or the step
/// is the same.
#[test]
fn every_mutation_of_a_load_or_an_eviction_is_refused_or_changes_nothing() {
    let device = engine::device();
    let catalog = layers(4, WIDTH);
    let x = random(9, (ROWS * WIDTH) as usize, 1.0);
    let program = chain(&catalog, ROWS, WIDTH, false);
    let want = engine::run(&mut engine::session(&device, &catalog, &program, Budget::All, keep()), &x).unwrap().0;
    let (mut refusals, mut accepted) = (0, Vec::new());
    for (what, set) in sets() {
        let actions = set.plans[0].actions.clone();
        for (at, action) in actions.iter().enumerate() {
            if !matches!(
                action,
                Action::Load { .. } | Action::Evict { .. } | Action::Alloc { .. } | Action::Free { .. }
            ) {
                continue;
            }
            let mut mutants = Vec::new();
            let mut push = |how: String, f: &dyn Fn(&mut PlanSet)| {
                let mut mutant = set.clone();
                f(&mut mutant);
                mutants.push((format!("{what}, action {at}: {how}"), mutant));
            };
            push("removed".into(), &|s| remove(s, at));
            if at > 0 {
                push("up".into(), &|s| swap(s, at - 1));
            }
            if at + 1 < actions.len() {
                push("down".into(), &|s| swap(s, at));
            }
            if let Action::Load { by, .. } = action {
                for moved in [by - 1, by + 1] {
                    push(format!("by {moved}"), &|s| {
                        if let Action::Load { by, .. } = &mut s.plans[0].actions[at] {
                            *by = moved;
                        }
                        let plan = &mut s.plans[0];
                        let key = |f: &u32| match &plan.actions[*f as usize] {
                            Action::Load { by, .. } => (*by, *f),
                            _ => (*f, *f),
                        };
                        let mut fills = plan.fills.clone();
                        fills.sort_by_key(key);
                        plan.fills = fills;
                    });
                }
            }
            for (how, mutant) in mutants {
                match check(&mutant) {
                    Err(Error::Plan { .. }) => refusals += 1,
                    Err(other) => panic!("{how}: {other}"),
                    Ok(()) => accepted.push((how, mutant)),
                }
            }
        }
    }
    assert!(refusals > 100, "{refusals} refusals");
    assert!(accepted.len() * 2 < refusals, "{} accepted, {refusals} refused", accepted.len());
    for (how, mutant) in accepted {
        let planned = mutant.planned_peak();
        device.reset_peak_memory();
        let mut session =
            wait(ebbtide::Session::new(&device, &catalog, mutant)).unwrap_or_else(|e| panic!("{how}: {e}"));
        for _ in 0..2 {
            same_step(&how, &engine::run(&mut session, &x).unwrap().0, &want);
        }
        assert!(device.peak_memory() <= planned, "{how}");
    }
}
