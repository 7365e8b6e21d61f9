//! Loads are as few as they can be, counted where they happen, and never change a bit.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::compile::{Action, Budget, Content};
use ebbtide_tests::engine::{self, chain, device, keep, layers, loads, random, same_step, session};

const L: u64 = 12;
const WIDTH: u64 = 64;
const ROWS: u64 = 8;

#[test]
fn twelve_layers_with_room_for_c_cost_exactly_two_loads_for_each_that_does_not_fit() {
    let device = device();
    let catalog = layers(L, WIDTH);
    let program = chain(&catalog, ROWS, WIDTH, false);
    let x = random(7, (ROWS * WIDTH) as usize, 1.0);
    let all = engine::compiled(&device, &catalog, &program, Budget::All, keep());
    let segment = all.segments[0].device_bytes();
    assert!(all.segments.iter().all(|s| s.device_bytes() == segment));
    let want = engine::run(&mut session(&device, &catalog, &program, Budget::All, keep()), &x).unwrap().0;
    assert_eq!(want.loads, 0, "with everything resident nothing is loaded in a step");
    for c in 1..L {
        let mut session = session(&device, &catalog, &program, Budget::Bytes(all.floor + (c - 1) * segment), keep());
        let set = session.set();
        let budget = all.floor + (c - 1) * segment;
        let planned = set.planned_peak();
        assert!(planned <= budget && budget - planned < segment, "room for {c}: {planned} of {budget}");
        // A load runs ahead if another segment is at work between the place where it may begin and the action that needs it.
        let reads = |a: &Action| matches!(a, Action::Dispatch { bindings, .. } if bindings.iter().any(|b| matches!(b.content, Content::Weight { .. })));
        let ahead = set.plans[0].actions.iter().enumerate().all(|(i, action)| match action {
            Action::Load { by, .. } => set.plans[0].actions[i..*by as usize].iter().any(reads),
            _ => true,
        });
        assert_eq!(ahead, c >= 2, "room for {c}: loads run ahead");
        for step in 0..5 {
            let (out, events) = engine::run(&mut session, &x).unwrap();
            same_step(&format!("room for {c}, step {step}"), &out, &want);
            if step >= 2 {
                assert_eq!(out.loads, 2 * (L - c), "room for {c}, step {step}");
                assert_eq!(loads(&events) as u64, out.loads);
                assert_eq!(out.loads, out.evictions);
            }
        }
        assert_eq!(device.peak_memory().max(device.active_memory()), device.ledger().usage().peak);
    }
}

#[test]
fn unequal_segments_stay_within_the_bound_in_bytes() {
    let device = device();
    let widths = [64u64; 9];
    let files: Vec<(String, Vec<u8>)> = widths
        .iter()
        .enumerate()
        .map(|(i, w)| {
            // The same product with ballast of another size in each segment.
            let ballast = 1000 * (1 + (i as u64 * 7) % 9);
            let mut tensors = vec![
                engine::f32s("w", &[*w, *w], &random(i as u64, (w * w) as usize, 0.2)),
                engine::f32s("b", &[*w], &random(50 + i as u64, *w as usize, 0.5)),
            ];
            tensors.push(engine::f32s("ballast", &[ballast], &random(90 + i as u64, ballast as usize, 1.0)));
            (format!("s{i}"), engine::file(&tensors))
        })
        .collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    let catalog = engine::catalog(&files);
    let program = chain(&catalog, ROWS, WIDTH, false);
    let x = random(8, (ROWS * WIDTH) as usize, 1.0);
    let all = engine::compiled(&device, &catalog, &program, Budget::All, keep());
    let largest = all.segments.iter().map(|s| s.device_bytes()).max().unwrap();
    let want = engine::run(&mut session(&device, &catalog, &program, Budget::All, keep()), &x).unwrap().0;
    let mut last = u64::MAX;
    for i in 0..=16 {
        let budget = all.floor + (all.all - all.floor) * i / 16;
        let mut session = session(&device, &catalog, &program, Budget::Bytes(budget), keep());
        let set = session.set();
        let slots: Vec<u64> = set
            .table
            .slots
            .iter()
            .filter(|s| s.category == ebbtide::compile::Category::Weights)
            .map(|s| s.bytes())
            .collect();
        let prefetch = set.plans[0]
            .actions
            .iter()
            .enumerate()
            .any(|(i, a)| matches!(a, Action::Load { by, .. } if *by as usize > i + 1));
        // The largest slot is a streaming one; where loads run ahead, one such slot is for that.
        let r = slots.iter().sum::<u64>() - if prefetch { slots.iter().max().copied().unwrap_or(0) } else { 0 };
        let bound = 2 * set.weight_bytes.saturating_sub(r) + 2 * largest;
        let planned = set.streamed_bytes(0);
        let (out, _) = engine::run(&mut session, &x).unwrap();
        same_step(&format!("budget {budget}"), &out, &want);
        assert_eq!(out.streamed_bytes, planned);
        assert!(planned <= bound, "budget {budget}: {planned} bytes streamed, bound {bound}");
        if i == 16 {
            assert_eq!(planned, 0);
        }
        last = last.min(planned);
    }
    assert_eq!(last, 0);
}

