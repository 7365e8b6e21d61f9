// The second view: both founding programs, each run against its counterpart, with tables and traces.

/** @import { ProbeFigures, Timed } from "../protocol.d.ts" */
import { alone, app, onChange } from "./app.js";
import { byId, element } from "./dom.js";
import { bytes, count, digits, duration, exactBytes } from "./format.js";
import { tellError } from "./notices.js";
import { timeline } from "./timeline.js";

/** @typedef {string | { text: string, title: string }} Cell */

const HASH = 12;

/** @param {number} n @returns {Cell} */
const size = (n) => ({ text: bytes(n), title: exactBytes(n) });

/**
 * @param {string} caption
 * @param {string[]} head
 * @param {Cell[][]} rows
 */
function table(caption, head, rows) {
  const columns = element("tr", "", ...head.map((text) => {
    const cell = element("th", text);
    cell.scope = "col";
    return cell;
  }));
  const body = rows.map(([first, ...rest]) => {
    const name = element("th", first ?? "");
    name.scope = "row";
    return element("tr", "", name, ...rest.map((cell) => element("td", cell)));
  });
  const made = element("table", "", element("caption", { text: caption, class: "quiet" }), element("thead", "", columns), element("tbody", "", ...body));
  const scroll = element("div", { class: "scroll" }, made);
  scroll.tabIndex = 0;
  scroll.role = "region";
  scroll.ariaLabel = caption;
  return scroll;
}

/** @param {string} title @param {string[]} lines @param {boolean} [open] */
function trace(title, lines, open = false) {
  const text = element("pre", { class: "trace", text: lines.join("\n") });
  text.tabIndex = 0;
  text.role = "region";
  text.ariaLabel = title;
  const made = element("details", "", element("summary", `${title}: ${count(lines.length)} lines`), text);
  made.open = open;
  return made;
}

/** @param {ProbeFigures} figures */
const peak = (figures) => size(figures.peak_bytes);

/** What the small run of the first program did, while it is shown. */
const streamed = element("figure");
const streamedChart = element("div", { class: "chart short" });
streamedChart.role = "img";
streamed.append(streamedChart, element("figcaption", "When each file was in GPU memory: blue was loaded for the forward pass, violet for the backward pass."));
const streamTimeline = timeline(streamedChart, "", "The run");

/** @param {FormData} form @param {HTMLElement} place */
async function stream(form, place) {
  const rounds = Number(form.get("rounds"));
  const budget = String(form.get("budget")).trim();
  const manual = form.get("manual") !== null;
  /** @type {Timed[]} */
  let events = [];
  const run = (/** @type {string} */ budget, /** @type {boolean} */ manual) =>
    app.engine.ask({ command: "probe", probe: { program: "stream", budget, rounds, manual } }, "stream-probe", {
      progress: (progress) => progress.progress === "events" && events.push(...progress.events),
    });
  const all = await run("all", false);
  events = [];
  const small = await run(budget, manual);
  streamTimeline.begin(["down", "up"], small.figures.peak_by_category["weights"] ?? 0);
  streamTimeline.happened(events);
  const row = (/** @type {string} */ name, /** @type {typeof all} */ r) => [
    name, size(r.figures.budget_bytes), peak(r.figures), size(r.figures.planned_peak_bytes), size(r.figures.peak_by_category["weights"] ?? 0),
    count(r.figures.loads), count(r.figures.evictions), duration(r.figures.milliseconds),
    { text: `${r.grad_sha256.slice(0, HASH)}…`, title: r.grad_sha256 },
  ];
  const equal = all.grad_sha256 === small.grad_sha256;
  place.replaceChildren(
    element("p", { class: equal ? "verdict" : "verdict wrong", text: equal ? "The same gradient, to the bit." : "The gradients differ: this is a defect, please report it." }),
    table("Stream and release", ["", "budget", "peak", "planned", "of it weights", "loads", "releases", "time", "gradient"], [
      row("all weights stay", all),
      row(manual ? `${budget}, by hand` : budget, small),
    ]),
    element("p", { class: "hint", text: `${count(rounds * 2)} layers; the least that works is ${bytes(small.figures.floor_bytes)}. Mean of the result: ${all.loss === null ? "not finite" : digits(all.loss)}.` }),
    streamed,
    trace("Trace of the small one", small.trace, true),
    trace("Trace with all weights", all.trace),
  );
}

/** @param {FormData} form @param {HTMLElement} place */
async function fold(form, place) {
  const [layers, width] = [Number(form.get("layers")), Number(form.get("width"))];
  const run = (/** @type {boolean} */ fold) => app.engine.ask({ command: "probe", probe: { program: "fold", layers, width, fold } }, "fold-probe");
  const folded = await run(true);
  const plain = await run(false);
  const row = (/** @type {string} */ name, /** @type {typeof folded} */ r) => [
    name, count(r.folded), count(r.freed), size(r.held_bytes), size(r.compile_peak_bytes),
    `${digits(r.compile_peak_bytes / Math.max(1, r.weight_bytes))} ×`, duration(r.figures.milliseconds),
    { text: `${r.sha256.slice(0, HASH)}…`, title: r.sha256 },
  ];
  const equal = folded.sha256 === plain.sha256;
  place.replaceChildren(
    element("p", { class: equal ? "verdict" : "verdict wrong", text: equal ? "The same result, to the bit." : "The results differ: this is a defect, please report it." }),
    table("Fold and free", ["", "folded", "freed", "held after compiling", "peak of compiling", "of the weights", "time of a run", "result"], [
      row("folded", folded),
      row("computed in every run", plain),
    ]),
    element("p", { class: "hint", text: `${bytes(folded.weight_bytes)} of weights as stored. A compiler that keeps both would peak at twice that.` }),
    trace("Trace of the folding", folded.trace, true),
  );
}

/** @type {[string, (form: FormData, place: HTMLElement) => Promise<void>][]} */
const PROGRAMS = [["stream", stream], ["fold", fold]];
for (const [name, run] of PROGRAMS) {
  const form = byId(`${name}-form`, HTMLFormElement);
  const place = byId(`${name}-result`, HTMLElement);
  const button = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await alone("probing", "Running a founding program…", async () => {
      button.textContent = "Running…";
      try {
        await run(new FormData(form), place);
      } catch (error) {
        tellError(error);
      }
      button.textContent = "Run again";
    });
  });
  onChange(() => {
    button.disabled = app.doing !== "idle";
  });
}
