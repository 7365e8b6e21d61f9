//! A transformer with adapters trains: the same bits at every budget, a peak that is planned, and nothing made in the
//! steady state.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ebbtide::compile::{Budget, Category, Options, Recompute, compile_with};
use ebbtide::event::NoEvents;
use ebbtide::nn::Part;
use ebbtide::{Cancel, Caps, Device, Error, Event, Outputs, PlanSet, Session};
use ebbtide_tests::engine::{device, slow, wait};
use ebbtide_tests::stack::{self, Batch, Stack};

const SMALL: Stack = Stack { layers: 6, hidden: 32, vocabulary: 96, rank: 4 };

fn recompute(recompute: Recompute) -> Options {
    Options { recompute, ..Options::default() }
}

fn train(session: &mut Session, batch: &Batch, step: u64) -> Outputs {
    let hyper = stack::hyper(step);
    wait(session.run(0, &batch.inputs(&hyper), &Cancel::new(), &mut NoEvents)).unwrap()
}

fn values(session: &mut Session) -> Vec<u8> {
    wait(session.read_state("values.0")).unwrap()
}

/// Losses of so many steps over four batches, and the adapters after them.
fn losses(device: &Device, set: PlanSet, steps: u64) -> (Vec<f32>, Vec<u8>) {
    let catalog = stack::catalog(&SMALL);
    let mut session = stack::session(device, &catalog, &SMALL, set);
    let batches: Vec<Batch> = (0..4).map(|i| Batch::new(&SMALL, i, 2, 16, 32)).collect();
    let losses =
        (0..steps).map(|s| train(&mut session, &batches[s as usize % 4], s + 1).f32("loss").unwrap()[0]).collect();
    (losses, values(&mut session))
}

#[test]
fn twenty_steps_have_the_same_bits_at_every_budget_with_and_without_recomputation() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let program = || [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let steps = if slow(&device) { 8 } else { 20 };
    let set = |budget, how| stack::compiled(&device, &catalog, &program(), budget, recompute(how));
    let (first, adapters) = losses(&device, set(Budget::All, Recompute::Off), steps);
    let reference = stack::reference_loss(&SMALL, &Batch::new(&SMALL, 0, 2, 16, 32));
    assert!((f64::from(first[0]) - reference).abs() < 1e-5, "{} instead of {reference}", first[0]);
    assert!(first[steps as usize - 4] < first[0], "it does not learn: {first:?}");
    for (budget, how) in [
        (Budget::All, Recompute::On),
        (Budget::Percent(50.0), Recompute::On),
        (Budget::Percent(50.0), Recompute::Off),
        (Budget::Floor, Recompute::Off),
        (Budget::Floor, Recompute::Auto),
    ] {
        let (other, adapters2) = losses(&device, set(budget, how), steps);
        let bits = |l: &[f32]| l.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&first), bits(&other), "{budget} {how:?}");
        assert!(adapters == adapters2, "the adapters differ at {budget}, {how:?}");
    }
}

#[test]
fn forcing_tiny_submissions_changes_no_bit() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let program = [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Floor, Options::default());
    let caps = Caps { work_per_submission: 10_000, ..device.caps().clone() };
    let cut = compile_with(&program, &catalog, &caps, Budget::Floor, Options::default()).unwrap();
    assert!(cut.plans[0].actions.len() > set.plans[0].actions.len());
    assert_eq!(losses(&device, set, 3), losses(&device, cut, 3));
}

#[test]
fn with_recomputation_the_activations_are_a_constant_and_one_boundary_a_block() {
    let peak = |layers| {
        let stack = Stack { layers, ..SMALL };
        let catalog = stack::catalog(&stack);
        let program = [stack::train_program(&stack, &catalog, 2, 16, Part::Whole)];
        let caps = Caps::webgpu_defaults();
        let set = compile_with(&program, &catalog, &caps, Budget::Floor, recompute(Recompute::On)).unwrap();
        set.planned.get(Category::Activations)
    };
    let boundary = 2 * 16 * SMALL.hidden * 4;
    let at: Vec<u64> = [4, 8, 16, 32].map(peak).to_vec();
    assert_eq!([at[1] - at[0], at[2] - at[1], at[3] - at[2]], [4 * boundary, 8 * boundary, 16 * boundary]);
}

