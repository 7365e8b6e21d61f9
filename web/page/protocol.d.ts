// Generated from web/src/protocol.rs by `UPDATE=1 cargo test -p ebbtide-web`; do not edit.
// The page posts a `Request` (with `files` beside it where a command reads files) to the worker of `worker.js`, which
// answers with `Message`s (with `files` beside a reply that brings files).

/** A file that a reply brings. */
export type Attachment = { name: string, bytes: Uint8Array<ArrayBuffer>, };
/** What is posted to the worker. */
export type ToWorker = Request & { files?: File[], };
/** What the worker posts. */
export type FromWorker = Message & { files?: Attachment[], };

/**
 * Where training data is.
 */
export type DataFrom = { "from": "embedded" } | { "from": "text", 
/**
 * The text.
 */
text: string, } | { "from": "files" };

/**
 * Training data.
 */
export type DataInfo = { 
/**
 * For showing.
 */
name: string, 
/**
 * Rows to train on.
 */
rows: number, 
/**
 * Rows to validate on.
 */
validation_rows: number, 
/**
 * Tokens of the rows.
 */
tokens: number, 
/**
 * Tokens of the longest.
 */
longest: number, 
/**
 * Tokens trained in one pass.
 */
trained_tokens: number, 
/**
 * What the user has to be told: rows that are cut or left out.
 */
notes: Array<string>, };

/**
 * How rows become tokens.
 */
export type DataSettings = { 
/**
 * Rows are cut after so many tokens. Default 256.
 */
max_seq_length?: number, 
/**
 * Train the completion, or the last message, only. Default false.
 */
mask_prompt?: boolean, };

/**
 * An error of the engine.
 */
export type ErrorInfo = { 
/**
 * Stable: `budget-below-floor`, `out-of-memory`, `device-lost`, `no-adapter`, `format`, `io`, `cancelled` … as on the
 * command line.
 */
code: string, 
/**
 * What was asked, what there is, what to do.
 */
message: string, 
/**
 * The error's fields by name: `asked`, `floor`, `set_by`, `file`, `tensor`, `reason` …
 */
fields: Record<string, string | number | null>, };

/**
 * The forecast of a run.
 */
export type Forecast = { 
/**
 * As asked.
 */
budget: string, 
/**
 * In bytes.
 */
budget_bytes: number, 
/**
 * The least budget that can be kept: the slider's left end.
 */
floor_bytes: number, 
/**
 * What sets it.
 */
floor_set_by: string, 
/**
 * The budget at which everything is resident: the slider's right end.
 */
all_bytes: number, 
/**
 * Most device bytes of the run: what will be measured.
 */
peak_bytes: number, 
/**
 * The same by category.
 */
peak_by_category: { [key in string]: number }, 
/**
 * Bytes of the weights that a step touches.
 */
weight_bytes: number, 
/**
 * Of these, bytes that stay on the device.
 */
resident_weights: number, 
/**
 * Segments loaded in an optimizer step.
 */
loads_per_step: number, 
/**
 * Weight bytes read in an optimizer step.
 */
bytes_per_step: number, 
/**
 * Micro-batches that go through a segment together.
 */
micro_batches_at_once: number, 
/**
 * Whether activations are computed again in the backward pass.
 */
recomputes: boolean, 
/**
 * Segments of the model in the order of the forward pass: name and bytes.
 */
segments: Array<[string, number]>, 
/**
 * Numbers that are trained.
 */
trainable: number, };

/**
 * A model in the browser's own file system.
 */
export type KeptModel = { 
/**
 * Its name.
 */
name: string, 
/**
 * Bytes that it takes.
 */
bytes: number, };

/**
 * What the worker says.
 */
export type Message = { "message": "ready", 
/**
 * The protocol's version; the page is of the same.
 */
format: number, 
/**
 * The engine's version.
 */
version: string, } | { "message": "progress", 
/**
 * The request's.
 */
id: number, 
/**
 * What.
 */
progress: Progress, } | { "message": "done", 
/**
 * The request's.
 */
id: number, 
/**
 * Its result.
 */
reply: Reply, } | { "message": "failed", 
/**
 * The request's; 0 if the worker itself could not begin, or a message had no id.
 */
id: number, 
/**
 * Why.
 */
error: ErrorInfo, };

/**
 * Where a model's files are.
 */
export type ModelFrom = { "from": "embedded" } | { "from": "files" } | { "from": "url", 
/**
 * Of the folder; or of one of its files, whose folder is then meant.
 */
url: string, } | { "from": "kept", 
/**
 * Its name there.
 */
name: string, };

/**
 * A model that is open.
 */
