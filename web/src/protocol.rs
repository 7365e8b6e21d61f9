//! What page and worker say to each other: one command, then any number of [`Progress`] messages, then one end.
//!
//! Both sides would otherwise agree by habit only, and a field renamed on one of them would show as `undefined` in a chart.
//! These types are the agreement: the worker speaks them by serde, and `web/page/protocol.d.ts` is generated from them
//! (`UPDATE=1 cargo test -p ebbtide-web` writes it; the test fails while it is not up to date).
//!
//! The page posts a [`Request`], a plain object, to the worker. Files travel beside it, as they are objects of the browser:
//! `worker.postMessage({ id, command: "open", model: { from: "files" }, files: [file, …] })`. The worker answers with
//! [`Message`]s that carry the request's `id`, the last of them `done` or `failed`; where a reply brings files, they lie in
//! `message.files`, each `{ name, bytes: Uint8Array }`. A second command that needs the engine waits until the one before it
//! has ended; `pause`, `resume`, `stop`, `memory` and `lose-device` are answered at once, whatever runs.
//!
//! Sizes are bytes, times milliseconds since the worker began, both plain numbers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the page asks for. `files` (an array of `File`) may stand beside these fields.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct Request {
    /// Chosen by the page; every answer carries it.
    pub id: u32,
    /// What is to be done.
    #[serde(flatten)]
    pub command: Command,
}

/// A command. The reply that each ends with is named behind it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Opens the GPU; otherwise the first command that needs it does. → `device`
    OpenDevice,
    /// Opens a model in place of the one that is open: reads its configuration and headers, no weights. → `model`
    Open {
        /// Where its files are.
        model: ModelFrom,
    },
    /// Copies the model that is open into the browser's own file system and goes on from there; a model opened from a URL
    /// has to be copied before it is trained. Progress: `copied`. → `model`
    Copy,
    /// The models that were copied. → `kept-models`
    KeptModels,
    /// Deletes a copied model; refused while it is open. → `kept-models`
    DeleteModel {
        /// Its name.
        name: String,
    },
    /// Reads training data for the model that is open, every row of it. → `data`
    Data {
        /// Where it is.
        data: DataFrom,
        /// How rows become tokens.
        #[serde(default)]
        options: DataSettings,
    },
    /// Forecasts a run without touching the GPU's memory; fast enough to follow a slider. → `forecast`
    Plan {
        /// As for `train`.
        #[serde(default)]
        run: RunSettings,
    },
    /// Trains. Progress: `phase`, `events`, `step`, `validation`, `sample`, `checkpoint`, `paused`, `lost`, `rebuilt`.
    /// → `trained`
    Train {
        /// How.
        #[serde(default)]
        run: RunSettings,
    },
    /// Holds the run before its next step; its memory stays. → `ok`
    Pause,
    /// Goes on. → `ok`
    Resume,
    /// Ends what runs at the next possible moment. A training ends well, with what it reached; anything else ends as
    /// `failed` with code `cancelled`. → `ok`
    Stop,
    /// Writes text with the adapter as it is now, in the memory of the last run or, before any, at the given budget.
    /// Progress: `text`. → `sampled`
    Sample {
        /// What is said.
        sample: SampleSettings,
    },
    /// Keeps model, data, settings and the training's state under a name, in the browser's own file system. → `sessions`
    SaveSession {
        /// Letters, digits, `-`, `_`, `.` and spaces; at most 64.
        name: String,
    },
    /// The sessions that are kept. → `sessions`
    Sessions,
    /// Opens a kept session: its model, data and settings; `train` then goes on from its state. → `session`
    OpenSession {
        /// Its name.
        name: String,
    },
    /// Deletes a kept session. → `sessions`
    DeleteSession {
        /// Its name.
        name: String,
    },
    /// The adapter in PEFT's format. → `adapter`, with its two files
    ExportAdapter,
    /// Runs a founding program. Progress: `events`. → `stream-probe` or `fold-probe`
    Probe {
        /// Which.
        probe: Probe,
    },
    /// What is in use now. → `memory`
    Memory,
    /// Destroys the device under whatever runs, as a driver might: for tests and the curious. → `ok`
    LoseDevice,
}

