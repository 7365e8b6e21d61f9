// GPU memory over the last steps: what each kind takes, weights that are in place, all that exists, and the budget.
//
// The engine tells with every event what exists and which weights are in place; by kind it is asked a few times a second.
// Memory is bounded here too: what has left the window is forgotten.

/** @import { Timed } from "../protocol.d.ts" */
import { axis, chart, colour } from "./chart.js";
import { byId, element } from "./dom.js";
import { bytes, digits, exactBytes } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

/** Ticks at sizes that people count memory in. */
const POWERS = Array.from({ length: 44 }, (_, power) => 2 ** power);
const MOST = 3000;
const STEPS = 6;

/** From the bottom up. */
const KINDS = /** @type {const} */ ([
  { swatch: "rings", name: "buffers for copying", of: ["upload", "readback", "uniforms"] },
  { swatch: "work", name: "activations", of: ["activations", "gradients", "kv", "workspace"] },
  { swatch: "learned", name: "what it learns", of: ["adapters", "optimizer"] },
]);

/** @typedef {{ at: number, allocated: number, held: number, kinds: number[] }} Moment */

/** @type {Moment[]} */
let moments = [];
let kinds = KINDS.map(() => 0);
let budget = 0;
let began = NaN;
/** @type {number[]} */
let starts = [];

/** Begins anew. @param {number} bytes the budget */
export function begin(bytes) {
  moments = [];
  starts = [];
  began = NaN;
  budget = bytes;
  draw();
}

/** @param {Record<string, number>} allocated by category, as asked for */
export function allocated(allocated) {
  kinds = KINDS.map(({ of }) => of.reduce((sum, name) => sum + (allocated[name] ?? 0), 0));
}

/** @param {Timed[]} events */
export function happened(events) {
  for (const { at, event, allocated, weights_held } of events) {
    if (Number.isNaN(began)) began = at;
    moments.push({ at: (at - began) / 1000, allocated, held: weights_held, kinds });
    if (event === "run-start") starts.push((at - began) / 1000);
  }
  if (starts.length > STEPS) starts = starts.slice(-STEPS);
  const first = Math.max(moments.length - MOST, starts.length === STEPS ? before(starts[0] ?? 0) : 0);
  if (first > 0) moments.splice(0, first);
  draw();
}

/**
 * The last moment that is not after this time.
 * @param {number} time
 */
function before(time) {
  let index = 0;
  while (index + 1 < moments.length && (moments[index + 1]?.at ?? Infinity) <= time) index += 1;
  return index;
}

/** @returns {uPlot.AlignedData} */
function read() {
  const at = moments.map((m) => m.at);
  /** @type {number[][]} */
  const sums = KINDS.map(() => []);
  const held = [];
  const all = [];
  for (const m of moments) {
    let sum = 0;
    // The kinds are asked for apart from the events: never more than what exists beside the weights.
    const room = m.allocated - m.held;
    for (const [kind, size] of m.kinds.entries()) {
      sum = Math.min(room, sum + size);
      sums[kind]?.push(sum);
    }
    held.push(sum + m.held);
    all.push(m.allocated);
  }
  legend();
  return [at, ...sums, held, all, at.map(() => budget)];
}

const place = byId("memory-legend", HTMLElement);
/** @type {[string, string, (m: Moment | undefined) => number][]} */
const LEGEND = [
  ["limit", "budget", () => budget],
  ["empty", "allocated", (m) => m?.allocated ?? 0],
  ["weights", "weights in place", (m) => m?.held ?? 0],
];
for (const [kind, { swatch, name }] of KINDS.entries()) LEGEND.splice(3, 0, [swatch, name, (m) => m?.kinds[kind] ?? 0]);
const figures = LEGEND.map(([swatch, name]) => {
  const figure = element("b");
  place.append(element("li", "", element("i", { class: `swatch ${swatch}` }), element("span", name), figure));
  return figure;
});

function legend() {
  for (const [index, [, , value]] of LEGEND.entries()) {
    const figure = figures[index];
    const size = value(moments.at(-1));
    if (!figure) continue;
    figure.textContent = size > 0 ? bytes(size) : "";
    figure.title = size > 0 ? exactBytes(size) : "";
  }
}

function describe() {
  const last = moments.at(-1);
  if (!last) return "Nothing ran yet.";
  return `Allocated ${bytes(last.allocated)} of a budget of ${bytes(budget)}; weights in place ${bytes(last.held)}.`;
}

const paths = uPlot.paths.stepped?.({ align: 1 });
/** @param {string} name @param {number} width @returns {uPlot.Series} */
const line = (name, width) => ({
  stroke: () => colour(name),
  width,
  points: { show: false },
  ...(paths && { paths }),
});
/** @param {[number, number]} series @param {string} name @returns {uPlot.Band} */
const band = (series, name) => ({ series, fill: () => colour(name) });

const draw = chart(
  byId("memory-chart", HTMLElement),
  {
    cursor: { show: false },
    scales: {
      x: { time: false },
      y: { range: (_, __, max) => [0, Math.max(max ?? 0, budget, 1) * 1.06] },
    },
    axes: [
      axis({ values: (_, ticks) => ticks.map((t) => `${digits(t)} s`), space: 70 }),
      axis({ values: (_, ticks) => ticks.map((t) => (t === 0 ? "0" : bytes(t))), size: 72, space: 32, incrs: POWERS }),
    ],
    series: [
      {},
      { ...line("--others-1", 0), fill: () => colour("--others-1") },
      line("--others-2", 0),
      line("--others-3", 0),
      line("--deep", 1.5),
      line("--edge", 1),
      { stroke: () => colour("--limit"), width: 2, dash: [6, 4], points: { show: false } },
    ],
    bands: [
      band([5, 4], "--shallow"),
      band([4, 3], "--sea"),
      band([3, 2], "--others-2"),
      band([2, 1], "--others-3"),
    ],
  },
  read,
  describe,
);