export type ModelInfo = { 
/**
 * For showing, and for opening again where it is kept.
 */
name: string, 
/**
 * `LlamaForCausalLM` …
 */
architecture: string, 
/**
 * Numbers in it.
 */
parameters: number, 
/**
 * Bytes of its tensors.
 */
weight_bytes: number, 
/**
 * Bytes of all its files.
 */
file_bytes: number, 
/**
 * Blocks.
 */
blocks: number, 
/**
 * Width of its hidden states.
 */
hidden: number, 
/**
 * Tokens that its tokenizer and embedding know.
 */
vocabulary: number, 
/**
 * Most tokens of a text.
 */
max_positions: number, 
/**
 * Linear layers of a block, for `target_modules`.
 */
linear_layers: Array<string>, 
/**
 * Whether it can be trained from where it is. False for a URL: `copy` first.
 */
trainable: boolean, 
/**
 * Bytes that `copy` needs, and that the browser says are free; `null` where it says nothing.
 */
free_bytes: number | null, 
/**
 * What the user has to be told.
 */
notes: Array<string>, };

/**
 * A founding program.
 */
export type Probe = { "program": "stream", 
/**
 * As for a run.
 */
budget: string, 
/**
 * Passes through the two layers: 1 to 1000.
 */
rounds: number, 
/**
 * Load and release by hand, around each layer, whatever the budget.
 */
manual: boolean, } | { "program": "fold", 
/**
 * Layers: 1 to 64.
 */
layers: number, 
/**
 * Rows and columns of each layer's weight: a multiple of 4 up to 1024.
 */
width: number, 
/**
 * Fold, or compute everything in every run.
 */
fold: boolean, };

/**
 * Numbers of a founding program.
 */
export type ProbeFigures = { 
/**
 * The budget in bytes.
 */
budget_bytes: number, 
/**
 * The least that can be kept.
 */
floor_bytes: number, 
/**
 * Most device bytes, counted where buffers are made.
 */
peak_bytes: number, 
/**
 * The same, as planned.
 */
planned_peak_bytes: number, 
/**
 * The peak by category.
 */
peak_by_category: { [key in string]: number }, 
/**
 * Segments loaded.
 */
loads: number, 
/**
 * Segments evicted.
 */
evictions: number, 
/**
 * Weight bytes copied to the device.
 */
streamed_bytes: number, 
/**
 * Milliseconds of the run.
 */
milliseconds: number, };

/**
 * Something of a command that still runs.
 */
export type Progress = { "progress": "phase", 
/**
 * The words.
 */
phase: string, } | { "progress": "events", 
/**
 * The events.
 */
events: Array<Timed>, } | { "progress": "copied", 
/**
 * Of the file that is copied.
 */
file: string, 
/**
 * Bytes of all files that are copied.
 */
bytes: number, 
/**
 * Bytes of all files.
 */
of: number, } | { "progress": "forecast", 
/**
 * It.
 */
forecast: Forecast, } | { "progress": "step", 
/**
 * What it did.
 */
step: Step, } | { "progress": "validation", 
/**
 * Optimizer steps done.
 */
step: number, 
/**
 * Nats a token.
 */
loss: number, } | { "progress": "text", 
/**
 * The piece.
 */
text: string, } | { "progress": "sample", 
/**
 * Optimizer steps done: 0 is before the run.
 */
step: number, 
/**
 * Its prompt.
 */
prompt: string, 
/**
 * What the model wrote behind it.
 */
text: string, } | { "progress": "checkpoint", 
/**
 * Optimizer steps done.
 */
step: number, 
/**
 * Bytes of the state.
 */
bytes: number, } | { "progress": "paused", 
/**
 * Whether it holds.
 */
paused: boolean, } | { "progress": "lost", 
/**
 * What the browser said.
 */
reason: string, } | { "progress": "rebuilt", 
/**
 * The step it goes on from.
 */
step: number, };

/**
 * A command's result.
 */