/// Where a model's files are.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum ModelFrom {
    /// The tiny model beside the page, in its folder `model`.
    Embedded,
    /// The request's files: a folder as chosen or dropped, or its single files.
    Files,
    /// A folder on a server that answers byte ranges.
    Url {
        /// Of the folder; or of one of its files, whose folder is then meant.
        url: String,
    },
    /// A model that was copied into the browser's own file system.
    Kept {
        /// Its name there.
        name: String,
    },
}

/// Where training data is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum DataFrom {
    /// The demo's data beside the page, `data/train.jsonl` and `data/valid.jsonl`: the log of a harbour keeper.
    Embedded,
    /// What the visitor typed: every paragraph (or line, where there are no empty lines) is a row.
    Text {
        /// The text.
        text: String,
    },
    /// The request's files: `train.jsonl` and perhaps `valid.jsonl`, or one file of any name (`.jsonl`, or plain text).
    Files,
}

/// How rows become tokens.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(test, ts(optional_fields))]
pub struct DataSettings {
    /// Rows are cut after so many tokens. Default 256.
    pub max_seq_length: Option<u64>,
    /// Train the completion, or the last message, only. Default false.
    pub mask_prompt: Option<bool>,
}

/// A training run. What is left out has the default of the command line, where not said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(test, ts(optional_fields))]
pub struct RunSettings {
    /// `74000`, `6GiB`, `33%`, `floor`, `all`, `auto`. Default `auto`: at most 1 GiB, 512 MiB on a phone.
    pub budget: Option<String>,
    /// Optimizer steps of this run; with `resume`, so many more. Default 60.
    pub steps: Option<u64>,
    /// Rows of a micro-batch. Default 4.
    pub batch_size: Option<u64>,
    /// Micro-batches of an optimizer step. Default 1.
    pub grad_accumulation_steps: Option<u64>,
    /// Default 2e-3.
    pub learning_rate: Option<f64>,
    /// `constant`, `linear` or `cosine`. Default constant.
    pub lr_schedule: Option<String>,
    /// Steps over which the rate rises. Default 0.
    pub warmup: Option<u64>,
    /// Rank of the adapter. Default 8.
    pub rank: Option<u64>,
    /// The adapter's part is multiplied by alpha / rank. Default 16.
    pub alpha: Option<f64>,
    /// Default 0.
    pub dropout: Option<f32>,
    /// `q_proj,v_proj`, `all-linear` … Default: queries and values.
    pub target_modules: Option<String>,
    /// Of initialisation, dropout and shuffling. Default 0.
    pub seed: Option<u32>,
    /// Rows in the file's order instead of shuffled. Default false.
    pub in_order: Option<bool>,
    /// Validation after so many steps, where there is validation data; 0: only before and after. Default 0.
    pub steps_per_eval: Option<u64>,
    /// A checkpoint after so many steps, from which a lost device goes on; 0: none. Default 10.
    pub save_every: Option<u64>,
    /// Text to write before and after the run, and the tokens to be planned for. Default: none is written.
    pub sample: Option<SampleSettings>,
    /// Go on from where the last run or the opened session stands, instead of from a new adapter. Default false.
    pub resume: Option<bool>,
}

/// Text to be written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(test, ts(optional_fields))]
pub struct SampleSettings {
    /// What the text begins with. Default: nothing, that is the token that begins a text.
    pub prompt: Option<String>,
    /// At most so many tokens. Default 48.
    pub tokens: Option<u64>,
    /// 0: the likeliest token each time. Default 0.
    pub temperature: Option<f32>,
    /// Only the so many likeliest; 0: all. Default 0.
    pub top_k: Option<u64>,
    /// Only the likeliest that together have this probability. Default 1.
    pub top_p: Option<f32>,
    /// Default 0.
    pub seed: Option<u32>,
    /// Without the adapter: what the model alone says. Default false.
    pub without_adapter: Option<bool>,
}

