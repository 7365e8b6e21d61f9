//! Training steps: gradients in one array, norm, clipping, the finite test, AdamW; and the same bits however it is cut.
#![cfg(not(target_arch = "wasm32"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod ops;

use ebbtide::compile::{self, Action, Budget, Options, PlanSet, Recompute};
use ebbtide::graph::{Shape, Unary};
use ebbtide::nn::{
    AdamW, CONTROL, HYPER_INPUT, Lora, Params, embedding, layer_norm, linear, linear_lora, rms_norm, train_step,
};
use ebbtide::{Cancel, Caps, Catalog, Device, Graph, Outputs, Program, Session};
use ebbtide_tests::engine::{self, device, f32s, random, same_bits, wait};
use ebbtide_tests::kernel::near;
use ops::reference as textbook;
use ops::{CHAIN, cut};

const ROWS: u64 = 9;
const IN: u64 = 33;
const OUT: u64 = 7;
const RANK: u64 = 2;
const EPS: f32 = 1e-5;

fn shape(dims: &[u64]) -> Shape {
    Shape::new(dims).unwrap()
}

/// A frozen layer `w` `[7, 33]` and its bias.
fn catalog() -> Catalog {
    let tensors = [
        f32s("w", &[OUT, IN], &random(100, (OUT * IN) as usize, 0.3)),
        f32s("b", &[OUT], &random(101, OUT as usize, 0.3)),
    ];
    engine::catalog(&[("layer", engine::file(&tensors))])
}

/// A norm's gain, an adapter, a second linear layer, and a tensor that the loss does not reach.
fn params(mut params: Params) -> Params {
    for (name, dims) in [
        ("gain", &[IN][..]),
        ("a", &[RANK, IN]),
        ("unused", &[5]),
        ("b", &[OUT, RANK]),
        ("last", &[3, OUT]),
        ("last bias", &[3]),
    ] {
        params.add(name, shape(dims)).unwrap();
    }
    params
}

fn start(params: &Params) -> Vec<f32> {
    random(200, params.iter().map(|p| p.shape.elements() as usize).sum(), 0.5)
}

/// norm → frozen layer with adapter → tanh → linear → mean of squares. With `twice` the adapter is used once more.
fn program(catalog: &Catalog, params: &Params, adamw: &AdamW, twice: bool) -> Program {
    let mut g = Graph::new();
    let x = g.input("x", [ROWS, IN]).unwrap();
    let values = params.bind(&mut g).unwrap();
    let w = &values.windows;
    let segment = catalog.segment("layer").unwrap();
    let mut sums = Vec::new();
    for pass in 0..1 + u32::from(twice) {
        let y = g
            .block(|g| {
                let (frozen, bias) = (g.weight(&segment, "w")?, g.weight(&segment, "b")?);
                let h = if pass == 0 { rms_norm(g, x, w[0], EPS, 1.0)? } else { x };
                let h = linear_lora(g, h, frozen, Some(bias), Lora { a: w[1], b: w[3], scale: 0.7, input: None })?;
                let h = g.unary(Unary::Tanh, h)?;
                let y = linear(g, h, w[4], Some(w[5]))?;
                g.mul(y, y)
            })
            .unwrap();
        sums.push(g.mean(y).unwrap());
    }
    let loss = sums.into_iter().reduce(|a, b| g.add(a, b).unwrap()).unwrap();
    train_step(g, loss, params, &values, adamw).unwrap()
}

fn compiled(
    device: &Device,
    catalog: &Catalog,
    program: &Program,
    caps: &Caps,
    budget: Budget,
    recompute: Recompute,
) -> PlanSet {
    let _ = device;
    let options = Options { recompute, ..Options::default() };
    compile::compile_with(std::slice::from_ref(program), catalog, caps, budget, options).unwrap()
}

struct Run {
    session: Session,
    adamw: AdamW,
    params: Params,
}

impl Run {
    fn new(device: &Device, catalog: &Catalog, set: PlanSet, params: &Params, adamw: &AdamW) -> Run {
        let mut session = wait(Session::new(device, catalog, set)).unwrap();
        let all = start(params);
        let mut at = 0;
        for (i, n) in params.arrays().iter().enumerate() {
            let part = &all[at..at + *n as usize];
            wait(session.write_state(&Params::values_name(i), bytemuck::cast_slice(part))).unwrap();
            at += *n as usize;
        }
        Run { session, adamw: *adamw, params: params.clone() }
    }

    fn step(&mut self, x: &[f32], step: u64) -> Outputs {
        let hyper = self.adamw.hyper(0.01, step);
        let inputs = [("x", bytemuck::cast_slice(x)), (HYPER_INPUT, bytemuck::cast_slice(&hyper))];
        wait(self.session.run(0, &inputs, &Cancel::new(), &mut Vec::new())).unwrap()
    }

