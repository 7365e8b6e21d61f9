//! How texts leave the command: as they come, for people or as events.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use ebbtide::error::Bytes;
use ebbtide::llm::tokenizer::{TextStream, Tokenizer};
use ebbtide::{Device, Event, PlanSet, Result};
use serde_json::{Value, json};

use crate::witness::Witness;

/// What the engine did for a text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    loads: u64,
    streamed: u64,
}

impl Counts {
    /// Takes note of an event.
    pub fn event(&mut self, event: &Event) {
        if let Event::RunEnd { loads, streamed_bytes, .. } = event {
            self.loads += loads;
            self.streamed += streamed_bytes;
        }
    }
}

/// The way out.
pub struct Speaker {
    json: bool,
    /// A terminal obeys control characters, which a model may write.
    terminal: bool,
    device: Device,
    witness: Witness,
    context: u64,
}

impl Speaker {
    /// Speaks as events or as text.
    pub fn new(json: bool, device: &Device, witness: Witness) -> Speaker {
        Speaker { json, terminal: std::io::stdout().is_terminal(), device: device.clone(), witness, context: 0 }
    }

    /// Whether events are printed.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Tokens of prompt and text together.
    pub fn context(&self) -> usize {
        self.context as usize
    }

    /// What was planned.
    pub fn plan(&mut self, set: &PlanSet, context: u64) {
        self.context = context;
        if self.json {
            event(&json!({
                "event": "plan",
                "format": 1,
                "adapter_name": self.device.caps().adapter,
                "budget_bytes": set.budget,
                "floor_bytes": set.floor,
                "planned_peak_bytes": set.planned_peak(),
                "peak_by_category": set.planned,
                "weight_bytes": set.weight_bytes,
                "resident_weights": set.resident_bytes,
                "context": context,
            }));
        }
    }

    /// Says which adapter comes now.
    pub fn heading(&self, adapter: Option<&str>) {
        if !self.json {
            println!("── {} ──", adapter.unwrap_or("no adapter"));
        }
    }

    /// Begins a text.
    pub fn begin<'a>(&'a self, tokenizer: &'a Tokenizer, prompt: usize, adapter: Option<&str>) -> Answer<'a> {
        Answer {
            speaker: self,
            stream: Some(tokenizer.stream(true)),
            text: String::new(),
            failed: None,
            prompt,
            adapter: adapter.map(str::to_string),
            tokens: 0,
            began: Instant::now(),
            first: None,
            last: None,
        }
    }

    fn put(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        // What a closed terminal refuses is lost; the text is still counted.
        let _ = if self.terminal { out.write_all(harmless(text).as_bytes()) } else { out.write_all(text.as_bytes()) };
        let _ = out.flush();
    }
}

/// Without characters that a terminal would obey.
fn harmless(text: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{FFFD}' } else { c };
    text.chars().map(shown).collect()
}

fn event(value: &Value) {
    println!("{value}");
}

/// A text being written.
pub struct Answer<'a> {
    speaker: &'a Speaker,
    stream: Option<TextStream<'a>>,
    text: String,
    failed: Option<ebbtide::Error>,
    prompt: usize,
    adapter: Option<String>,
    tokens: usize,
    began: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Answer<'_> {
    /// Takes a token; `false` if it cannot be told.
    pub fn token(&mut self, id: i32) -> bool {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.tokens += 1;
        let pushed = self.stream.as_mut().map(|s| s.push(u32::try_from(id).unwrap_or(0)));
        match pushed {
            Some(Ok(text)) => {
                if self.speaker.json {
                    event(&json!({ "event": "token", "id": id, "text": text }));
                } else {
                    self.speaker.put(&text);
                }
                self.text.push_str(&text);
                true
            }
            Some(Err(error)) => {
                self.failed = Some(error);
                false
            }
            None => false,
        }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Ends the text, with its figures; gives the whole of it.
    pub fn finish(mut self, why: &str, counts: &Counts, planned: u64) -> Result<String> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let rest = self.stream.take().map_or(Ok(String::new()), TextStream::finish)?;
        self.text.push_str(&rest);
        let device = &self.speaker.device;
        let first = self.first.map(|t| (t - self.began).as_secs_f64());
        let rate = |count: usize, seconds: f64| (count > 0 && seconds > 0.0).then(|| count as f64 / seconds);
        let prompt_rate = first.and_then(|s| rate(self.prompt, s));
        let span = self.first.zip(self.last).map(|(a, b)| (b - a).as_secs_f64());
        let text_rate = span.and_then(|s| rate(self.tokens.saturating_sub(1), s));
        let peak = device.peak_memory();
        if self.speaker.json {
            event(&json!({
                "event": "summary",
                "adapter": self.adapter,
                "text": self.text,
                "stopped_by": why,
                "prompt_tokens": self.prompt,
                "tokens": self.tokens,
                "seconds_to_first": first,
                "prompt_tokens_per_second": prompt_rate,
                "tokens_per_second": text_rate,
                "peak_bytes": peak,
                "planned_peak_bytes": planned,
                "loads": counts.loads,
                "streamed_bytes": counts.streamed,
                "witness_bytes": self.speaker.witness.peak(),
            }));
            return Ok(self.text);
        }
        self.speaker.put(&rest);
        self.speaker.put("\n");
        let speed = |rate: Option<f64>| rate.map_or("–".into(), |r| format!("{r:.2}"));
        eprintln!(
            "[prompt {} tokens, {} a second | text {} tokens, {} a second, ended by {why} | peak {} of {} planned | {} loads, {} read]",
            self.prompt,
            speed(prompt_rate),
            self.tokens,
            speed(text_rate),
            short(peak),
            short(planned),
            counts.loads,
            short(counts.streamed),
        );
        Ok(self.text)
    }
}

/// A size without the exact figure.
fn short(bytes: u64) -> String {
    Bytes(bytes).to_string().split(" (").next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn what_a_terminal_would_obey_is_not_shown_to_it() {
        assert_eq!(harmless("a\u{1b}[2Jb\tc\nd\u{9b}e"), "a\u{FFFD}[2Jb\tc\nd\u{FFFD}e");
    }
}