/// A founding program.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "program", rename_all = "kebab-case")]
pub enum Probe {
    /// Weights loaded just before their layer and released just after, forward and backward.
    Stream {
        /// As for a run.
        budget: String,
        /// Passes through the two layers: 1 to 1000.
        rounds: u32,
        /// Load and release by hand, around each layer, whatever the budget.
        manual: bool,
    },
    /// Constants computed once, and their weights freed.
    Fold {
        /// Layers: 1 to 64.
        layers: u32,
        /// Rows and columns of each layer's weight: a multiple of 4 up to 1024.
        width: u32,
        /// Fold, or compute everything in every run.
        fold: bool,
    },
}

/// What the worker says.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum Message {
    /// The first message: the engine is loaded and takes commands.
    Ready {
        /// The protocol's version; the page is of the same.
        format: u32,
        /// The engine's version.
        version: String,
    },
    /// Something of a command that still runs.
    Progress {
        /// The request's.
        id: u32,
        /// What.
        progress: Progress,
    },
    /// A command ended well.
    Done {
        /// The request's.
        id: u32,
        /// Its result.
        reply: Reply,
    },
    /// A command failed.
    Failed {
        /// The request's; 0 if the worker itself could not begin, or a message had no id.
        id: u32,
        /// Why.
        error: ErrorInfo,
    },
}

/// An error of the engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct ErrorInfo {
    /// Stable: `budget-below-floor`, `out-of-memory`, `device-lost`, `no-adapter`, `format`, `io`, `cancelled` … as on the
    /// command line.
    pub code: String,
    /// What was asked, what there is, what to do.
    pub message: String,
    /// The error's fields by name: `asked`, `floor`, `set_by`, `file`, `tensor`, `reason` …
    #[cfg_attr(test, ts(type = "Record<string, string | number | null>"))]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// Bytes of device memory by what they are for. Categories without any are left out.
pub type ByCategory = BTreeMap<String, u64>;

/// Something of a command that still runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "progress", rename_all = "kebab-case")]
pub enum Progress {
    /// What the command does now, in words for people: `opening the GPU`, `compiling kernels`, `loading weights` …
    Phase {
        /// The words.
        phase: String,
    },
    /// What the engine did, in order, a few tenths of a second at once.
    Events {
        /// The events.
        events: Vec<Timed>,
    },
    /// Copying to the browser's own file system.
    Copied {
        /// Of the file that is copied.
        file: String,
        /// Bytes of all files that are copied.
        bytes: u64,
        /// Bytes of all files.
        of: u64,
    },
    /// The forecast that the run will keep.
    Forecast {
        /// It.
        forecast: Forecast,
    },
    /// An optimizer step is done.
    Step {
        /// What it did.
        step: Step,
    },
    /// Mean loss over the validation data.
    Validation {
        /// Optimizer steps done.
        step: u64,
        /// Nats a token.
        loss: f64,
    },
    /// A piece of text of the sample being written; together they are the text.
    Text {
        /// The piece.
        text: String,
    },
    /// A sample that belongs to the run is complete.
    Sample {
        /// Optimizer steps done: 0 is before the run.
        step: u64,
        /// Its prompt.
        prompt: String,
        /// What the model wrote behind it.
        text: String,
    },
    /// The run's state was kept, in memory.
    Checkpoint {
        /// Optimizer steps done.
        step: u64,
        /// Bytes of the state.
        bytes: u64,
    },
    /// The run holds before its next step, or goes on.
    Paused {
        /// Whether it holds.
        paused: bool,
    },
    /// The GPU was lost; the engine opens it again.
    Lost {
        /// What the browser said.
        reason: String,
    },
    /// The run goes on from its last checkpoint, on a new device.
    Rebuilt {
        /// The step it goes on from.
        step: u64,
    },
}

/// An event and when it happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct Timed {
    /// Milliseconds since the worker began.
    pub at: f64,
    /// What.
    #[serde(flatten)]
    pub event: EngineEvent,
    /// Device bytes that exist, all categories together.
    pub allocated: u64,
    /// Of these, weight bytes whose content is in place.
    pub weights_held: u64,
}

