//! What the tests of ops share: a case is a graph, its reference in f64, and what gradients are asked for.
//!
//! One check compares the value with the reference, gradients with central differences of the reference, and every bit with
//! the same program cut into submissions and dispatches as small as they can be.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod reference;

use ebbtide::compile::{self, Budget, Options};
use ebbtide::weights::DType;
use ebbtide::{Cancel, Caps, Catalog, Device, Graph, Outputs, Program, Result, Session, Tensor};
use ebbtide_tests::engine::{self, Data, same_bits, wait};
use ebbtide_tests::kernel::{STRICT, Tolerance, near};

/// Chains of several kernels, and gradients against differences of the reference: the rounding of each stage adds up.
pub const CHAIN: Tolerance = Tolerance { rel: 3e-5, of_largest: 1e-5 };
/// Step of the central differences in f64: their error is near 1e-10 of the value's curvature.
const STEP: f64 = 1e-5;
/// Elements of each operand whose gradient is compared.
const SAMPLES: usize = 24;

/// An operand given at each run.
#[derive(Clone)]
pub enum Given {
    F32(Vec<u64>, Vec<f32>),
    I32(Vec<u64>, Vec<i32>),
}

impl Given {
    pub fn random(seed: u64, shape: &[u64], scale: f32) -> Given {
        Given::F32(shape.to_vec(), engine::random(seed, shape.iter().product::<u64>() as usize, scale))
    }