#[test]
fn only_what_is_trained_has_gradients_and_moments_and_no_weight_comes_back() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let program = [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Percent(50.0), Options::default());
    let trainable = 4 * stack::params(&SMALL).arrays()[0];
    let planned = set.planned;
    assert_eq!(planned.get(Category::Adapters), trainable);
    assert_eq!(planned.get(Category::Gradients), trainable);
    assert_eq!(planned.get(Category::Optimizer), 2 * trainable);
    device.reset_peak_memory();
    let mut session = stack::session(&device, &catalog, &SMALL, set);
    let out = train(&mut session, &Batch::new(&SMALL, 0, 2, 16, 32), 1);
    let usage = device.ledger().usage();
    assert_eq!((usage.peak, usage.at_peak), (planned.total(), planned));
    let outputs: u64 = session.set().plans[0].outputs.iter().map(|p| p.bytes).sum();
    assert_eq!(out.downloaded_bytes, outputs, "loss and control words, nothing else");
    assert!(outputs <= 16);
}

#[test]
fn one_visit_to_a_block_serves_recomputation_and_backward() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let program = [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Floor, recompute(Recompute::On));
    let mut session = stack::session(&device, &catalog, &SMALL, set);
    let batch = Batch::new(&SMALL, 0, 2, 16, 32);
    train(&mut session, &batch, 1);
    // Six blocks and the head through one slot: a palindrome of seven.
    assert_eq!(train(&mut session, &batch, 2).loads, 2 * (7 - 1));
}

#[test]
fn micro_batches_carry_on_to_the_bits_of_one_batch() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let whole = Batch::new(&SMALL, 5, 4, 8, 32);
    let run = |parts: &[(Part, u64, u64)]| {
        let programs: Vec<_> =
            parts.iter().map(|(p, a, b)| stack::train_program(&SMALL, &catalog, b - a, 8, *p)).collect();
        let set = stack::compiled(&device, &catalog, &programs, Budget::Percent(40.0), Options::default());
        let mut session = stack::session(&device, &catalog, &SMALL, set);
        let hyper = stack::hyper(1);
        for (i, (part, from, to)) in parts.iter().enumerate() {
            let batch = whole.rows(*from, *to);
            let updates = matches!(part, Part::Whole | Part::Last);
            let inputs = batch.inputs(if updates { &hyper } else { &[] });
            wait(session.run(i, &inputs, &Cancel::new(), &mut NoEvents)).unwrap();
        }
        values(&mut session)
    };
    let one = run(&[(Part::Whole, 0, 4)]);
    assert!(one == run(&[(Part::First, 0, 2), (Part::Last, 2, 4)]), "two parts");
    let four = [(Part::First, 0, 1), (Part::Middle, 1, 2), (Part::Middle, 2, 3), (Part::Last, 3, 4)];
    assert!(one == run(&four), "four parts");
}

#[test]
fn programs_of_a_set_share_one_table_and_switching_makes_nothing() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let programs = [
        stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole),
        stack::train_program(&SMALL, &catalog, 2, 8, Part::Whole),
        stack::eval_program(&SMALL, &catalog, 2, 16),
        stack::eval_program(&SMALL, &catalog, 1, 1),
    ];
    let set = stack::compiled(&device, &catalog, &programs, Budget::Percent(50.0), Options::default());
    let alone = stack::compiled(&device, &catalog, &programs[..1], Budget::Percent(50.0), Options::default());
    let activations = |s: &PlanSet| s.planned.get(Category::Activations);
    assert!(activations(&set) <= activations(&alone) + 4096, "{} {}", activations(&set), activations(&alone));
    let mut session = stack::session(&device, &catalog, &SMALL, set);
    let batches = [(2, 16), (2, 8), (2, 16), (1, 1)].map(|(b, t)| Batch::new(&SMALL, 3, b, t, b * t));
    let hyper = stack::hyper(1);
    let run = |session: &mut Session, plan: usize| {
        let inputs = batches[plan].inputs(if plan < 2 { &hyper } else { &[] });
        wait(session.run(plan, &inputs, &Cancel::new(), &mut NoEvents)).unwrap().f32("loss").unwrap()[0]
    };
    for plan in 0..4 {
        run(&mut session, plan);
    }
    let made = device.ledger().usage().made;
    let (groups, pipelines) = (session.bind_groups(), device.pipeline_count());
    let eval = run(&mut session, 2);
    for plan in [3, 0, 3, 1, 2, 0] {
        run(&mut session, plan);
    }
    assert_eq!(device.ledger().usage().made, made, "switching made a buffer");
    assert_eq!((session.bind_groups(), device.pipeline_count()), (groups, pipelines));
    assert!(run(&mut session, 2) < eval, "training between the evaluations left no trace");
}

