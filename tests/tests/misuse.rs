//! What a caller can do wrong is a typed error, and what is unusual but legal is right: nothing here panics.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::compile::{Budget, compile, compile_with, verify};
use ebbtide::event::NoEvents;
use ebbtide::graph::{Binary, Fold, HookWhen, Shape, Unary};
use ebbtide::weights::DType;
use ebbtide::{Cancel, Caps, Graph, Result, Session, Tensor, nn};
use ebbtide_tests::engine::{
    catalog, chain, compiled, device, keep, keep_free_0, layer, layers, once, random, run, same_step, session, wait,
};

type Build = fn(&mut Graph, Tensor) -> Result<Tensor>;

/// One use of everything that takes a tensor, with arguments that are hardly ever right.
const OPS: [(&str, Build); 28] = [
    ("unary", |g, t| g.unary(Unary::Tanh, t)),
    ("binary", |g, t| g.binary(Binary::Add, t, t)),
    ("matmul", |g, t| g.matmul(t, t, Some(t))),
    ("reduce twice", |g, t| g.reduce(Fold::Sum, t, &[0, 0])),
    ("reduce of no such dimension", |g, t| g.reduce(Fold::Sum, t, &[9])),
    ("mean", |g, t| g.mean(t)),
    ("cast", |g, t| g.cast(t, DType::BF16)),
    ("cast to f32", |g, t| g.cast(t, DType::F32)),
    ("cast to what is not computed", |g, t| g.cast(t, DType::I64)),
    ("select", |g, t| g.select(t, t, t)),
    ("transpose", |g, t| g.transpose(t)),
    ("permute", |g, t| g.permute(t, &[1, 1])),
    ("permute of no such dimension", |g, t| g.permute(t, &[5])),
    ("reshape", |g, t| g.reshape(t, &[3, 5])),
    ("reshape beyond all numbers", |g, t| g.reshape(t, &[u64::MAX, 2])),
    ("slice backwards", |g, t| g.slice(t, 0, 2, 1)),
    ("slice of no such dimension", |g, t| g.slice(t, 5, 0, 1)),
    ("slice beyond the end", |g, t| g.slice(t, 0, 0, u64::MAX)),
    ("window", |g, t| g.window(t, u64::MAX, Shape::scalar())),
    ("concat", |g, t| g.concat(&[t, t], 7)),
    ("concat of nothing", |g, _| g.concat(&[], 0)),
    ("softmax", nn::softmax),
    ("rms_norm", |g, t| nn::rms_norm(g, t, t, f32::NAN, 0.0)),
    ("layer_norm", |g, t| nn::layer_norm(g, t, t, None, 0.0)),
    ("linear", |g, t| nn::linear(g, t, t, Some(t))),
    ("embedding", |g, t| nn::embedding(g, t, t)),
    ("append", |g, t| nn::append(g, t, t, t)),
    ("hook", |g, t| g.hook(t, "x", HookWhen::Value, true)),
];

#[test]
fn a_tensor_of_another_graph_is_refused_by_every_op() {
    let mut other = Graph::new();
    let mut far = other.input("a", [2, 2]).unwrap();
    for _ in 0..50 {
        far = other.unary(Unary::Tanh, far).unwrap();
    }
    for (name, op) in OPS {
        let error = op(&mut Graph::new(), far).map(|_| ()).unwrap_err();
        assert!(matches!(error.code(), "not-found" | "shape"), "{name}: {error}");
    }
}

#[test]
fn every_op_on_every_rank_is_a_valid_plan_or_a_shape_error() {
    let catalog = catalog(&[("l", layer(1, 4))]);
    let shapes: [&[u64]; 9] =
        [&[], &[1], &[3], &[2, 2], &[3, 2], &[2, 3, 4], &[1, 2, 3, 4], &[u32::MAX as u64; 2], &[1 << 40, 3]];
    for (name, op) in OPS {
        for shape in shapes {
            let planned = || {
                let mut g = Graph::new();
                let x = g.input("x", shape)?;
                let y = op(&mut g, x)?;
                let loss = g.mean(y)?;
                let program = g.value_and_grad(loss, &[x])?;
                compile(&[program], &catalog, &Caps::webgpu_defaults(), Budget::All)
            };
            if let Err(error) = planned() {
                assert!(matches!(error.code(), "shape" | "invalid"), "{name} of {shape:?}: {}: {error}", error.code());
            }
        }
    }
}

#[test]
fn another_catalog_than_the_programs_is_refused_when_compiling_when_beginning_and_when_adopting() {
    let (device, own) = (device(), layers(5, 16));
    let program = chain(&own, 8, 16, false);
    for other in [layers(2, 16), layers(5, 64), layers(5, 4)] {
        let error = compile(std::slice::from_ref(&program), &other, device.caps(), Budget::All).unwrap_err();
        assert_eq!(error.code(), "invalid", "{error}");
        let set = || compiled(&device, &own, &program, Budget::All, keep());
        assert_eq!(wait(Session::new(&device, &other, set())).err().map(|e| e.code()), Some("invalid"));
        let running = wait(Session::new(&device, &own, set())).unwrap();
        assert_eq!(wait(running.adopt(&other, set())).err().map(|e| e.code()), Some("invalid"));
    }
    assert_eq!(device.active_memory(), 0);
}