/// The engine's events.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EngineEvent {
    /// A run of a program began: `train 4x64`, `evaluate 4x64`, `token of 96` …
    RunStart {
        /// The program.
        program: String,
    },
    /// A segment's last byte was handed to the queue.
    Load {
        /// The segment: `block.3`, `head.0` …
        segment: String,
        /// `forward` or `backward`.
        pass: String,
        /// Bytes copied to the device.
        bytes: u64,
    },
    /// A segment's slot was given up.
    Evict {
        /// The segment.
        segment: String,
        /// The pass of its last use.
        pass: String,
    },
    /// A run ended; everything was seen done.
    RunEnd {
        /// The program.
        program: String,
        /// Segments loaded in this run.
        loads: u64,
        /// Segments evicted in this run.
        evictions: u64,
        /// Weight bytes copied to the device in this run.
        streamed_bytes: u64,
    },
}

/// What an optimizer step did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct Step {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss over the trained tokens, before the update; nats a token.
    pub loss: f64,
    /// The rate it was done at.
    pub learning_rate: f64,
    /// Global norm of the gradients.
    pub grad_norm: f64,
    /// Whether all was finite; if not, nothing was updated.
    pub finite: bool,
    /// Tokens trained in this step.
    pub trained_tokens: u64,
    /// Tokens trained a second, over this step.
    pub tokens_per_second: f64,
    /// Milliseconds that it took.
    pub milliseconds: f64,
    /// Segments loaded.
    pub loads: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// Most device bytes since the run began.
    pub peak_bytes: u64,
}

/// A command's result.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// Nothing to say.
    Ok,
    /// The GPU.
    Device {
        /// For showing: `[name, value]`.
        rows: Vec<(String, String)>,
    },
    /// A model.
    Model {
        /// It.
        model: ModelInfo,
    },
    /// Models in the browser's own file system.
    KeptModels {
        /// They.
        models: Vec<KeptModel>,
    },
    /// Training data.
    Data {
        /// It.
        data: DataInfo,
    },
    /// A forecast.
    Forecast {
        /// It.
        forecast: Forecast,
    },
    /// A training ended: all steps done, or stopped.
    Trained {
        /// Optimizer steps done in all.
        steps: u64,
        /// Whether `stop` ended it.
        stopped: bool,
        /// Mean of the last ten losses; `null` without a step.
        loss: Option<f64>,
        /// Loss over the validation data after the run, where there is some.
        validation_loss: Option<f64>,
        /// The most device bytes, counted where buffers are made.
        peak_bytes: u64,
        /// The same, as forecast.
        planned_peak_bytes: u64,
        /// The peak by category.
        peak_by_category: ByCategory,
    },
    /// A text was written.
    Sampled {
        /// All of it, without the prompt.
        text: String,
        /// Tokens written.
        tokens: u64,
        /// Tokens a second.
        tokens_per_second: f64,
    },
    /// Kept sessions, newest first.
    Sessions {
        /// They.
        sessions: Vec<SessionInfo>,
    },
    /// A kept session was opened.
    Session {
        /// It.
        session: SessionInfo,
        /// Its model, which is open now.
        model: ModelInfo,
        /// Its data.
        data: DataInfo,
        /// Its settings.
        run: Box<RunSettings>,
        /// Steps and losses so far.
        losses: Vec<(u64, f64)>,
    },
    /// The adapter: `message.files` holds `adapter_config.json` and `adapter_model.safetensors`.
    Adapter {
        /// Steps that it was trained.
        steps: u64,
    },
    /// What the first founding program measured.
    StreamProbe {
        /// Loads and releases as they happened.
        trace: Vec<String>,
        /// The mean; `null` when not finite.
        loss: Option<f64>,
        /// SHA-256 of the gradient's bytes: equal at every budget.
        grad_sha256: String,
        /// Numbers in common with the other.
        figures: ProbeFigures,
    },
    /// What the second founding program measured.
    FoldProbe {
        /// Loads, dispatches and frees of compiling, as they happened.
        trace: Vec<String>,
        /// Constants that were folded.
        folded: u64,
        /// Weights that were freed for it.
        freed: u64,
        /// Bytes of weights and constants held after compiling.
        held_bytes: u64,
        /// Most bytes of weights and constants while compiling.
        compile_peak_bytes: u64,
        /// Bytes of the weights as stored.
        weight_bytes: u64,
        /// SHA-256 of the result's bytes: equal folded or not.
        sha256: String,
        /// Numbers in common with the other.
        figures: ProbeFigures,
    },
    /// What is in use.
    Memory {
        /// Device bytes by category, as the ledger counts them.
        allocated: ByCategory,
        /// Most since the run began.
        peak_bytes: u64,
        /// Buffers that exist.
        buffers: u64,
        /// Buffers ever made.
        buffers_made: u64,
        /// Bytes of the worker's wasm memory, which never shrinks.
        wasm_bytes: u64,
        /// Weight bytes on their way from files to the device, in memory of the browser.
        in_flight_bytes: u64,
        /// The most that ever were.
        in_flight_peak_bytes: u64,
    },
}

