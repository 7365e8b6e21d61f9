//! What a training says while it runs: a bar on a terminal, plain lines elsewhere, or one JSON object an event.
//!
//! Lines are the same with and without a bar, so that a log of a run reads like the run. Text from a model or a file never
//! reaches the terminal as a control sequence.

use std::time::Duration;

use ebbtide::Event;
use ebbtide::event::Step;
use indicatif::{ProgressBar, ProgressStyle};

use crate::engine::short;

/// Which events are printed, and how.
pub struct Progress {
    json: bool,
    bar: Option<ProgressBar>,
    /// Steps from one line to the next.
    every: u64,
    budget: u64,
    since: Since,
}

/// Steps since the last line.
#[derive(Default)]
struct Since {
    steps: u64,
    tokens: u64,
    loss: f64,
    seconds: f64,
    streamed: u64,
}

impl Progress {
    /// Says one line every so many steps; with `json` one object for every event but loads.
    pub fn new(json: bool, every: u64) -> Progress {
        Progress { json, bar: None, every: every.max(1), budget: 0, since: Since::default() }
    }

    /// Takes note of an event.
    pub fn event(&mut self, event: &Event) {
        if self.json {
            if !matches!(
                event,
                Event::RunStart { .. } | Event::Load { .. } | Event::Evict { .. } | Event::RunEnd { .. }
            ) && let Ok(text) = serde_json::to_string(event)
            {
                println!("{text}");
            }
            return;
        }
        match event {
            Event::Plan(forecast) => {
                self.budget = forecast.budget_bytes;
                self.line(&format!(
                    "planned: peak {} of a budget of {}; {} of {} weights stay; a step of the longest rows reads {} in {} loads",
                    short(forecast.peak_bytes),
                    short(forecast.budget_bytes),
                    short(forecast.resident_weights),
                    short(forecast.weight_bytes),
                    short(forecast.bytes_per_step),
                    forecast.loads_per_step,
                ));
            }
            Event::Note { text } => self.line(&format!("note: {text}")),
            Event::Resumed { step } => self.line(&format!("goes on after step {step}")),
            Event::Step(step) => self.step(step),
            Event::Eval { step, loss, seconds } => {
                self.line(&format!("step {step}: validation loss {loss:.4} ({seconds:.1} s)"));
            }
            Event::Sample { step, prompt, text } => {
                self.line(&format!("step {step}: sample: {}", printable(&format!("{prompt}{text}"))));
            }
            Event::Saved { step, place } => self.line(&format!("step {step}: saved in {place}")),
            Event::End { step, seconds } => {
                self.clear();
                self.line(&format!("done: {step} steps, {}", time(*seconds)));
            }
            _ => {}
        }
    }

    /// Takes note of a plan that somebody else tells.
    pub fn budget(&mut self, bytes: u64) {
        self.budget = bytes;
    }

    /// Takes the bar away, so that what follows stands by itself.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// A line above the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }

    fn step(&mut self, step: &Step) {
        let bar = self.bar.get_or_insert_with(|| bar(step.steps, step.step - 1));
        let per_step = (self.since.seconds + step.seconds) / (self.since.steps + 1) as f64;
        let left = time(per_step * (step.steps - step.step) as f64);
        let memory = format!("{} of {}", short(step.active_bytes), short(self.budget));
        bar.set_message(format!(
            "loss {:.4}, {:.0} tokens/s, memory {memory}, {} streamed, {left} left",
            step.loss,
            step.tokens_per_second,
            short(step.streamed_bytes)
        ));
        bar.set_position(step.step);
        let since = &mut self.since;
        since.steps += 1;
        since.tokens += step.trained_tokens;
        since.loss += step.loss;
        since.seconds += step.seconds;
        since.streamed += step.streamed_bytes;
        if !step.finite {
            self.line(&format!("step {}: loss or gradients are not finite; nothing was updated", step.step));
        }
        if step.step.is_multiple_of(self.every) || step.step == step.steps {
            let since = std::mem::take(&mut self.since);
            let n = since.steps as f64;
            self.line(&format!(
                "step {}/{}: loss {:.4}, learning rate {:.3e}, {:.0} tokens/s, {:.2} s a step, peak {} of {}, {} streamed, {left} left",
                step.step,
                step.steps,
                since.loss / n,
                step.learning_rate,
                since.tokens as f64 / since.seconds.max(1e-9),
                since.seconds / n,
                short(step.peak_bytes),
                short(self.budget),
                short(since.streamed),
            ));
        }
    }
}

/// On a terminal; elsewhere it draws nothing.
fn bar(steps: u64, done: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps).with_position(done);
    // The template is ours and sound; were it not, the plain bar would do.
    if let Ok(style) = ProgressStyle::with_template("{pos}/{len} {bar:24} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A time for people.
pub fn time(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{}:{:02} min", s / 60, s % 60),
        _ => format!("{}:{:02} h", s / 3600, s % 3600 / 60),
    }
}

/// A text without control characters, on one line.
pub fn printable(text: &str) -> String {
    let one = |c: char| match c {
        '\n' => "⏎".to_string(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_reaches_the_terminal_as_text() {
        assert_eq!(printable("a\u{1b}[2J\nb"), "a\\u{1b}[2J⏎b");
    }

    #[test]
    fn times_are_told_in_the_unit_that_fits() {
        assert_eq!([0.25, 75.0, 3725.0].map(time), ["0.2 s", "1:15 min", "1:02 h"]);
    }
}
