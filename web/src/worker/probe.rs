//! The founding programs, in the page.

use std::collections::BTreeMap;
use std::rc::Rc;

use ebbtide::compile::{Options, compile_with};
use ebbtide::event::{Event, EventSink};
use ebbtide::rt::Instant;
use ebbtide::weights::DType;
use ebbtide::weights::safetensors::{TensorSpec, write};
use ebbtide::{Catalog, Error, Graph, Pass, Program, Result, Session, Source};
use sha2::{Digest, Sha256};

use super::train::{budget_of, by_category};
use super::{Bench, Sink};
use crate::protocol::{Probe, ProbeFigures, Reply, RunSettings};

/// Numbers between -scale and scale, the same on every machine (SplitMix64 of a counter).
fn random(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    let mix = |n: u64| {
        let mut z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..n as u64).map(|i| (mix(seed << 32 | i) >> 40) as f32 / (1u64 << 23) as f32 * scale - scale).collect()
}

fn layer(name: &str, seed: u64, rows: u64, columns: u64) -> Result<Source> {
    let scale = 1.5 / (rows as f32).sqrt();
    let (w, b) = (random(2 * seed, (rows * columns) as usize, scale), random(2 * seed + 1, columns as usize, 0.5));
    let tensors = [
        (TensorSpec::new("w", DType::F32, [rows, columns]), bytemuck::cast_slice(&w)),
        (TensorSpec::new("b", DType::F32, [columns]), bytemuck::cast_slice(&b)),
    ];
    Ok(Source::memory(name, write(Vec::new(), name, &tensors, &BTreeMap::new())?))
}

/// `x = x·w + b` through `down` and `up` in turn, the mean, its gradient with respect to x.
fn stream_program(catalog: &Catalog, rounds: u32, manual: bool) -> Result<Program> {
    let mut g = Graph::new();
    let x = g.input("x", [96, 48])?;
    let mut h = x;
    for _ in 0..rounds {
        for name in ["down", "up"] {
            let segment = catalog.segment(name)?;
            h = if manual {
                g.with(&segment, |g, w| g.matmul(h, w.get("w")?, Some(w.get("b")?)))?
            } else {
                let (w, b) = (g.weight(&segment, "w")?, g.weight(&segment, "b")?);
                g.matmul(h, w, Some(b))?
            };
        }
    }
    let loss = g.mean(h)?;
    g.value_and_grad(loss, &[x])
}

impl Bench {
    pub async fn probe(self: &Rc<Bench>, id: u32, probe: &Probe) -> Result<Reply> {
        match probe {
            Probe::Stream { budget, rounds, manual } => self.stream_probe(id, budget, *rounds, *manual).await,
            Probe::Fold { .. } => Err(Error::Invalid {
                what: "the program `fold`".into(),
                reason: "it is not in the page yet; the command line has it: ebbtide probe compile".into(),
            }),
        }
    }

    async fn stream_probe(self: &Rc<Bench>, id: u32, budget: &str, rounds: u32, manual: bool) -> Result<Reply> {
        if !(1..=1000).contains(&rounds) {
            return Err(Error::Invalid { what: format!("{rounds} rounds"), reason: "1 to 1000 are possible".into() });
        }
        let (_, budget) = budget_of(&RunSettings { budget: Some(budget.into()), ..RunSettings::default() })?;
        let sources = vec![layer("down.safetensors", 1, 48, 64)?, layer("up.safetensors", 2, 64, 48)?];
        let catalog = Catalog::from_sources(sources).await?;
        let program = stream_program(&catalog, rounds, manual)?;
        let device = self.device().await?;
        let options = Options { once: true, ..Options::default() };
        let set = compile_with(&[program], &catalog, device.caps(), budget, options)?;
        let (planned, floor, budget_bytes) = (set.planned_peak(), set.floor, set.budget);
        let x = random(3, 96 * 48, 1.0);
        let (before, start) = (device.active_memory(), Instant::now());
        device.reset_peak_memory();
        let mut session = Session::new(&device, &catalog, set).await?;
        let mut trace = Traced { sink: Sink::new(self, id, &device), lines: Vec::new() };
        let out = session.run(0, &[("x", bytemuck::cast_slice(&x))], &self.cancel(), &mut trace).await?;
        trace.sink.flush();
        let usage = device.ledger().usage();
        let loss = out.f32("loss")?.first().copied().filter(|l| l.is_finite()).map(f64::from);
        let sum = Sha256::digest(out.bytes("grad.0")?);
        Ok(Reply::StreamProbe {
            trace: trace.lines,
            loss,
            grad_sha256: sum.iter().map(|b| format!("{b:02x}")).collect(),
            figures: ProbeFigures {
                budget_bytes,
                floor_bytes: floor,
                peak_bytes: usage.peak - before,
                planned_peak_bytes: planned,
                peak_by_category: by_category(&usage.at_peak),
                loads: out.loads,
                evictions: out.evictions,
                streamed_bytes: out.streamed_bytes,
                milliseconds: start.elapsed().as_secs_f64() * 1e3,
            },
        })
    }
}

/// Events for the page, and as lines.
struct Traced {
    sink: Sink,
    lines: Vec<String>,
}

impl EventSink for Traced {
    fn event(&mut self, event: Event) {
        let pass = |p: &Pass| if *p == Pass::Forward { "forward" } else { "backward" };
        match &event {
            Event::Load { segment, pass: p, .. } => {
                self.lines.push(format!("{}_load({segment}.safetensors)", pass(p)));
            }
            Event::Evict { segment, pass: p } => {
                self.lines.push(format!("{}_unload({segment}.safetensors)", pass(p)));
            }
            _ => {}
        }
        self.sink.event(event);
    }
}