#[test]
fn a_program_added_later_finds_the_state_as_it_was() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let train_only = [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let both = [train_only[0].clone(), stack::eval_program(&SMALL, &catalog, 1, 5)];
    let set = |programs| stack::compiled(&device, &catalog, programs, Budget::Percent(50.0), Options::default());
    let batch = Batch::new(&SMALL, 0, 2, 16, 32);
    let mut straight = stack::session(&device, &catalog, &SMALL, set(&train_only));
    train(&mut straight, &batch, 1);
    train(&mut straight, &batch, 2);
    let want = values(&mut straight);
    drop(straight);
    let mut session = stack::session(&device, &catalog, &SMALL, set(&train_only));
    train(&mut session, &batch, 1);
    let mut session = wait(session.adopt(&catalog, set(&both))).unwrap();
    train(&mut session, &batch, 2);
    assert!(values(&mut session) == want);
}

#[test]
fn a_step_cancelled_at_any_event_has_changed_nothing() {
    let device = device();
    let stack = Stack { layers: 3, ..SMALL };
    let catalog = stack::catalog(&stack);
    let program = [stack::train_program(&stack, &catalog, 2, 8, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Floor, Options::default());
    let batch = Batch::new(&stack, 0, 2, 8, 16);
    let hyper = stack::hyper(1);
    let inputs = batch.inputs(&hyper);
    let mut session = stack::session(&device, &catalog, &stack, set);
    let before = values(&mut session);
    let active = device.active_memory();
    let mut at = 0;
    loop {
        let cancel = Cancel::new();
        let token = cancel.clone();
        let mut seen = 0;
        let mut sink = |_: Event| {
            if seen == at {
                token.cancel();
            }
            seen += 1;
        };
        let result = wait(session.run(0, &inputs, &cancel, &mut sink));
        if result.is_ok() {
            break;
        }
        assert!(matches!(result, Err(Error::Cancelled)));
        assert!(values(&mut session) == before, "the step cancelled at event {at} changed the adapters");
        assert_eq!(device.active_memory(), active);
        at += 1;
    }
    assert!(at > 8, "only {at} places to cancel at");
    let after = values(&mut session);
    let set = stack::compiled(&device, &catalog, &program, Budget::Floor, Options::default());
    let mut fresh = stack::session(&device, &catalog, &stack, set);
    wait(fresh.run(0, &inputs, &Cancel::new(), &mut NoEvents)).unwrap();
    assert!(values(&mut fresh) == after, "the step after the cancelled ones differs from one of a fresh session");
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    let device = device();
    let catalog = stack::catalog(&SMALL);
    let program = [stack::train_program(&SMALL, &catalog, 2, 16, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Percent(50.0), Options::default());
    let mut session = stack::session(&device, &catalog, &SMALL, set);
    let before = values(&mut session);
    let mut batch = Batch::new(&SMALL, 0, 2, 16, 32);
    batch.weights[3] = f32::NAN;
    let out = train(&mut session, &batch, 1);
    assert!(out.f32("loss").unwrap()[0].is_nan());
    assert_ne!(out.bytes("control").unwrap()[..4], [0; 4], "the control word does not tell");
    assert!(values(&mut session) == before);
}

#[test]
fn objects_after_ten_steps_and_after_a_thousand_are_the_same() {
    let device = device();
    let stack = Stack { layers: 2, hidden: 16, vocabulary: 32, rank: 2 };
    let catalog = stack::catalog(&stack);
    let program = [stack::train_program(&stack, &catalog, 1, 4, Part::Whole)];
    let set = stack::compiled(&device, &catalog, &program, Budget::Floor, Options::default());
    let mut session = stack::session(&device, &catalog, &stack, set);
    let batch = Batch::new(&stack, 0, 1, 4, 4);
    let objects = |session: &Session| {
        let hal = device.raw().get_internal_counters().hal;
        let usage = device.ledger().usage();
        (
            usage.buffers,
            usage.made,
            session.bind_groups(),
            device.pipeline_count(),
            hal.buffers.read(),
            hal.bind_groups.read(),
        )
    };
    let mut at_ten = None;
    for step in 1..=if slow(&device) { 200 } else { 1000 } {
        train(&mut session, &batch, step);
        if step == 10 {
            at_ten = Some(objects(&session));
        }
    }
    assert_eq!(at_ten, Some(objects(&session)));
}