#[test]
fn reloading_needs_no_more_than_one_load_for_recompute_and_backward() {
    // A5: a layer's weights serve its backward in one visit, whatever the number of its tensors.
    let device = device();
    let catalog = layers(6, WIDTH);
    for by_hand in [true, false] {
        let program = chain(&catalog, ROWS, WIDTH, by_hand);
        let mut session = session(&device, &catalog, &program, Budget::Floor, engine::once());
        let (out, _) = engine::run(&mut session, &random(1, (ROWS * WIDTH) as usize, 1.0)).unwrap();
        assert_eq!(out.loads, if by_hand { 12 } else { 11 });
    }
}

#[test]
fn a_visit_by_hand_holds_its_segment_from_its_first_use_to_its_last() {
    use ebbtide::Graph;
    let device = device();
    let files = [("hand", engine::layer(1, WIDTH)), ("other", engine::layer(2, WIDTH))];
    let catalog = engine::catalog(&files);
    let (hand, other) = (catalog.segment("hand").unwrap(), catalog.segment("other").unwrap());
    let build = |by_hand: bool| {
        let mut g = Graph::new();
        let x = g.input("x", [ROWS, WIDTH]).unwrap();
        let body = |g: &mut Graph, w, b| {
            let h = g.matmul(x, w, None)?;
            // An automatic segment in the middle of the visit must not push the visited one out.
            let v = g.weight(&other, "w")?;
            let h = g.matmul(h, v, None)?;
            g.add(h, b)
        };
        let y = if by_hand {
            g.with(&hand, |g, w| body(g, w.get("w")?, w.get("b")?)).unwrap()
        } else {
            let (w, b) = (g.weight(&hand, "w").unwrap(), g.weight(&hand, "b").unwrap());
            body(&mut g, w, b).unwrap()
        };
        let loss = g.mean(y).unwrap();
        g.value_and_grad(loss, &[x]).unwrap()
    };
    let x = random(1, (ROWS * WIDTH) as usize, 1.0);
    let want = engine::run(&mut session(&device, &catalog, &build(false), Budget::All, keep()), &x).unwrap().0;
    for budget in [Budget::Floor, Budget::All] {
        let (out, events) =
            engine::run(&mut session(&device, &catalog, &build(true), budget, engine::once()), &x).unwrap();
        same_step("a visit with another segment in it", &out, &want);
        let hand: Vec<String> = engine::trace(&events).into_iter().filter(|l| l.contains("hand")).collect();
        let want = ["forward_load", "forward_unload", "backward_load", "backward_unload"]
            .map(|v| format!("{v}(hand.safetensors)"));
        assert_eq!(hand, want, "{budget}");
    }
}
