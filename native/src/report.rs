//! `--report DIR`: one HTML file with what a training did: losses, memory over time with the budget, loads and evictions.
//!
//! It is for looking back and for showing to others, so it holds everything it needs: charts are SVG in the page, nothing
//! is fetched. A long training has millions of loads; of those only the first steps are kept, and the page says so.

mod charts;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ebbtide::compile::{Action, Breakdown, Forecast, Occupied, PlanSet, SlotId};
use ebbtide::event::Step;
use ebbtide::rt::file::{io_error, make_folder, save_atomically};
use ebbtide::{Event, Result};

use crate::engine::short;

/// Steps whose loads are shown.
const SHOWN_STEPS: usize = 3;
/// Points of a chart, at most.
const MAX_POINTS: usize = 4096;
/// Name of the page in its folder.
pub const PAGE: &str = "report.html";

/// Keeps what the page will show.
pub struct Recorder {
    start: Instant,
    title: String,
    facts: Vec<(String, String)>,
    forecast: Option<Forecast>,
    /// Names of segments in the order of the forward pass.
    segments: Vec<String>,
    /// Of each plan of a step.
    plans: BTreeMap<String, Course>,
    steps: Vec<Step>,
    losses: Thinned,
    allocated: Thinned,
    evals: Vec<(u64, f64)>,
    samples: Vec<(u64, String, String)>,
    shown: usize,
    run: Option<Run>,
    bars: Vec<Bar>,
    /// What weight slots hold between runs.
    home: Vec<(SlotId, usize)>,
    /// What each weight slot holds now, and since when.
    held: BTreeMap<SlotId, (usize, f64)>,
    occupied: Vec<(f64, Breakdown)>,
}

/// What a plan says of its memory, to be laid over the times at which it ran.
struct Course {
    occupied: Vec<Occupied>,
    evictions: Vec<u32>,
    /// The slot of each load, in the order in which they come.
    loads: Vec<SlotId>,
    actions: u32,
}

/// A run being recorded.
struct Run {
    program: String,
    /// Times at which actions were seen: (seconds, action).
    seen: Vec<(f64, u32)>,
    evictions: usize,
    loads: usize,
}

/// A segment in device memory, from its load until another takes its slot, in seconds.
pub(crate) struct Bar {
    pub segment: usize,
    pub from: f64,
    pub to: f64,
}

/// A curve of bounded length: when it is full, every second point goes.
#[derive(Default)]
struct Thinned {
    points: Vec<(f64, f64)>,
    every: usize,
    seen: usize,
}

impl Thinned {
    fn push(&mut self, x: f64, y: f64) {
        self.every = self.every.max(1);
        if self.seen.is_multiple_of(self.every) {
            self.points.push((x, y));
        }
        self.seen += 1;
        if self.points.len() > MAX_POINTS {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.every *= 2;
        }
    }
}

