//! Text from the model, with the adapter as it is now or without.

use std::rc::Rc;

use ebbtide::compile::Options;
use ebbtide::llm::trainer::{RunPlan, RunSpec};
use ebbtide::nn::AdamW;
use ebbtide::rt::Instant;
use ebbtide::{Error, Result, Session};

use super::train::{SAMPLE_TOKENS, adapter_of, budget_of, prompt_of, sampling_of};
use super::{Bench, Sink};
use crate::protocol::{Progress, Reply, SampleSettings};

/// Most tokens of a prompt that go through the model at once.
const PROMPT_CHUNK: u64 = 64;

impl Bench {
    pub async fn sample(self: &Rc<Bench>, id: u32, sample: &SampleSettings) -> Result<Reply> {
        let material = self.model()?;
        let trained = self.trained().filter(|_| sample.without_adapter != Some(true));
        let run = self.trained().map(|t| t.run.clone()).unwrap_or_default();
        let adapter = trained.as_ref().map(|t| adapter_of(&material, &t.run)).transpose()?;
        let prompt = prompt_of(&material, sample)?;
        let sampling = sampling_of(sample)?;
        let tokens = sample.tokens.unwrap_or(SAMPLE_TOKENS).max(1);
        let capacity = prompt.ids.len() as u64 + tokens;
        let most = material.model.config().max_positions;
        if capacity > most {
            let reason = format!("{} tokens and {tokens} new ones: {most} together are possible", prompt.ids.len());
            return Err(Error::Invalid { what: "the prompt".into(), reason });
        }
        let spec = RunSpec {
            buckets: Vec::new(),
            evaluations: Vec::new(),
            accumulation: 1,
            writer: Some(((prompt.ids.len() as u64).clamp(2, PROMPT_CHUNK), capacity)),
            adamw: AdamW::default(),
        };
        let device = self.device().await?;
        let (_, budget) = budget_of(&run)?;
        let model = &material.model;
        let plan = RunPlan::new(model, adapter.as_ref(), &spec, device.caps(), budget, Options::default())?;
        let mut sink = Sink::new(self, id, &device);
        let cancel = self.cancel();
        let mut session = Session::begin(&device, model.catalog(), plan.set.clone(), &cancel, &mut sink).await?;
        if let (Some(adapter), Some(trained)) = (&adapter, &trained) {
            adapter.install(&mut session, &trained.values).await?;
        }
        let writer =
            plan.writer().ok_or_else(|| Error::NotFound { what: "plan", name: "sample".into(), hint: None })?;
        let mut stop: Vec<i32> = model.config().eos.iter().filter_map(|id| i32::try_from(*id).ok()).collect();
        stop.extend(material.tokenizer.eos().and_then(|s| i32::try_from(s.id).ok()));
        let start = Instant::now();
        let mut stream = material.tokenizer.stream(true);
        let mut text = String::new();
        let mut failed = None;
        let bench = self.clone();
        let mut each = |token: i32| match stream.push(token as u32) {
            Ok(piece) => {
                if !piece.is_empty() {
                    text.push_str(&piece);
                    bench.progress(id, Progress::Text { text: piece });
                }
                true
            }
            Err(error) => {
                failed = Some(error);
                false
            }
        };
        let count = tokens as usize;
        let ids = writer
            .write(&mut session, model, &prompt.ids, count, &stop, &sampling, &cancel, &mut sink, &mut each)
            .await?;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = stream.finish()?;
        if !rest.is_empty() {
            text.push_str(&rest);
            self.progress(id, Progress::Text { text: rest });
        }
        sink.flush();
        let tokens = ids.len() as u64;
        let tokens_per_second = tokens as f64 / start.elapsed().as_secs_f64().max(1e-9);
        Ok(Reply::Sampled { text, tokens, tokens_per_second })
    }
}