    /// Values and moments, whatever the arrays.
    fn state(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        for kind in 0..3 {
            for i in 0..self.params.arrays().len() {
                let [m, v] = Params::moment_names(i);
                let name = [Params::values_name(i), m, v][kind].clone();
                all.extend(wait(self.session.read_state(&name)).unwrap());
            }
        }
        all
    }
}

fn control(out: &Outputs) -> (u32, f32, f32) {
    let w: Vec<f32> = out.f32(CONTROL).unwrap();
    (w[0].to_bits(), w[1], w[2])
}

/// The loss in f64, of values in the order of the parameters.
fn loss(x: &[f64], values: &[f64]) -> f64 {
    let doubles =
        |seed: u64, n: u64, s: f32| random(seed, n as usize, s).iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
    let (frozen, bias) = (doubles(100, OUT * IN, 0.3), doubles(101, OUT, 0.3));
    let mut at = 0;
    let mut take = |n: u64| {
        at += n as usize;
        &values[at - n as usize..at]
    };
    let (gain, a, _, b) = (take(IN), take(RANK * IN), take(5), take(OUT * RANK));
    let (last, last_bias) = (take(3 * OUT), take(3));
    let h = textbook::rms_norm(x, gain, f64::from(EPS), 1.0);
    let plain = textbook::linear(&h, &frozen, Some(&bias), IN as usize, OUT as usize);
    let low = textbook::linear(&h, a, None, IN as usize, RANK as usize);
    let part = textbook::linear(&low, b, None, RANK as usize, OUT as usize);
    let h: Vec<f64> = plain.iter().zip(part).map(|(p, q)| (p + f64::from(0.7f32) * q).tanh()).collect();
    let y = textbook::linear(&h, last, Some(last_bias), OUT as usize, 3);
    y.iter().map(|v| v * v).sum::<f64>() / y.len() as f64
}

#[test]
fn three_steps_equal_adamw_in_f64_with_gradients_by_differences() {
    let device = device();
    let catalog = catalog();
    let params = params(Params::new());
    for max_norm in [0.0, 0.05] {
        let adamw = AdamW { weight_decay: 0.1, max_norm, ..AdamW::default() };
        let program = program(&catalog, &params, &adamw, false);
        let set = compiled(&device, &catalog, &program, device.caps(), Budget::All, Recompute::Auto);
        let mut run = Run::new(&device, &catalog, set, &params, &adamw);
        let mut values: Vec<f64> = start(&params).iter().map(|v| f64::from(*v)).collect();
        let (mut m, mut v) = (vec![0.0; values.len()], vec![0.0; values.len()]);
        for step in 1..=3 {
            let x = random(300 + step, (ROWS * IN) as usize, 1.0);
            let x64: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let out = run.step(&x, step);
            near("loss", &out.f32("loss").unwrap(), &[loss(&x64, &values)], CHAIN);
            let slope = |i: usize| {
                let at = |d: f64| {
                    let mut values = values.clone();
                    values[i] += d;
                    loss(&x64, &values)
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            };
            let grads: Vec<f64> = (0..values.len()).map(slope).collect();
            let norm = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
            let factor = if max_norm > 0.0 && norm > max_norm { max_norm / norm } else { 1.0 };
            let (bits, clip, got) = control(&out);
            assert_eq!(bits, 0);
            near("clip and norm", &[clip, got], &[factor, norm], CHAIN);
            let (rate, t) = (0.01, step as i32);
            for i in 0..values.len() {
                let g = grads[i] * factor;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let (mh, vh) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.999f64.powi(t)));
                values[i] -= rate * (mh / (vh.sqrt() + 1e-8) + 0.1 * values[i]);
            }
        }
        // An element whose gradient is near zero takes its step's sign from rounding: its share of a step is allowed.
        let state: Vec<f32> = bytemuck::pod_collect_to_vec(&run.state());
        near(
            "values",
            &state[..values.len()],
            &values,
            ebbtide_tests::kernel::Tolerance { rel: 1e-4, of_largest: 1e-4 },
        );
    }
}