    pub fn ints(shape: &[u64], values: &[i32]) -> Given {
        assert_eq!(shape.iter().product::<u64>() as usize, values.len());
        Given::I32(shape.to_vec(), values.to_vec())
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Given::F32(_, v) => bytemuck::cast_slice(v),
            Given::I32(_, v) => bytemuck::cast_slice(v),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            Given::F32(_, v) => v.iter().map(|x| f64::from(*x)).collect(),
            Given::I32(_, v) => v.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

type Build<'a> = &'a dyn Fn(&mut Graph, &[Tensor]) -> Result<Tensor>;
type Reference<'a> = &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>;

/// A graph of one result with its reference.
pub struct Case<'a> {
    pub name: String,
    pub given: Vec<Given>,
    /// Operands whose gradient is checked.
    pub wrt: &'a [usize],
    pub build: Build<'a>,
    pub reference: Reference<'a>,
    pub catalog: Option<&'a Catalog>,
    pub tolerance: Tolerance,
    /// For the gradients.
    pub slopes: Tolerance,
}

impl<'a> Case<'a> {
    pub fn new(
        name: impl Into<String>,
        given: Vec<Given>,
        wrt: &'a [usize],
        build: Build<'a>,
        reference: Reference<'a>,
    ) -> Self {
        Case { name: name.into(), given, wrt, build, reference, catalog: None, tolerance: STRICT, slopes: CHAIN }
    }
}

/// Nothing to load.
pub fn no_weights() -> Catalog {
    engine::catalog(&[])
}

/// The device's capabilities with every submission and dispatch as short as it can be.
pub fn cut(device: &Device) -> Caps {
    Caps { work_per_submission: 1, ..device.caps().clone() }
}

pub fn inputs(g: &mut Graph, given: &[Given]) -> Vec<Tensor> {
    let add = |(i, x): (usize, &Given)| match x {
        Given::F32(shape, _) => g.input(&format!("x{i}"), shape).unwrap(),
        Given::I32(shape, _) => g.input_i32(&format!("x{i}"), shape).unwrap(),
    };
    given.iter().enumerate().map(add).collect()
}

/// Runs programs one after another in one session with the same inputs; `extra` are further inputs by name.
pub fn run(
    device: &Device,
    catalog: &Catalog,
    caps: &Caps,
    programs: &[Program],
    given: &[Given],
    extra: &[(&str, &[u8])],
) -> Vec<Outputs> {
    let options = Options { once: true, ..Options::default() };
    let set = compile::compile_with(programs, catalog, caps, Budget::All, options).unwrap();
    let mut session = wait(Session::new(device, catalog, set)).unwrap();
    let mut out = Vec::new();
    for (i, program) in programs.iter().enumerate() {
        let names: Vec<String> = (0..given.len()).map(|i| format!("x{i}")).collect();
        let mut all: Vec<(&str, &[u8])> =
            names.iter().map(String::as_str).zip(given.iter().map(Given::bytes)).collect();
        all.extend(extra);
        let wanted: Vec<String> = session.set().plans[i].inputs.iter().map(|p| p.name.to_string()).collect();
        all.retain(|(n, _)| wanted.iter().any(|w| w == n));
        out.push(
            wait(session.run(i, &all, &Cancel::new(), &mut Vec::new()))
                .unwrap_or_else(|e| panic!("{}: {e}", program.name)),
        );
    }
    out
}

/// Value, gradients and cuts of a case.
pub fn check(device: &Device, case: &Case<'_>) {
    let name = &case.name;
    let numbers: Vec<Vec<f64>> = case.given.iter().map(Given::numbers).collect();
    let want = (case.reference)(&numbers);
    let none = no_weights();
    let catalog = case.catalog.unwrap_or(&none);

    let forward = {
        let mut g = Graph::new();
        let x = inputs(&mut g, &case.given);
        let y = (case.build)(&mut g, &x).unwrap_or_else(|e| panic!("{name}: {e}"));
        g.outputs(&[("y", y)]).unwrap().named("forward")
    };
    let mut programs = vec![forward];
    let factor = engine::random(4711, want.len(), 1.0);
    if !case.wrt.is_empty() && !want.is_empty() {
        let mut g = Graph::new();
        let x = inputs(&mut g, &case.given);
        let y = (case.build)(&mut g, &x).unwrap();
        let shape = g.shape(y).unwrap();
        let c = g.input("factor", shape.dims()).unwrap();
        let loss = g.mul(y, c).and_then(|l| g.sum(l)).unwrap();
        let wrt: Vec<Tensor> = case.wrt.iter().map(|i| x[*i]).collect();
        programs.push(g.value_and_grad(loss, &wrt).unwrap_or_else(|e| panic!("{name}: {e}")).named("step"));
    }
    let extra = [("factor", bytemuck::cast_slice(&factor))];
    let got = run(device, catalog, device.caps(), &programs, &case.given, &extra);
    near(name, &got[0].f32("y").unwrap(), &want, case.tolerance);

    if let Some(step) = got.get(1) {
        let loss =
            |x: &[Vec<f64>]| -> f64 { (case.reference)(x).iter().zip(&factor).map(|(y, c)| y * f64::from(*c)).sum() };
        for (k, operand) in case.wrt.iter().enumerate() {
            let n = numbers[*operand].len();
            let stride = n.div_ceil(SAMPLES).max(1);
            let sampled: Vec<usize> = (0..n).step_by(stride).collect();
            let slope = |i: &usize| {
                let at = |d: f64| {
                    let mut x = numbers.clone();
                    x[*operand][*i] += d;
                    loss(&x)
                };
                (at(STEP) - at(-STEP)) / (2.0 * STEP)
            };
            let want: Vec<f64> = sampled.iter().map(slope).collect();
            let all = step.f32(&format!("grad.{k}")).unwrap();
            assert_eq!(all.len(), n, "{name}: gradient of operand {operand}");
            let got: Vec<f32> = sampled.iter().map(|i| all[*i]).collect();
            near(&format!("{name}: gradient of operand {operand}"), &got, &want, case.slopes);
        }
    }
    let pieces = run(device, catalog, &cut(device), &programs, &case.given, &extra);
    for (whole, cut) in got.iter().zip(&pieces) {
        for (name, bytes) in names(whole) {
            same_bits(&format!("{} cut small, {name}", case.name), cut.bytes(&name).unwrap(), bytes);
        }
    }
}

fn names(out: &Outputs) -> Vec<(String, &[u8])> {
    let mut all = vec!["y".to_string(), "loss".to_string()];
    all.extend((0..8).map(|i| format!("grad.{i}")));
    all.into_iter().filter_map(|n| out.bytes(&n).ok().map(|b| (n.clone(), b))).collect()
}

/// A tensor of a file in a dtype, and its values as stored.
pub fn stored(name: &str, dtype: DType, shape: &[u64], values: &[f32]) -> (Data, Vec<f64>) {
    assert_eq!(shape.iter().product::<u64>() as usize, values.len());
    let (bytes, kept): (Vec<u8>, Vec<f64>) = match dtype {
        DType::F16 => {
            let half: Vec<half::f16> = values.iter().map(|v| half::f16::from_f32(*v)).collect();
            (half.iter().flat_map(|h| h.to_le_bytes()).collect(), half.iter().map(|h| h.to_f64()).collect())
        }
        DType::BF16 => {
            let half: Vec<half::bf16> = values.iter().map(|v| half::bf16::from_f32(*v)).collect();
            (half.iter().flat_map(|h| h.to_le_bytes()).collect(), half.iter().map(|h| h.to_f64()).collect())
        }
        _ => (bytemuck::cast_slice(values).to_vec(), values.iter().map(|v| f64::from(*v)).collect()),
    };
    (Data { name: name.into(), dtype, shape: shape.into(), bytes }, kept)
}

/// The dtypes of weights.
pub const WEIGHTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