#[test]
fn names_given_twice_are_refused() {
    let mut g = Graph::new();
    let x = g.input("x", [8, 16]).unwrap();
    assert_eq!(g.input("x", [8, 4]).unwrap_err().code(), "invalid");
    assert_eq!(g.outputs(&[("y", x), ("y", x)]).unwrap_err().code(), "invalid");
}

#[test]
fn a_budget_is_refused_exactly_below_the_floor_and_kept_above_it() {
    let (catalog, caps) = (layers(5, 16), Caps::webgpu_defaults());
    let program = chain(&catalog, 8, 16, false);
    let plan = |budget| compile(std::slice::from_ref(&program), &catalog, &caps, budget);
    let floor = plan(Budget::Floor).unwrap().floor;
    for bytes in (floor - 100..floor + 100).chain((0..400).map(|i| floor + 64 * i)) {
        match plan(Budget::bytes(bytes)) {
            Ok(set) => {
                assert!(bytes >= floor && set.planned_peak() <= bytes, "{bytes}: {}", set.planned_peak());
                verify(&set.plans[0], &set, &caps, true).unwrap();
            }
            Err(error) => assert!(bytes < floor && error.exit_status() == 3, "{bytes}: {error}"),
        }
    }
    assert_eq!(plan(Budget::bytes(0)).unwrap_err().code(), "budget-below-floor");
    assert!(plan(Budget::bytes(u64::MAX)).is_ok());
}

#[test]
fn by_hand_and_automatic_uses_of_one_segment_mix_and_change_no_bit() {
    let (device, catalog) = (device(), layers(1, 16));
    let segment = catalog.segment("l00").unwrap();
    let mut g = Graph::new();
    let x = g.input("x", [8, 16]).unwrap();
    let h = g.with(&segment, |g, w| g.matmul(x, w.get("w")?, None)).unwrap();
    let w = g.weight(&segment, "w").unwrap();
    let h = g.matmul(h, w, None).unwrap();
    let h = g.with(&segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?))).unwrap();
    let h = g.matmul(h, w, None).unwrap();
    let loss = g.mean(h).unwrap();
    let program = g.value_and_grad(loss, &[x]).unwrap();
    let input = random(5, 128, 1.0);
    let mut first = None;
    for budget in [Budget::Floor, Budget::All] {
        for options in [keep(), once(), keep_free_0()] {
            let out = run(&mut session(&device, &catalog, &program, budget, options), &input).unwrap().0;
            same_step(&format!("{budget} {options:?}"), &out, first.get_or_insert(out.clone()));
        }
    }
}

#[test]
fn inputs_weights_and_literals_are_outputs_as_they_are() {
    let (device, catalog) = (device(), layers(1, 16));
    let mut g = Graph::new();
    let x = g.input("x", [8, 16]).unwrap();
    let w = g.weight(&catalog.segment("l00").unwrap(), "w").unwrap();
    let literal = g.fill(Shape::new(&[3]).unwrap(), 2.5);
    let turned = g.transpose(x).unwrap();
    let all = [("x", x), ("again", x), ("w", w), ("literal", literal), ("turned", turned)];
    let program = g.outputs(&all).unwrap();
    let input = random(5, 128, 1.0);
    let set = compile_with(&[program], &catalog, device.caps(), Budget::Floor, keep()).unwrap();
    let mut session = wait(Session::new(&device, &catalog, set)).unwrap();
    let out = run(&mut session, &input).unwrap().0;
    assert_eq!((out.f32("x").unwrap(), out.f32("again").unwrap()), (input.clone(), input.clone()));
    assert_eq!((out.f32("literal").unwrap(), out.f32("w").unwrap()), (vec![2.5; 3], random(200, 256, 1.5 / 4.0)));
    let turned: Vec<f32> = (0..128).map(|i| input[i % 8 * 16 + i / 8]).collect();
    assert_eq!(out.f32("turned").unwrap(), turned);
}

#[test]
fn a_run_whose_future_is_dropped_at_any_wait_leaves_the_session_usable_and_the_memory_as_it_was() {
    let (device, catalog) = (device(), layers(5, 16));
    let program = chain(&catalog, 8, 16, false);
    let mut session = session(&device, &catalog, &program, Budget::Floor, keep());
    let input = random(5, 128, 1.0);
    let want = run(&mut session, &input).unwrap().0;
    let memory = device.active_memory();
    for polls in 0..40 {
        let (inputs, cancel, mut events) = ([("x", bytemuck::cast_slice(&input))], Cancel::new(), NoEvents);
        let mut future = Box::pin(session.run(0, &inputs, &cancel, &mut events));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..polls {
            if future.as_mut().poll(&mut context).is_ready() {
                break;
            }
        }
        drop(future);
        assert_eq!(device.active_memory(), memory, "after {polls} polls");
    }
    same_step("after all", &run(&mut session, &input).unwrap().0, &want);
}
