//! Over random graphs, sharing and budgets: a plan exists for every budget from the floor on and for none below, is verified, adds up,
//! and its run has the bits of the resident run.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::caps::Caps;
use ebbtide::compile::{Budget, Options, compile_with, verify};
use ebbtide::graph::{Fold, Unary};
use ebbtide::{Catalog, Error, Graph, Program};
use ebbtide_tests::engine::{self, f32s, file, keep, keep_free_0, mix, once, random, same_step, slow, wait};
use proptest::prelude::*;

const ROWS: u64 = 5;

/// One layer of a random program.
#[derive(Clone, Debug)]
struct Layer {
    segment: usize,
    other: usize,
    kind: u8,
    by_hand: bool,
}

#[derive(Clone, Debug)]
struct Case {
    widths: Vec<u64>,
    layers: Vec<Layer>,
    budget: f64,
    way: u8,
}

fn case() -> impl Strategy<Value = Case> {
    let layer = (0usize..5, 0usize..5, 0u8..9, any::<bool>()).prop_map(|(segment, other, kind, by_hand)| Layer {
        segment,
        other,
        kind,
        by_hand,
    });
    (prop::collection::vec(0u64..40, 5), prop::collection::vec(layer, 1..12), 0.0f64..1.2, 0u8..3)
        .prop_map(|(widths, layers, budget, way)| Case { widths, layers, budget, way })
}

const WIDTH: u64 = 12;

/// Five segments with a square weight, a bias and ballast of a random size, so that segments are unequal.
fn catalog(case: &Case) -> Catalog {
    let files: Vec<(String, Vec<u8>)> = case
        .widths
        .iter()
        .enumerate()
        .map(|(i, ballast)| {
            let n = ballast * ballast;
            let tensors = [
                f32s("w", &[WIDTH, WIDTH], &random(i as u64, (WIDTH * WIDTH) as usize, 0.4)),
                f32s("b", &[WIDTH], &random(20 + i as u64, WIDTH as usize, 0.5)),
                f32s("ballast", &[n], &random(40 + i as u64, n as usize, 1.0)),
            ];
            (format!("s{i}"), file(&tensors))
        })
        .collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect();
    engine::catalog(&files)
}

fn program(case: &Case, catalog: &Catalog) -> Program {
    let segments: Vec<_> = catalog.segments().cloned().collect();
    let mut g = Graph::new();
    let x = g.input("x", [ROWS, WIDTH]).unwrap();
    let mut h = x;
    let mut earlier = vec![x];
    for layer in &case.layers {
        let (s, o) = (&segments[layer.segment], &segments[layer.other]);
        let build = |g: &mut Graph, w, b| match layer.kind {
            0 => g.matmul(h, w, Some(b)),
            1 => g.matmul(h, w, None),
            2 => {
                let t = g.transpose(w)?;
                g.matmul(h, t, None)
            }
            3 => g.add(h, b),
            4 => g.mul(h, b),
            5 => {
                // Two segments in one op.
                let c = g.weight(o, "b")?;
                g.matmul(h, w, Some(c))
            }
            6 => {
                let rows = g.reduce(Fold::Mean, h, &[1])?;
                let rows = g.reshape(rows, &[ROWS, 1])?;
                g.mul(h, rows)
            }
            7 => {
                let skip = earlier[layer.other % earlier.len()];
                let y = g.matmul(h, w, Some(b))?;
                g.add(y, skip)
            }
            _ => {
                let t = g.transpose(h)?;
                let square = g.matmul(h, t, None)?;
                g.matmul(square, h, None)
            }
        };
        h = if layer.by_hand {
            g.with(s, |g, w| build(g, w.get("w")?, w.get("b")?)).unwrap()
        } else {
            let (w, b) = (g.weight(s, "w").unwrap(), g.weight(s, "b").unwrap());
            build(&mut g, w, b).unwrap()
        };
        h = g.unary(if layer.kind % 2 == 0 { Unary::Tanh } else { Unary::Relu }, h).unwrap();
        earlier.push(h);
    }
    let loss = g.mean(h).unwrap();
    g.value_and_grad(loss, &[x]).unwrap()
}

fn options(case: &Case) -> Options {
    [keep(), once(), keep_free_0()][case.way as usize]
}

fn planned(case: &Case) -> Result<(), TestCaseError> {
    let (catalog, caps) = (catalog(case), Caps::webgpu_defaults());
    let program = program(case, &catalog);
    let compile = |b| compile_with(std::slice::from_ref(&program), &catalog, &caps, b, options(case));
    let floor = compile(Budget::Floor).unwrap();
    let all = compile(Budget::All).unwrap();
    prop_assert!(floor.planned_peak() <= floor.floor && floor.budget == floor.floor);
    prop_assert_eq!(floor.floor, all.floor);
    let refused = compile(Budget::Bytes(floor.floor - 1));
    let named = matches!(&refused, Err(Error::BudgetBelowFloor { floor: f, .. }) if f.0 == floor.floor);
    prop_assert!(named, "one byte below the floor");
    let span = all.all - floor.floor;
    let mut budgets = vec![floor.floor, floor.floor + 1, all.all, all.all + 1, u64::MAX / 4];
    budgets.extend((0..8).map(|i| floor.floor + mix(i) % (span + 1)));
    budgets.push(floor.floor + (span as f64 * case.budget) as u64);
    for budget in budgets {
        let set = compile(Budget::Bytes(budget));
        prop_assert!(set.is_ok(), "budget {} of floor {}: {:?}", budget, floor.floor, set.err());
        let set = set.unwrap();
        prop_assert!(set.planned_peak() <= budget);
        prop_assert!(verify(&set.plans[0], &set, &caps, true).is_ok());
        // More memory never means more loads where the budget alone decides.
        let decides = !options(case).once && case.layers.iter().all(|l| !l.by_hand);
        prop_assert!(!decides || set.streamed_bytes(0) <= floor.streamed_bytes(0), "budget {}", budget);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_budget_from_the_floor_on_has_a_verified_plan_and_none_below(case in case()) {
        planned(&case)?;
    }
}

#[test]
fn random_programs_at_random_budgets_have_the_bits_of_the_resident_run() {
    let device = engine::device();
    let x = random(77, (ROWS * WIDTH) as usize, 0.7);
    let config =
        ProptestConfig { cases: if slow(&device) { 6 } else { 40 }, failure_persistence: None, ..Default::default() };
    proptest!(config, |(case in case())| {
        let catalog = catalog(&case);
        let program = program(&case, &catalog);
        let all = engine::compiled(&device, &catalog, &program, Budget::All, keep());
        let want = engine::run(&mut engine::session(&device, &catalog, &program, Budget::All, keep()), &x).unwrap().0;
        let floor = engine::compiled(&device, &catalog, &program, Budget::Floor, options(&case));
        let between = floor.floor + (all.all.saturating_sub(floor.floor) as f64 * case.budget) as u64;
        for budget in [floor.floor, between] {
            let set = engine::compiled(&device, &catalog, &program, Budget::Bytes(budget), options(&case));
            let planned = set.planned_peak();
            device.reset_peak_memory();
            let mut session = wait(ebbtide::Session::new(&device, &catalog, set)).unwrap();
            for _ in 0..2 {
                let (out, _) = engine::run(&mut session, &x).unwrap();
                same_step("a random program", &out, &want);
            }
            prop_assert_eq!(device.peak_memory(), planned);
            prop_assert!(planned <= budget);
        }
    });
}