impl Recorder {
    /// For a training over these plans. `facts` are lines of the page's table.
    pub fn new(title: &str, set: &PlanSet, facts: Vec<(String, String)>) -> Recorder {
        let course = |i: usize| {
            let (actions, fills) = (&set.plans[i].actions, &set.plans[i].fills);
            let evicts = |(at, a): (u32, &Action)| matches!(a, Action::Evict { .. }).then_some(at);
            let slot = |at: &u32| match actions.get(*at as usize) {
                Some(Action::Load { slot, .. }) => Some(*slot),
                _ => None,
            };
            Course {
                occupied: set.occupied(i),
                evictions: (0..).zip(actions).filter_map(evicts).collect(),
                loads: fills.iter().filter_map(slot).collect(),
                actions: actions.len() as u32,
            }
        };
        Recorder {
            start: Instant::now(),
            title: title.into(),
            facts,
            forecast: None,
            segments: set.segments.iter().map(|s| s.name.to_string()).collect(),
            plans: (0..set.plans.len())
                .filter(|i| set.plans[*i].name.starts_with("train"))
                .map(|i| (set.plans[i].name.to_string(), course(i)))
                .collect(),
            steps: Vec::new(),
            losses: Thinned::default(),
            allocated: Thinned::default(),
            evals: Vec::new(),
            samples: Vec::new(),
            shown: 0,
            run: None,
            bars: Vec::new(),
            home: set.home.iter().map(|(slot, segment)| (*slot, *segment as usize)).collect(),
            held: BTreeMap::new(),
            occupied: Vec::new(),
        }
    }

    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Takes note of an event.
    pub fn event(&mut self, event: &Event) {
        match event {
            Event::Plan(forecast) => self.forecast = Some((**forecast).clone()),
            Event::Step(step) => self.step(step),
            Event::Eval { step, loss, .. } => self.evals.push((*step, *loss)),
            Event::Sample { step, prompt, text } => self.samples.push((*step, prompt.to_string(), text.to_string())),
            _ if self.shown >= SHOWN_STEPS => {}
            // Steps only: validations and samples would bury them.
            Event::RunStart { program } if self.plans.contains_key(&**program) => {
                let now = self.now();
                for (slot, segment) in self.home.clone() {
                    // A validation in between came back home as well.
                    if self.held.get(&slot).is_none_or(|(there, _)| *there != segment) {
                        self.hold(slot, segment, now);
                    }
                }
                self.run = Some(Run { program: program.to_string(), seen: vec![(now, 0)], evictions: 0, loads: 0 });
            }
            Event::Load { segment, .. } => {
                let now = self.now();
                let segment = self.segments.iter().position(|s| **s == **segment);
                let Some(run) = &mut self.run else { return };
                let slot = self.plans.get(&run.program).and_then(|c| c.loads.get(run.loads).copied());
                run.loads += 1;
                if let (Some(slot), Some(segment)) = (slot, segment) {
                    self.hold(slot, segment, now);
                }
            }
            Event::Evict { .. } => {
                let now = self.now();
                let Some(run) = &mut self.run else { return };
                if let Some(course) = self.plans.get(&run.program) {
                    run.seen.extend(course.evictions.get(run.evictions).map(|action| (now, *action)));
                    run.evictions += 1;
                }
            }
            Event::RunEnd { .. } => self.end_run(),
            _ => {}
        }
    }

    /// A segment takes a slot, and what was there has gone.
    fn hold(&mut self, slot: SlotId, segment: usize, now: f64) {
        if let Some((segment, from)) = self.held.insert(slot, (segment, now)) {
            self.bars.push(Bar { segment, from, to: now });
        }
    }

    /// Lays the plan's course over the times at which its evictions were seen.
    fn end_run(&mut self) {
        let now = self.now();
        let Some(mut run) = self.run.take() else { return };
        let Some(course) = self.plans.get(&run.program) else { return };
        run.seen.push((now, course.actions));
        for o in &course.occupied {
            let after = run.seen.partition_point(|(_, action)| *action < o.action).min(run.seen.len() - 1);
            let (t1, a1) = run.seen[after];
            let (t0, a0) = run.seen[after.saturating_sub(1)];
            let part = if a1 > a0 { f64::from(o.action.saturating_sub(a0)) / f64::from(a1 - a0) } else { 1.0 };
            self.occupied.push((t0 + (t1 - t0) * part.min(1.0), o.bytes));
        }
    }

    fn step(&mut self, step: &Step) {
        let now = self.now();
        self.losses.push(step.step as f64, step.loss);
        self.allocated.push(now, step.active_bytes as f64);
        self.shown += 1;
        if self.shown == SHOWN_STEPS {
            let held = std::mem::take(&mut self.held);
            self.bars.extend(held.into_values().map(|(segment, from)| Bar { segment, from, to: now }));
        }
        if self.steps.len() < 2 {
            self.steps.push(*step);
        } else {
            self.steps[1] = *step;
        }
    }

    /// Writes the page; gives its path.
    pub fn write(&self, folder: &Path) -> Result<PathBuf> {
        make_folder(folder)?;
        let path = folder.join(PAGE);
        let page = self.page();
        save_atomically(&path, |out| out.write_all(page.as_bytes()).map_err(|e| io_error(&path, e)))?;
        Ok(path)
    }