#[test]
fn a_step_that_is_not_finite_changes_nothing_and_leaves_no_trace() {
    let device = device();
    let catalog = catalog();
    let params = params(Params::new());
    let adamw = AdamW { max_norm: 1.0, ..AdamW::default() };
    let program = program(&catalog, &params, &adamw, false);
    let make = || {
        let set = compiled(&device, &catalog, &program, device.caps(), Budget::All, Recompute::Auto);
        Run::new(&device, &catalog, set, &params, &adamw)
    };
    let x = |i: u64| random(400 + i, (ROWS * IN) as usize, 1.0);
    let (mut clean, mut hit) = (make(), make());
    clean.step(&x(1), 1);
    hit.step(&x(1), 1);
    let before = hit.state();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut broken = x(2);
        broken[5] = bad;
        let (bits, ..) = control(&hit.step(&broken, 2));
        assert_ne!(bits, 0, "{bad}");
        same_bits(&format!("after {bad}"), &hit.state(), &before);
    }
    let (a, b) = (clean.step(&x(3), 2), hit.step(&x(3), 2));
    same_bits("the next loss", b.bytes("loss").unwrap(), a.bytes("loss").unwrap());
    assert_eq!(control(&b).0, 0);
    same_bits("the next state", &hit.state(), &clean.state());
}

#[test]
fn budgets_recomputation_cuts_and_arrays_leave_no_trace() {
    let device = device();
    let catalog = catalog();
    let whole = params(Params::new());
    // Clipping off: the norm's blocks are counted from each array's first element.
    let adamw = AdamW::default();
    for twice in [false, true] {
        let steps = |set: PlanSet, params: &Params| {
            let mut run = Run::new(&device, &catalog, set, params, &adamw);
            let losses: Vec<Vec<u8>> = (1..=4)
                .map(|i| run.step(&random(500 + i, (ROWS * IN) as usize, 1.0), i).bytes("loss").unwrap().to_vec())
                .collect();
            (losses.concat(), run.state())
        };
        let step = program(&catalog, &whole, &adamw, twice);
        let set = |caps: &Caps, budget, recompute| compiled(&device, &catalog, &step, caps, budget, recompute);
        let want = steps(set(device.caps(), Budget::All, Recompute::Off), &whole);
        let same = |what: &str, got: (Vec<u8>, Vec<u8>)| {
            same_bits(&format!("{what}: losses"), &got.0, &want.0);
            same_bits(&format!("{what}: state"), &got.1, &want.1);
        };
        same("recomputed", steps(set(device.caps(), Budget::All, Recompute::On), &whole));
        same("at the floor", steps(set(device.caps(), Budget::Floor, Recompute::On), &whole));
        same("cut small", steps(set(&cut(&device), Budget::Floor, Recompute::Auto), &whole));
        let parted = params(Params::cut_at(4 * 80));
        assert!(parted.arrays().len() > 1, "{:?}", parted.arrays());
        let step = program(&catalog, &parted, &adamw, twice);
        let set = compiled(&device, &catalog, &step, device.caps(), Budget::All, Recompute::Auto);
        same("in several arrays", steps(set, &parted));
    }
}

fn kernels(set: &PlanSet) -> Vec<&str> {
    let names = set.plans[0].actions.iter().filter_map(|a| match a {
        Action::Dispatch { kernel, .. } => Some(kernel.shader.name),
        _ => None,
    });
    names.collect()
}

#[test]
fn gradients_are_written_where_they_stay_and_go_on_from_what_is_there() {
    let device = device();
    let catalog = catalog();
    let params = params(Params::new());
    for twice in [false, true] {
        let program = program(&catalog, &params, &AdamW::default(), twice);
        let set = compiled(&device, &catalog, &program, device.caps(), Budget::All, Recompute::Off);
        let placed = kernels(&set).iter().filter(|k| **k == "place").count();
        // Only the tensor that the loss does not reach is filled with zeros.
        assert_eq!(placed, 1, "{:?}", kernels(&set));
        assert_eq!(kernels(&set).iter().filter(|k| **k == "adamw").count(), 1, "one update for all tensors");
        assert_eq!(kernels(&set).last(), Some(&"adamw"), "updates come last");
    }
}