export type Reply = { "reply": "ok" } | { "reply": "device", 
/**
 * For showing: `[name, value]`.
 */
rows: Array<[string, string]>, } | { "reply": "model", 
/**
 * It.
 */
model: ModelInfo, } | { "reply": "kept-models", 
/**
 * They.
 */
models: Array<KeptModel>, } | { "reply": "data", 
/**
 * It.
 */
data: DataInfo, } | { "reply": "forecast", 
/**
 * It.
 */
forecast: Forecast, } | { "reply": "trained", 
/**
 * Optimizer steps done in all.
 */
steps: number, 
/**
 * Whether `stop` ended it.
 */
stopped: boolean, 
/**
 * Mean of the last ten losses; `null` without a step.
 */
loss: number | null, 
/**
 * Loss over the validation data after the run, where there is some.
 */
validation_loss: number | null, 
/**
 * The most device bytes, counted where buffers are made.
 */
peak_bytes: number, 
/**
 * The same, as forecast.
 */
planned_peak_bytes: number, 
/**
 * The peak by category.
 */
peak_by_category: { [key in string]: number }, } | { "reply": "sampled", 
/**
 * All of it, without the prompt.
 */
text: string, 
/**
 * Tokens written.
 */
tokens: number, 
/**
 * Tokens a second.
 */
tokens_per_second: number, } | { "reply": "sessions", 
/**
 * They.
 */
sessions: Array<SessionInfo>, } | { "reply": "session", 
/**
 * It.
 */
session: SessionInfo, 
/**
 * Its model, which is open now.
 */
model: ModelInfo, 
/**
 * Its data.
 */
data: DataInfo, 
/**
 * Its settings.
 */
run: RunSettings, 
/**
 * Steps and losses so far.
 */
losses: Array<[number, number]>, } | { "reply": "adapter", 
/**
 * Steps that it was trained.
 */
steps: number, } | { "reply": "stream-probe", 
/**
 * Loads and releases as they happened.
 */
trace: Array<string>, 
/**
 * The mean; `null` when not finite.
 */
loss: number | null, 
/**
 * SHA-256 of the gradient's bytes: equal at every budget.
 */
grad_sha256: string, 
/**
 * Numbers in common with the other.
 */
figures: ProbeFigures, } | { "reply": "fold-probe", 
/**
 * Loads, dispatches and frees of compiling, as they happened.
 */
trace: Array<string>, 
/**
 * Constants that were folded.
 */
folded: number, 
/**
 * Weights that were freed for it.
 */
freed: number, 
/**
 * Bytes of weights and constants held after compiling.
 */
held_bytes: number, 
/**
 * Most bytes of weights and constants while compiling.
 */
compile_peak_bytes: number, 
/**
 * Bytes of the weights as stored.
 */
weight_bytes: number, 
/**
 * SHA-256 of the result's bytes: equal folded or not.
 */
sha256: string, 
/**
 * Numbers in common with the other.
 */
figures: ProbeFigures, } | { "reply": "memory", 
/**
 * Device bytes by category, as the ledger counts them.
 */
allocated: { [key in string]: number }, 
/**
 * Most since the run began.
 */
peak_bytes: number, 
/**
 * Buffers that exist.
 */
buffers: number, 
/**
 * Buffers ever made.
 */
buffers_made: number, 
/**
 * Bytes of the worker's wasm memory, which never shrinks.
 */
wasm_bytes: number, 
/**
 * Weight bytes on their way from files to the device, in memory of the browser.
 */
in_flight_bytes: number, 
/**
 * The most that ever were.
 */
in_flight_peak_bytes: number, };

/**
 * What the page asks for. `files` (an array of `File`) may stand beside these fields.
 */
export type Request = { 
/**
 * Chosen by the page; every answer carries it.
 */
id: number, } & ({ "command": "open-device" } | { "command": "open", 
/**
 * Where its files are.
 */
model: ModelFrom, } | { "command": "copy" } | { "command": "kept-models" } | { "command": "delete-model", 
/**
 * Its name.
 */
name: string, } | { "command": "data", 
/**
 * Where it is.
 */
data: DataFrom, 
/**
 * How rows become tokens.
 */
options: DataSettings, } | { "command": "plan", 
/**
 * As for `train`.
 */
run: RunSettings, } | { "command": "train", 
/**
 * How.
 */
run: RunSettings, } | { "command": "pause" } | { "command": "resume" } | { "command": "stop" } | { "command": "sample", 
/**
 * What is said.
 */
sample: SampleSettings, } | { "command": "save-session", 
/**
 * Letters, digits, `-`, `_`, `.` and spaces; at most 64.
 */
name: string, } | { "command": "sessions" } | { "command": "open-session", 
/**
 * Its name.
 */
name: string, } | { "command": "delete-session", 
/**
 * Its name.
 */
name: string, } | { "command": "export-adapter" } | { "command": "probe", 
/**
 * Which.
 */
probe: Probe, } | { "command": "memory" } | { "command": "lose-device" });

/**
 * A training run. What is left out has the default of the command line, where not said otherwise.
 */