    fn page(&self) -> String {
        let mut out = String::from(HEAD);
        let _ = write!(out, "<title>{0}</title></head><body><main><h1>{0}</h1>", text(&self.title));
        out += "<table>";
        for (name, value) in &self.facts {
            let _ = write!(out, "<tr><th>{}</th><td>{}</td></tr>", text(name), text(value));
        }
        if let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) {
            let loss = format!("{:.4} in step {}, {:.4} in step {}", first.loss, first.step, last.loss, last.step);
            let peak = format!(
                "{} measured, {} planned: {}",
                short(last.peak_bytes),
                short(last.planned_peak_bytes),
                if last.peak_bytes == last.planned_peak_bytes { "equal" } else { "not equal" }
            );
            for (name, value) in [("loss", loss), ("peak of device memory", peak)] {
                let _ = write!(out, "<tr><th>{name}</th><td>{}</td></tr>", text(&value));
            }
        }
        out += "</table><h2>Loss</h2>";
        out += &charts::loss(&self.losses.points, &self.evals);
        if let Some(f) = &self.forecast {
            out += "<h2>Memory over time</h2><p>Bytes whose content is needed, by category, over the first steps; what is \
                    allocated; and the budget. Slots are made once and refilled, so what is allocated does not move.</p>";
            let allocated = f.peak_by_category.total();
            out += &charts::memory(&thinned(&self.occupied), allocated, f.budget_bytes);
            out += "<table><tr><th>category</th><td>allocated</td></tr>";
            for (category, bytes) in f.peak_by_category.iter() {
                let _ = write!(out, "<tr><th>{}</th><td>{}</td></tr>", category.name(), short(bytes));
            }
            out += "</table>";
        }
        let _ = write!(
            out,
            "<h2>Loads and evictions</h2><p>Where each segment was in device memory up to step {SHOWN_STEPS}, from \
             its load until another took its slot, by the host's clock. Segments that stay are bars from end to end.</p>"
        );
        out += &charts::timeline(&self.segments, &self.bars);
        if !self.samples.is_empty() {
            out += "<h2>Samples</h2>";
        }
        for (step, prompt, sample) in &self.samples {
            let _ = write!(out, "<h3>after step {step}</h3><pre><b>{}</b>{}</pre>", text(prompt), text(sample));
        }
        let version = env!("CARGO_PKG_VERSION");
        let _ = writeln!(out, "<p>Written by ebbtide {version}.</p></main></body></html>");
        out
    }
}

/// Of many points the highest in each of some hundred spans of time.
fn thinned(points: &[(f64, Breakdown)]) -> Vec<(f64, Breakdown)> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    let width = ((last.0 - first.0) / 600.0).max(1e-9);
    let mut kept: Vec<(f64, Breakdown)> = Vec::new();
    let mut span = None;
    for point in points {
        let own = ((point.0 - first.0) / width) as u64;
        match kept.last_mut() {
            Some(highest) if span == Some(own) => {
                if point.1.total() > highest.1.total() {
                    *highest = *point;
                }
            }
            _ => kept.push(*point),
        }
        span = Some(own);
    }
    kept
}

/// Text that is only text in a page.
fn text(raw: &str) -> String {
    let one = |c: char| match c {
        '<' => "&lt;".to_string(),
        '>' => "&gt;".to_string(),
        '&' => "&amp;".to_string(),
        '"' => "&quot;".to_string(),
        c => c.to_string(),
    };
    raw.chars().map(one).collect()
}

const HEAD: &str = "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\">\
<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
<style>body{font:16px/1.5 system-ui,sans-serif;color:#1b2733;background:#fff;margin:0}main{max-width:60rem;margin:2rem auto;\
padding:0 1rem}table{border-collapse:collapse}th{text-align:left;font-weight:600;padding:.15rem 1.5rem .15rem 0}\
svg{width:100%;height:auto}pre{background:#f2f5f7;padding:.75rem;white-space:pre-wrap;overflow-wrap:anywhere}</style>";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_stays_short_and_keeps_its_ends_near() {
        let mut curve = Thinned::default();
        (0..100_000).for_each(|i| curve.push(f64::from(i), 0.0));
        assert!(curve.points.len() <= MAX_POINTS + 1);
        assert_eq!(curve.points[0].0, 0.0);
        assert!(curve.points.last().is_some_and(|p| p.0 > 99_900.0));
        assert!(curve.points.windows(2).all(|w| w[0].0 < w[1].0));
    }

    #[test]
    fn text_of_a_model_is_no_markup() {
        assert_eq!(text("<script>\"&"), "&lt;script&gt;&quot;&amp;");
    }
}
