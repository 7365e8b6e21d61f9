//! Fold and free: the cases of `docs/fold-cases.md` whose ops exist, each with its right value.
//!
//! Every case also asserts that the folded program's output has the bits of the unfolded one, that what was planned
//! is what was measured, and that dropping the session brings the ledger back to its baseline.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use ebbtide::compile::{Category, Options, compile_with};
use ebbtide::graph::{Graph, Shape, Unary};
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::weights::{DType, Segment};
use ebbtide::{Budget, Cancel, Catalog, Device, DeviceChoice, PlanSet, Program, Result, Session, Source};

/// Tensors of a file: name, dtype, shape, bytes.
type Tensors = Vec<(&'static str, DType, Vec<u64>, Vec<u8>)>;

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
}

async fn catalog(tensors: Tensors) -> Catalog {
    let specs: Vec<(TensorSpec, &[u8])> =
        tensors.iter().map(|(n, d, s, b)| (TensorSpec::new(*n, *d, s.clone()), b.as_slice())).collect();
    let bytes = write(Vec::new(), "w.safetensors", &specs, &BTreeMap::new()).unwrap();
    Catalog::from_sources(vec![Source::memory("w.safetensors", bytes)]).await.unwrap()
}

struct Case {
    device: Device,
    catalog: Catalog,
    set: PlanSet,
    session: Session,
    outputs: Vec<(String, Vec<u8>)>,
    /// Constants the device held before the case began.
    baseline: u64,
}