/// A model that is open.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct ModelInfo {
    /// For showing, and for opening again where it is kept.
    pub name: String,
    /// `LlamaForCausalLM` …
    pub architecture: String,
    /// Numbers in it.
    pub parameters: u64,
    /// Bytes of its tensors.
    pub weight_bytes: u64,
    /// Bytes of all its files.
    pub file_bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Width of its hidden states.
    pub hidden: u64,
    /// Tokens that its tokenizer and embedding know.
    pub vocabulary: u64,
    /// Most tokens of a text.
    pub max_positions: u64,
    /// Linear layers of a block, for `target_modules`.
    pub linear_layers: Vec<String>,
    /// Whether it can be trained from where it is. False for a URL: `copy` first.
    pub trainable: bool,
    /// Bytes that `copy` needs, and that the browser says are free; `null` where it says nothing.
    pub free_bytes: Option<u64>,
    /// What the user has to be told.
    pub notes: Vec<String>,
}

/// A model in the browser's own file system.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct KeptModel {
    /// Its name.
    pub name: String,
    /// Bytes that it takes.
    pub bytes: u64,
}

/// Training data.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct DataInfo {
    /// For showing.
    pub name: String,
    /// Rows to train on.
    pub rows: u64,
    /// Rows to validate on.
    pub validation_rows: u64,
    /// Tokens of the rows.
    pub tokens: u64,
    /// Tokens of the longest.
    pub longest: u64,
    /// Tokens trained in one pass.
    pub trained_tokens: u64,
    /// What the user has to be told: rows that are cut or left out.
    pub notes: Vec<String>,
}

/// The forecast of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct Forecast {
    /// As asked.
    pub budget: String,
    /// In bytes.
    pub budget_bytes: u64,
    /// The least budget that can be kept: the slider's left end.
    pub floor_bytes: u64,
    /// What sets it.
    pub floor_set_by: String,
    /// The budget at which everything is resident: the slider's right end.
    pub all_bytes: u64,
    /// Most device bytes of the run: what will be measured.
    pub peak_bytes: u64,
    /// The same by category.
    pub peak_by_category: ByCategory,
    /// Bytes of the weights that a step touches.
    pub weight_bytes: u64,
    /// Of these, bytes that stay on the device.
    pub resident_weights: u64,
    /// Segments loaded in an optimizer step.
    pub loads_per_step: u64,
    /// Weight bytes read in an optimizer step.
    pub bytes_per_step: u64,
    /// Micro-batches that go through a segment together.
    pub micro_batches_at_once: u64,
    /// Whether activations are computed again in the backward pass.
    pub recomputes: bool,
    /// Segments of the model in the order of the forward pass: name and bytes.
    pub segments: Vec<(String, u64)>,
    /// Numbers that are trained.
    pub trainable: u64,
}

/// Numbers of a founding program.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct ProbeFigures {
    /// The budget in bytes.
    pub budget_bytes: u64,
    /// The least that can be kept.
    pub floor_bytes: u64,
    /// Most device bytes, counted where buffers are made.
    pub peak_bytes: u64,
    /// The same, as planned.
    pub planned_peak_bytes: u64,
    /// The peak by category.
    pub peak_by_category: ByCategory,
    /// Segments loaded.
    pub loads: u64,
    /// Segments evicted.
    pub evictions: u64,
    /// Weight bytes copied to the device.
    pub streamed_bytes: u64,
    /// Milliseconds of the run.
    pub milliseconds: f64,
}