export type RunSettings = { 
/**
 * `74000`, `6GiB`, `33%`, `floor`, `all`, `auto`. Default `auto`: at most 1 GiB, 512 MiB on a phone.
 */
budget?: string, 
/**
 * Optimizer steps of this run; with `resume`, so many more. Default 60.
 */
steps?: number, 
/**
 * Rows of a micro-batch. Default 4.
 */
batch_size?: number, 
/**
 * Micro-batches of an optimizer step. Default 1.
 */
grad_accumulation_steps?: number, 
/**
 * Default 2e-3.
 */
learning_rate?: number, 
/**
 * `constant`, `linear` or `cosine`. Default constant.
 */
lr_schedule?: string, 
/**
 * Steps over which the rate rises. Default 0.
 */
warmup?: number, 
/**
 * Rank of the adapter. Default 8.
 */
rank?: number, 
/**
 * The adapter's part is multiplied by alpha / rank. Default 16.
 */
alpha?: number, 
/**
 * Default 0.
 */
dropout?: number, 
/**
 * `q_proj,v_proj`, `all-linear` … Default: queries and values.
 */
target_modules?: string, 
/**
 * Of initialisation, dropout and shuffling. Default 0.
 */
seed?: number, 
/**
 * Rows in the file's order instead of shuffled. Default false.
 */
in_order?: boolean, 
/**
 * Validation after so many steps, where there is validation data; 0: only before and after. Default 0.
 */
steps_per_eval?: number, 
/**
 * A checkpoint after so many steps, from which a lost device goes on; 0: none. Default 10.
 */
save_every?: number, 
/**
 * Text to write before and after the run, and the tokens to be planned for. Default: none is written.
 */
sample?: SampleSettings, 
/**
 * Go on from where the last run or the opened session stands, instead of from a new adapter. Default false.
 */
resume?: boolean, };

/**
 * Text to be written.
 */
export type SampleSettings = { 
/**
 * What the text begins with. Default: nothing, that is the token that begins a text.
 */
prompt?: string, 
/**
 * At most so many tokens. Default 48.
 */
tokens?: number, 
/**
 * 0: the likeliest token each time. Default 0.
 */
temperature?: number, 
/**
 * Only the so many likeliest; 0: all. Default 0.
 */
top_k?: number, 
/**
 * Only the likeliest that together have this probability. Default 1.
 */
top_p?: number, 
/**
 * Default 0.
 */
seed?: number, 
/**
 * Without the adapter: what the model alone says. Default false.
 */
without_adapter?: boolean, };

/**
 * A kept session.
 */
export type SessionInfo = { 
/**
 * Its name.
 */
name: string, 
/**
 * Its model's name.
 */
model: string, 
/**
 * Optimizer steps done.
 */
steps: number, 
/**
 * Bytes that it takes, the model apart.
 */
bytes: number, 
/**
 * When it was kept: milliseconds since 1970.
 */
saved_at: number, };

/**
 * What an optimizer step did.
 */
export type Step = { 
/**
 * Steps done, this one included.
 */
step: number, 
/**
 * Mean loss over the trained tokens, before the update; nats a token.
 */
loss: number, 
/**
 * The rate it was done at.
 */
learning_rate: number, 
/**
 * Global norm of the gradients.
 */
grad_norm: number, 
/**
 * Whether all was finite; if not, nothing was updated.
 */
finite: boolean, 
/**
 * Tokens trained in this step.
 */
trained_tokens: number, 
/**
 * Tokens trained a second, over this step.
 */
tokens_per_second: number, 
/**
 * Milliseconds that it took.
 */
milliseconds: number, 
/**
 * Segments loaded.
 */
loads: number, 
/**
 * Weight bytes copied to the device.
 */
streamed_bytes: number, 
/**
 * Most device bytes since the run began.
 */
peak_bytes: number, };

/**
 * An event and when it happened.
 */
export type Timed = { 
/**
 * Milliseconds since the worker began.
 */
at: number, 
/**
 * Device bytes that exist, all categories together.
 */
allocated: number, 
/**
 * Of these, weight bytes whose content is in place.
 */
weights_held: number, } & ({ "event": "run-start", 
/**
 * The program.
 */
program: string, } | { "event": "load", 
/**
 * The segment: `block.3`, `head.0` …
 */
segment: string, 
/**
 * `forward` or `backward`.
 */
pass: string, 
/**
 * Bytes copied to the device.
 */
bytes: number, } | { "event": "evict", 
/**
 * The segment.
 */
segment: string, 
/**
 * The pass of its last use.
 */
pass: string, } | { "event": "run-end", 
/**
 * The program.
 */
program: string, 
/**
 * Segments loaded in this run.
 */
loads: number, 
/**
 * Segments evicted in this run.
 */
evictions: number, 
/**
 * Weight bytes copied to the device in this run.
 */
streamed_bytes: number, });