/// Compiles and runs a program folded and unfolded, and asserts what holds for every case.
async fn case(
    catalog: Catalog,
    build: impl Fn(&mut Graph, &Segment) -> Result<Vec<(&'static str, ebbtide::Tensor)>>,
    inputs: &[(&str, Vec<f32>)],
) -> Case {
    let device = Device::open(&DeviceChoice::from_env()).await.unwrap();
    let segment = catalog.segments().next().unwrap().clone();
    let program = || -> Program {
        let mut g = Graph::new();
        let outputs = build(&mut g, &segment).unwrap();
        g.outputs(&outputs).unwrap()
    };
    let bytes: Vec<(&str, Vec<u8>)> = inputs.iter().map(|(n, v)| (*n, f32s(v))).collect();
    let given: Vec<(&str, &[u8])> = bytes.iter().map(|(n, v)| (*n, v.as_slice())).collect();
    let baseline = device.active_memory();
    let mut results = Vec::new();
    for no_fold in [true, false] {
        let options = Options { no_fold, ..Options::default() };
        let set = compile_with(&[program()], &catalog, device.caps(), Budget::All, options).unwrap();
        device.reset_peak_memory();
        let mut session = Session::new(&device, &catalog, set.clone()).await.unwrap();
        let out = session.run(0, &given, &Cancel::new(), &mut ebbtide::event::NoEvents).await.unwrap();
        let values: Vec<(String, Vec<u8>)> =
            set.plans[0].outputs.iter().map(|p| (p.name.to_string(), out.bytes(&p.name).unwrap().to_vec())).collect();
        assert_eq!(device.peak_memory() - baseline, set.planned_peak(), "planned is what was measured");
        results.push(values);
        if !no_fold {
            assert_eq!(results[0], results[1], "folded and unfolded differ");
            return Case { device, catalog, set, session, outputs: results.pop().unwrap(), baseline };
        }
        drop(session);
        assert_eq!(device.active_memory(), baseline);
    }
    unreachable!()
}

impl Case {
    fn f32(&self, name: &str) -> Vec<f32> {
        let (_, bytes) = self.outputs.iter().find(|(n, _)| n == name).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Constants that the ledger holds.
    fn held(&self) -> u64 {
        let active = self.device.ledger().usage().active;
        let held = active.get(Category::Weights) + active.get(Category::Folded);
        assert_eq!(held, self.set.report.held_bytes, "reported is what the ledger holds");
        held
    }

    fn end(self) {
        drop(self.session);
        assert_eq!(self.device.active_memory(), self.baseline, "something was left behind");
    }
}

fn run<T>(future: impl std::future::Future<Output = T>) -> T {
    pollster::block_on(future)
}

#[test]
fn t1_a_transposed_weight_with_one_use_is_folded_and_its_original_freed() {
    run(async {
        let cat = catalog(vec![("w", DType::F32, vec![2, 3], f32s(&[1., 2., 3., 4., 5., 6.]))]).await;
        let c = case(
            cat,
            |g, s| {
                let x = g.input("x", [1, 3])?;
                let w = g.weight(s, "w")?;
                let wt = g.transpose(w)?;
                Ok(vec![("y", g.matmul(x, wt, None)?)])
            },
            &[("x", vec![1.0; 3])],
        )
        .await;
        assert_eq!(c.f32("y"), [6.0, 15.0]);
        assert_eq!((c.set.report.folded.len(), c.held()), (1, 24));
        assert!(c.set.report.peak_bytes <= 48);
        assert_eq!(c.set.report.freed_bytes, 24);
        c.end();
    });
}

#[test]
fn t2_folding_a_stack_holds_one_extra_weight_not_a_second_model() {
    run(async {
        let names: Vec<&'static str> = (0..24).map(|i| &*format!("w{i:02}").leak()).collect();
        let one = f16s(&(0..256 * 256).map(|i| ((i * 7919) % 251) as f32 / 251.0 - 0.5).collect::<Vec<_>>());
        let cat = catalog(names.iter().map(|n| (*n, DType::F16, vec![256, 256], one.clone())).collect()).await;
        let c = case(
            cat,
            |g, s| {
                let mut h = g.input("x", [8, 256])?;
                for n in &names {
                    let w = g.weight(s, n)?;
                    let wt = g.transpose(w)?;
                    h = g.matmul(h, wt, None)?;
                }
                Ok(vec![("y", h)])
            },
            &[("x", vec![0.01; 8 * 256])],
        )
        .await;
        assert_eq!(c.set.report.folded.len(), 24);
        assert_eq!(c.held(), 3_145_728);
        assert!(c.set.report.peak_bytes <= 3_145_728 + 131_072, "{}", c.set.report.peak_bytes);
        c.end();
    });
}

#[test]
fn t3_of_a_chain_one_buffer_survives() {
    run(async {
        let n = 1024;
        let w: Vec<f32> = (0..n * n).map(|i| ((i * 31) % 1013) as f32 / 1013.0 - 0.5).collect();
        let cat = catalog(vec![("w", DType::F32, vec![n as u64, n as u64], f32s(&w))]).await;
        let c = case(
            cat,
            |g, s| {
                let x = g.input("x", [4, 1024])?;
                let w = g.weight(s, "w")?;
                let w = g.cast(w, DType::F16)?;
                let w = g.transpose(w)?;
                let w = g.scale(w, 0.5)?;
                let w = g.cast(w, DType::F16)?;
                Ok(vec![("y", g.matmul(x, w, None)?)])
            },
            &[("x", vec![0.1; 4 * 1024])],
        )
        .await;
        assert_eq!(c.held(), 2 << 20);
        assert!(c.set.report.peak_bytes <= 6 << 20, "{}", c.set.report.peak_bytes);
        c.end();
    });
}

#[test]
fn t13_a_weight_used_raw_and_transposed_is_kept_once_and_read_both_ways() {
    run(async {
        let w: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let cat = catalog(vec![("w", DType::F32, vec![4, 4], f32s(&w))]).await;
        let c = case(
            cat,
            |g, s| {
                let x = g.input("x", [1, 4])?;
                let w = g.weight(s, "w")?;
                let wt = g.transpose(w)?;
                Ok(vec![("a", g.matmul(x, wt, None)?), ("b", g.matmul(x, w, None)?)])
            },
            &[("x", vec![1.0; 4])],
        )
        .await;
        assert_eq!(c.f32("a"), [6.0, 22.0, 38.0, 54.0]);
        assert_eq!(c.f32("b"), [24.0, 28.0, 32.0, 36.0]);
        assert_eq!((c.held(), c.set.report.duplicated_bytes), (64, 0));
        assert!(c.set.report.skipped.iter().any(|(_, why)| why.contains("other uses")));
        c.end();
    });
}

#[test]
fn t36_a_thousand_small_folds_do_not_make_a_thousand_buffers() {
    run(async {
        let w: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let cat = catalog(vec![("w", DType::F32, vec![1000], f32s(&w))]).await;
        let c = case(
            cat,
            |g, s| {
                let x = g.input("x", [1])?;
                let w = g.weight(s, "w")?;
                let mut sum = x;
                for i in 0..1000 {
                    let one = g.slice(w, 0, i, i + 1)?;
                    let e = g.scale(one, 2.0)?;
                    sum = g.add(sum, e)?;
                }
                Ok(vec![("y", sum)])
            },
            &[("x", vec![0.0])],
        )
        .await;
        assert_eq!(c.f32("y"), [999_000.0]);
        assert_eq!(c.set.report.folded.len(), 1000);
        assert!(c.device.ledger().usage().buffers < 16, "{:?}", c.device.ledger().usage());
        c.end();
    });
}

#[test]
fn t54_compiled_twice_nothing_is_folded_again() {
    run(async {
        let w: Vec<f32> = (0..64 * 32).map(|i| i as f32 / 100.0).collect();
        let cat = catalog(vec![("w", DType::F32, vec![64, 32], f32s(&w))]).await;
        let build = |g: &mut Graph, s: &Segment, batch: u64| {
            let x = g.input("x", [batch, 32])?;
            let w = g.weight(s, "w")?;
            let wt = g.transpose(w)?;
            Ok(vec![("y", g.matmul(x, wt, None)?)])
        };
        let c = case(cat, |g, s| build(g, s, 8), &[("x", vec![1.0; 256])]).await;
        assert_eq!(c.session.folded(), 1);
        let before = c.device.ledger().usage().active.get(Category::Folded);
        // Another batch size uses the folded constant again.
        let segment = c.catalog.segments().next().unwrap().clone();
        let mut g = Graph::new();
        let out = build(&mut g, &segment, 1).unwrap();
        let program = g.outputs(&out).unwrap();
        let set = compile_with(&[program], &c.catalog, c.device.caps(), Budget::All, Options::default()).unwrap();
        let mut second = Session::new(&c.device, &c.catalog, set).await.unwrap();
        assert_eq!(second.folded(), 0);
        assert_eq!(c.device.ledger().usage().active.get(Category::Folded), before);
        let x = f32s(&[1.0; 32]);
        let out = second.run(0, &[("x", &x)], &Cancel::new(), &mut ebbtide::event::NoEvents).await.unwrap();
        assert_eq!(out.f32("y").unwrap(), c.f32("y")[..64]);
        drop(second);
        let _ = (Shape::scalar(), Unary::Copy);
        c.end();
    });
}
