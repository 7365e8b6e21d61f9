//! The first founding program against its references: MLX's values and trace, the byte bar, and equal bits however it streams.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test stops at the first surprise")]

use ebbtide::compile::{Budget, Options};
use ebbtide::{Catalog, Device, Event, Outputs, Source};
use ebbtide_tests::engine::{self, device, fixture, founding, keep, keep_free_0, once, same_step, trace, wait};
use std::sync::Arc;

/// What MLX needs when it is streamed by hand.
const BAR: u64 = 74_000;

fn file(name: &str) -> std::path::PathBuf {
    fixture("seed_mlx").join(name)
}

fn catalog() -> Catalog {
    let open = |name| Source::open(file(name)).unwrap();
    wait(Catalog::from_sources(vec![open("down.safetensors"), open("up.safetensors")])).unwrap()
}

/// The bytes of a tensor of a fixture; safetensors headers are small enough to read by hand, which keeps the reference apart
/// from the library.
fn tensor(name: &str, tensor: &str) -> Vec<u8> {
    let bytes = std::fs::read(file(name)).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let range: Vec<usize> = serde_json::from_value(json[tensor]["data_offsets"].clone()).unwrap();
    bytes[header + range[0]..header + range[1]].to_vec()
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
}

struct Ran {
    out: Outputs,
    events: Vec<Event>,
    peak: u64,
    planned: u64,
    floor: u64,
}

fn run(device: &Device, rounds: u32, by_hand: bool, budget: Budget, options: Options) -> Ran {
    let catalog = catalog();
    let program = founding(&catalog, rounds, by_hand);
    let set = engine::compiled(device, &catalog, &program, budget, options);
    let (planned, floor) = (set.planned_peak(), set.floor);
    device.reset_peak_memory();
    let mut session = wait(ebbtide::Session::new(device, &catalog, set)).unwrap();
    let (out, events) = engine::run(&mut session, bytemuck::cast_slice(&tensor_x())).unwrap();
    let usage = device.ledger().usage();
    assert_eq!(usage.at_peak.total(), usage.peak);
    drop(session);
    assert_eq!(device.active_memory(), 0, "a session that is dropped leaves bytes behind");
    Ran { out, events, peak: usage.peak, planned, floor }
}

fn tensor_x() -> Vec<f32> {
    tensor("x.safetensors", "x").chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, v| m.max(v.abs()))
}

#[test]
fn loss_and_gradient_are_those_of_mlx_and_of_double_precision() {
    let ran = run(&device(), 10, true, Budget::Floor, once());
    for (name, parse) in [("result.safetensors", f32s as fn(&[u8]) -> Vec<f64>), ("result_f64.safetensors", f64s)] {
        for (ours, theirs) in [("loss", "loss"), ("grad.0", "grad_x")] {
            let (got, want) = (f32s(ran.out.bytes(ours).unwrap()), parse(&tensor(name, theirs)));
            assert_eq!(got.len(), want.len());
            let bar = 1e-5 * largest(&want);
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(worst <= bar, "{theirs} of {name}: off by {worst:e}, allowed {bar:e}");
        }
    }
}

#[test]
fn by_hand_at_the_floor_the_trace_is_the_80_lines() {
    let want = std::fs::read_to_string(file("trace.txt")).unwrap();
    for options in [once(), keep(), keep_free_0()] {
        let ran = run(&device(), 10, true, Budget::Floor, options);
        assert_eq!(trace(&ran.events), want.lines().collect::<Vec<_>>(), "{options:?}");
        assert_eq!((ran.out.loads, ran.out.evictions), (40, 40), "{options:?}");
    }
}

#[test]
fn by_hand_the_trace_is_the_same_at_every_budget() {
    let want = std::fs::read_to_string(file("trace.txt")).unwrap();
    for budget in [Budget::All, Budget::Percent(50.0), Budget::Bytes(10 << 20)] {
        let ran = run(&device(), 10, true, budget, once());
        assert_eq!(trace(&ran.events), want.lines().collect::<Vec<_>>(), "{budget}");
    }
}

#[test]
fn automatically_the_pair_at_the_turn_is_saved() {
    let text = std::fs::read_to_string(file("trace.txt")).unwrap();
    let mut want: Vec<&str> = text.lines().collect();
    let turn = want.windows(2).position(|w| w == ["forward_unload(up.safetensors)", "backward_load(up.safetensors)"]);
    want.drain(turn.unwrap()..turn.unwrap() + 2);
    for options in [once(), keep_free_0()] {
        let ran = run(&device(), 10, false, Budget::Floor, options);
        assert_eq!(trace(&ran.events), want, "{options:?}");
        assert_eq!((ran.out.loads, want.len()), (39, 78));
    }
}

