// The training: start, pause, go on, stop, and what is seen of it.

/** @import { Progress, Step, Timed } from "../protocol.d.ts" */
import { alone, app, know, onChange } from "./app.js";
import { budget, plan } from "./budget.js";
import { byId, element } from "./dom.js";
import { bytes, count, digits, duration, exactBytes } from "./format.js";
import * as loss from "./loss.js";
import * as memory from "./memory.js";
import { forget, say, tell, tellError } from "./notices.js";
import { append, clear, write } from "./samples.js";
import { settings, settingsAreValid } from "./settings.js";
import * as tide from "./tide.js";
import { timeline } from "./timeline.js";

const form = byId("control", HTMLFormElement);
const start = byId("start", HTMLButtonElement);
const goOn = byId("go-on", HTMLButtonElement);
const pause = byId("pause", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const phase = byId("phase", HTMLElement);
const stats = byId("stats", HTMLElement);

const stepChart = timeline(byId("step-chart", HTMLElement), "train", "The last step");

/** What the programs of a training are, by how their names begin. */
const RUNS = /** @type {const} */ ([
  ["train", "Training…"],
  ["evaluate", "Validating…"],
  ["prompt", "Writing a sample…"],
  ["token", "Writing a sample…"],
]);

/** Between two questions for the memory by category. */
const ASK_EVERY = 250;

let paused = false;
let stopping = false;
let of = 0;
/** @type {Step | undefined} */
let last;
/** The last few speeds, of which the mean is shown. @type {number[]} */
let speeds = [];
let peaks = { measured: 0, planned: 0 };

/** @param {boolean} resume */
async function train(resume) {
  if (!settingsAreValid()) {
    byId("settings-box", HTMLDetailsElement).open = true;
    byId("settings", HTMLFormElement).reportValidity();
    return;
  }
  await alone("training", "Getting ready…", async () => {
    forget();
    begin(resume);
    const run = { ...settings(budget()), resume };
    of = (run.steps ?? 0) + (resume ? app.trained : 0);
    const asking = setInterval(askMemory, ASK_EVERY);
    try {
      const done = await app.engine.ask({ command: "train", run }, "trained", { progress });
      peaks = { measured: done.peak_bytes, planned: done.planned_peak_bytes };
      know({ trained: done.steps });
      const words = `${done.stopped ? "Stopped" : "Done"} after ${count(done.steps)} steps${done.loss === null ? "" : `, loss ${digits(done.loss)}`}.`;
      know({ phase: words });
      say(words);
    } catch (error) {
      know({ phase: "" });
      tellError(error);
    } finally {
      clearInterval(asking);
      paused = stopping = false;
    }
  });
  await plan();
}

/** @param {boolean} resume */
function begin(resume) {
  paused = stopping = false;
  last = undefined;
  speeds = [];
  peaks = { measured: 0, planned: app.forecast?.peak_bytes ?? 0 };
  if (!resume) {
    know({ trained: 0 });
    loss.begin([]);
  }
  clear(resume ? ["after"] : ["before", "after"]);
  memory.begin(app.forecast?.budget_bytes ?? 0);
  stepChart.begin(app.forecast?.segments.map(([name]) => name) ?? [], app.forecast?.peak_by_category["weights"] ?? 0);
}

async function askMemory() {
  try {
    memory.allocated((await app.engine.ask({ command: "memory" }, "memory")).allocated);
  } catch {
    // The training says what is wrong.
  }
}

/** @param {Progress} progress */
function progress(progress) {
  switch (progress.progress) {
    case "phase":
      return know({ phase: sentence(progress.phase) });
    case "forecast":
      peaks.planned = progress.forecast.peak_bytes;
      return know({ forecast: progress.forecast });
    case "events":
      doing(progress.events);
      tide.flow(progress.events);
      memory.happened(progress.events);
      return stepChart.happened(progress.events);
    case "step":
      return stepped(progress.step);
    case "validation":
      return loss.validated(progress.step, progress.loss);
    case "text":
      return append(last ? "after" : "before", progress.text);
    case "sample":
      return write(progress.step === 0 ? "before" : "after", progress.prompt, progress.text);
    case "paused":
      paused = progress.paused;
      say(paused ? "Paused." : "Going on.");
      return know({ phase: paused ? "Paused; its memory stays." : "Training…" });
    case "lost":
      return tell({ title: "The GPU was lost", text: `${progress.reason} The engine opens it again and goes on from the last checkpoint.` });
    case "rebuilt":
      say(`Going on from step ${progress.step}.`);
      return know({ phase: `Going on from step ${count(progress.step)}…` });
  }
}

/**
 * Says what runs, by the programs that began.
 * @param {Timed[]} events
 */
function doing(events) {
  const began = events.findLast((timed) => timed.event === "run-start");
  if (began?.event !== "run-start" || paused || stopping) return;
  const words = RUNS.find(([start]) => began.program.startsWith(start))?.[1];
  if (words && words !== app.phase) know({ phase: words });
}

/** @param {string} words as the engine says them */
function sentence(words) {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}${/[.!?…]$/.test(words) ? "" : "…"}`;
}

/** @param {Step} step */
function stepped(step) {
  last = step;
  speeds = [...speeds.slice(-9), step.tokens_per_second];
  peaks.measured = step.peak_bytes;
  loss.happened(step);
  if (!step.finite) tell({ title: `Step ${step.step} was not finite`, text: "Nothing was learned from it. A lower learning rate may help." });
  know({});
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  train(false);
});
goOn.addEventListener("click", () => train(true));
pause.addEventListener("click", () => stopping || app.engine.ask({ command: paused ? "resume" : "pause" }, "ok").catch(tellError));
stop.addEventListener("click", () => {
  if (stopping) return;
  stopping = true;
  know({ phase: "Stopping…" });
  app.engine.ask({ command: "stop" }, "ok").catch(tellError);
});

onChange(() => {
  const { doing, forecast, model, trained } = app;
  const running = doing === "training";
  const ready = doing === "idle" && forecast !== undefined && model?.trainable === true;
  // A button that has the focus hands it on before it goes.
  const focused = document.activeElement;
  start.hidden = running;
  start.disabled = goOn.disabled = !ready;
  start.textContent = trained > 0 ? "Start anew" : "Start training";
  start.classList.toggle("main", trained === 0);
  goOn.classList.toggle("main", trained > 0);
  goOn.hidden = running || trained === 0;
  pause.hidden = stop.hidden = !running;
  // Not disabled: a disabled button loses the focus.
  stop.ariaDisabled = pause.ariaDisabled = String(stopping);
  pause.textContent = paused ? "Resume" : "Pause";
  if (running && (focused === start || focused === goOn)) pause.focus();
  if (!running && (focused === pause || focused === stop)) (goOn.hidden ? start : goOn).focus();
  phase.textContent = app.phase;
  showStats();
});

function showStats() {
  stats.hidden = !last && app.trained === 0 && app.doing !== "training";
  const speed = speeds.length > 0 ? speeds.reduce((sum, x) => sum + x, 0) / speeds.length : undefined;
  const found = loss.summary();
  const kept = peaks.measured > 0 && peaks.measured === peaks.planned;
  /** @type {[name: string, value: string, small?: string | undefined, title?: string][]} */
  const rows = [
    ["Step", last ? count(last.step) : count(app.trained), of > 0 ? `of ${count(of)}` : undefined],
    ["Loss", found ? digits(found.last) : "–", found ? `from ${digits(found.first)}` : undefined],
    ["Tokens a second", speed === undefined ? "–" : digits(speed)],
    ["Time a step", last ? duration(last.milliseconds) : "–"],
    ["Peak of GPU memory", peaks.measured > 0 ? bytes(peaks.measured) : "–", kept ? "as forecast" : undefined, exactBytes(peaks.measured)],
    ["Read each step", last ? bytes(last.streamed_bytes) : "–", last ? `in ${count(last.loads)} loads` : undefined],
  ];
  stats.replaceChildren(
    ...rows.map(([name, value, small, title]) => {
      const figure = element("dd", title && peaks.measured > 0 ? { text: `${value} `, title } : `${value} `);
      if (small) figure.append(element("small", small));
      return element("div", "", element("dt", name), figure);
    }),
  );
}