/// A kept session.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(test, derive(ts_rs::TS))]
pub struct SessionInfo {
    /// Its name.
    pub name: String,
    /// Its model's name.
    pub model: String,
    /// Optimizer steps done.
    pub steps: u64,
    /// Bytes that it takes, the model apart.
    pub bytes: u64,
    /// When it was kept: milliseconds since 1970.
    pub saved_at: f64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;
    use ts_rs::{Config, TS, TypeVisitor};

    const HEAD: &str = "\
// Generated from web/src/protocol.rs by `UPDATE=1 cargo test -p ebbtide-web`; do not edit.
// The page posts a `Request` (with `files` beside it where a command reads files) to the worker of `worker.js`, which
// answers with `Message`s (with `files` beside a reply that brings files).

/** A file that a reply brings. */
export type Attachment = { name: string, bytes: Uint8Array<ArrayBuffer>, };
/** What is posted to the worker. */
export type ToWorker = Request & { files?: File[], };
/** What the worker posts. */
export type FromWorker = Message & { files?: Attachment[], };
";

    /// Declarations of a type and all that it is made of, each once, by name.
    struct Declarations<'a>(&'a Config, BTreeMap<String, String>);

    impl TypeVisitor for Declarations<'_> {
        fn visit<T: TS + 'static + ?Sized>(&mut self) {
            if T::output_path().is_none() {
                return T::visit_generics(self);
            }
            let name = T::ident(self.0);
            if self.1.contains_key(&name) {
                return;
            }
            let text = format!("{}export {}\n", T::docs().unwrap_or_default(), T::decl(self.0));
            self.1.insert(name, text);
            T::visit_dependencies(self);
            T::visit_generics(self);
        }
    }

    #[test]
    fn the_declarations_of_the_page_are_those_of_these_types() {
        let config = Config::new().with_large_int("number");
        let mut all = Declarations(&config, BTreeMap::new());
        all.visit::<Request>();
        all.visit::<Message>();
        let text = all.1.values().fold(HEAD.to_owned(), |text, declaration| text + "\n" + declaration);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/page/protocol.d.ts");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert!(stored == text, "web/page/protocol.d.ts is not up to date: UPDATE=1 cargo test -p ebbtide-web");
    }

    #[test]
    fn a_command_is_read_as_the_page_writes_it() {
        let parse = |text: &str| serde_json::from_str::<Request>(text);
        let request = parse(r#"{"id":7,"command":"open","model":{"from":"url","url":"https://x/y"}}"#).unwrap();
        assert_eq!(request.id, 7);
        assert!(matches!(request.command, Command::Open { model: ModelFrom::Url { url } } if url == "https://x/y"));
        let request = parse(r#"{"id":1,"command":"train","run":{"budget":"33%","steps":20}}"#).unwrap();
        let Command::Train { run } = request.command else { panic!("{request:?}") };
        assert_eq!((run.budget.as_deref(), run.steps, run.rank), (Some("33%"), Some(20), None));
        assert!(parse(r#"{"id":1,"command":"train"}"#).is_ok() && parse(r#"{"id":1,"command":"pause"}"#).is_ok());
        // A setting that is not known is refused by name: spelled wrongly it would be ignored silently.
        let error = parse(r#"{"id":1,"command":"train","run":{"budgte":"33%"}}"#).unwrap_err();
        assert!(error.to_string().contains("budgte"), "{error}");
    }

    #[test]
    fn a_message_is_written_as_the_page_reads_it() {
        let event = EngineEvent::Load { segment: "block.0".into(), pass: "forward".into(), bytes: 9 };
        let timed = Timed { at: 1.5, event, allocated: 10, weights_held: 9 };
        let message = Message::Progress { id: 3, progress: Progress::Events { events: vec![timed] } };
        let want = r#"{"message":"progress","id":3,"progress":{"progress":"events","events":[{"at":1.5,"event":"load","segment":"block.0","pass":"forward","bytes":9,"allocated":10,"weights_held":9}]}}"#;
        assert_eq!(serde_json::to_string(&message).unwrap(), want);
    }
}