#[test]
fn the_peak_at_the_floor_is_within_mlx_streamed_by_hand() {
    for by_hand in [true, false] {
        for options in [once(), keep_free_0()] {
            let ran = run(&device(), 10, by_hand, Budget::Floor, options);
            assert!(ran.peak <= BAR, "{} bytes, {options:?}", ran.peak);
            assert_eq!(ran.peak, ran.planned, "{options:?}");
            assert!(ran.peak <= ran.floor, "{options:?}");
        }
    }
}

#[test]
fn the_peak_does_not_depend_on_the_rounds() {
    let device = device();
    for (by_hand, options) in [(true, once()), (false, keep_free_0())] {
        let peak = |rounds| {
            let ran = run(&device, rounds, by_hand, Budget::Floor, options);
            assert_eq!(ran.peak, ran.planned);
            ran.peak
        };
        let ten = peak(10);
        assert_eq!(peak(100), ten);
        if by_hand {
            assert_eq!(peak(1000), ten);
        }
    }
}

#[test]
fn every_way_of_streaming_gives_the_same_bits() {
    let device = device();
    let want = run(&device, 10, false, Budget::All, once());
    for by_hand in [false, true] {
        for options in [once(), keep(), keep_free_0()] {
            for budget in [Budget::All, Budget::Bytes(2 * want.floor), Budget::Percent(50.0), Budget::Floor] {
                let ran = run(&device, 10, by_hand, budget, options);
                same_step(&format!("by hand {by_hand}, {options:?}, {budget}"), &ran.out, &want.out);
                assert_eq!(ran.peak, ran.planned);
                assert!(ran.peak <= budget_bytes(budget, &ran), "{budget}");
            }
        }
    }
}

fn budget_bytes(budget: Budget, ran: &Ran) -> u64 {
    match budget {
        Budget::Bytes(bytes) => bytes.max(ran.floor),
        Budget::Floor => ran.floor,
        _ => u64::MAX,
    }
}

#[test]
fn one_byte_below_the_floor_is_refused_with_the_floor_and_what_sets_it() {
    let device = device();
    let catalog = catalog();
    let program = founding(&catalog, 10, true);
    let floor = engine::compiled(&device, &catalog, &program, Budget::Floor, once()).floor;
    let made = device.ledger().usage().made;
    for options in [once(), keep(), keep_free_0()] {
        let refused = ebbtide::compile_with(
            std::slice::from_ref(&program),
            &catalog,
            device.caps(),
            Budget::Bytes(floor - 1),
            options,
        );
        let error = refused.unwrap_err();
        assert_eq!(error.exit_status(), 3);
        assert!(error.to_string().contains(&floor.to_string()), "{error}");
        assert!(error.to_string().contains("down") || error.to_string().contains("activations"), "{error}");
        ebbtide::compile_with(std::slice::from_ref(&program), &catalog, device.caps(), Budget::Bytes(floor), options)
            .unwrap();
    }
    assert_eq!(device.ledger().usage().made, made, "a refusal is pure");
}

#[test]
fn from_round_22_on_the_mean_is_not_finite_and_the_run_still_ends() {
    let device = device();
    // At 21 the mean itself still fits f32, but the sum that it is made from does not.
    for (rounds, finite) in [(20, true), (22, false), (60, false)] {
        let ran = run(&device, rounds, true, Budget::Floor, once());
        assert_eq!(ran.out.f32("loss").unwrap()[0].is_finite(), finite, "{rounds} rounds");
    }
}

#[test]
fn only_what_was_asked_for_comes_back_to_the_host() {
    let ran = run(&device(), 10, false, Budget::Floor, once());
    assert_eq!(ran.out.downloaded_bytes, 4 + 4 * 3 * 32 * 48);
    assert_eq!(ran.out.streamed_bytes, 20 * 12_544 + 19 * 12_480);
    let start = ran.events.first();
    assert!(matches!(start, Some(Event::RunStart { program }) if *program == Arc::from("step")));
    assert!(matches!(ran.events.last(), Some(Event::RunEnd { loads: 39, evictions: 39, .. })));
}