#[test]
fn micro_batches_go_on_from_the_stored_gradient() {
    // The same tokens in one batch or in two: every sum over tokens goes on where it stopped, so the gradients of all kinds of
    // parameters agree in every bit. (Backward meets what came last first, so the halves are given the other way round.)
    let device = device();
    let catalog = catalog();
    let mut params = Params::new();
    for (name, dims) in [
        ("table", &[11, IN][..]),
        ("gain", &[IN]),
        ("shift", &[IN]),
        ("a", &[RANK, IN]),
        ("b", &[OUT, RANK]),
        ("rms", &[OUT]),
        ("w", &[5, OUT]),
        ("bias", &[5]),
    ] {
        params.add(name, shape(dims)).unwrap();
    }
    let adamw = AdamW::default();
    let tokens = 2 * ROWS as usize;
    let ids: Vec<i32> = (0..tokens as i32).map(|i| i * i % 11).collect();
    let c = random(601, tokens * 5, 1.0);
    let segment = catalog.segment("layer").unwrap();
    let run = |batches: &[std::ops::Range<usize>]| {
        let mut g = Graph::new();
        let values = params.bind(&mut g).unwrap();
        let w = &values.windows;
        let mut loss = None;
        for batch in batches {
            let rows = batch.len() as u64;
            let ids = g.input_i32(&format!("ids{}", batch.start), [rows]).unwrap();
            let c = g.input(&format!("c{}", batch.start), [rows, 5]).unwrap();
            let mut build = || {
                let x = embedding(&mut g, w[0], ids)?;
                let x = layer_norm(&mut g, x, w[1], Some(w[2]), EPS)?;
                let frozen = g.weight(&segment, "w")?;
                let x = linear_lora(&mut g, x, frozen, None, Lora { a: w[3], b: w[4], scale: 0.7, input: None })?;
                let x = rms_norm(&mut g, x, w[5], EPS, 0.0)?;
                let y = linear(&mut g, x, w[6], Some(w[7]))?;
                let y = g.mul(y, c)?;
                let sum = g.sum(y)?;
                match loss {
                    Some(loss) => g.add(loss, sum),
                    None => Ok(sum),
                }
            };
            loss = Some(build().unwrap());
        }
        let program = train_step(g, loss.unwrap(), &params, &values, &adamw).unwrap();
        let set = compiled(&device, &catalog, &program, device.caps(), Budget::All, Recompute::Auto);
        let mut run = Run::new(&device, &catalog, set, &params, &adamw);
        let hyper = adamw.hyper(0.01, 1);
        let names: Vec<(String, &[u8])> = batches
            .iter()
            .flat_map(|b| {
                let c: &[u8] = bytemuck::cast_slice(&c[5 * b.start..5 * b.end]);
                [(format!("ids{}", b.start), bytemuck::cast_slice(&ids[b.clone()])), (format!("c{}", b.start), c)]
            })
            .collect();
        let mut inputs: Vec<(&str, &[u8])> = names.iter().map(|(n, b)| (n.as_str(), *b)).collect();
        inputs.push((HYPER_INPUT, bytemuck::cast_slice(&hyper)));
        wait(run.session.run(0, &inputs, &Cancel::new(), &mut Vec::new())).unwrap();
        wait(run.session.read_state(&Params::moment_names(0)[0])).unwrap()
    };
    let all = 0..tokens;
    let whole = run(std::slice::from_ref(&all));
    assert!(whole.iter().any(|b| *b != 0));
    same_bits("first moments of two halves", &run(&[tokens / 2..tokens, 0..tokens / 2]), &whole);
    same_bits("first moments of three parts", &run(&[13..tokens, 5..13, 0..5]), &whole);
}

#[test]
fn adapters_gradients_and_moments_are_as_large_as_what_is_trained() {
    let device = device();
    let catalog = catalog();
    let params = params(Params::new());
    let program = program(&catalog, &params, &AdamW::default(), false);
    let set = compiled(&device, &catalog, &program, device.caps(), Budget::All, Recompute::Auto);
    let trained = 4 * params.iter().map(|p| p.shape.elements()).sum::<u64>();
    let of = |c| set.table.slots.iter().filter(|s| s.category == c).map(|s| s.bytes()).sum::<u64>();
    use ebbtide::compile::Category;
    for (category, times) in [(Category::Adapters, 1), (Category::Gradients, 1), (Category::Optimizer, 2)] {
        let bytes = of(category);
        assert!((times * trained..times * (trained + 256)).contains(&bytes), "{category:?}: {bytes} of {trained}");
    }
}

#[test]
fn parameters_that_cannot_be_are_refused_in_words() {
    let mut params = Params::cut_at(40);
    params.add("a", shape(&[4])).unwrap();
    assert!(params.add("a", shape(&[4])).unwrap_err().to_string().contains("taken"));
    assert!(params.add("b", shape(&[11])).unwrap_err().to_string().contains("10"));
    assert!(params.add("c", shape(&[0])).is_err());
    params.add("d", shape(&[7])).unwrap();
    assert_eq!(params.arrays(), [4, 7]);
    assert_eq!((params.get("d").unwrap().array, params.get("d").unwrap().offset), (1, 0));

    let mut g = Graph::new();
    let x = g.input("x", [1]).unwrap();
    let none = Params::new();
    let values = none.bind(&mut g).unwrap();
    assert!(train_step(g.clone(), x, &none, &values, &AdamW::default()).is_err());
    let values = params.bind(&mut g).unwrap();
    let loss = g.sum(values.windows[0]).unwrap();
    let odd = AdamW { beta1: 1.0, ..AdamW::default() };
    assert!(train_step(g, loss, &params, &values, &odd).is_err());
}
