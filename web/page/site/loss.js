// The loss of every step, its mean over the last ten, and validation where there is some.

/** @import { Step } from "../protocol.d.ts" */
import { axis, chart, colour } from "./chart.js";
import { byId } from "./dom.js";
import { digits } from "./format.js";

const MOST = 2000;
const OVER = 10;

/** @typedef {{ step: number, loss: number | null, mean: number | null, valid: number | null }} Point */
/** @type {Point[]} */
let points = [];
/** @type {number[]} */
let recent = [];

/**
 * Begins anew, or from where a kept session stands.
 * @param {[number, number][]} losses steps and losses
 */
export function begin(losses) {
  points = [];
  recent = [];
  for (const [step, loss] of losses) add(step, loss);
  draw();
}

/** @param {Step} step */
export function happened({ step, loss }) {
  // After a lost device steps come again, from the last checkpoint on.
  while ((points.at(-1)?.step ?? -1) >= step) points.pop();
  add(step, loss);
  draw();
}

/** @param {number} step @param {number} loss */
function add(step, loss) {
  recent.push(loss);
  if (recent.length > OVER) recent.shift();
  const mean = recent.reduce((sum, x) => sum + x, 0) / recent.length;
  points.push({ step, loss, mean, valid: null });
  // Every other point of a very long run is enough to see.
  if (points.length > MOST) points = points.filter((point, index) => index % 2 === 0 || point.valid !== null);
}

/** @param {number} step @param {number} loss */
export function validated(step, loss) {
  const last = points.at(-1);
  if (last?.step === step) last.valid = loss;
  else points.push({ step, loss: null, mean: null, valid: loss });
  draw();
}

/** Mean of the first and of the last ten losses. @returns {{ first: number, last: number } | undefined} */
export function summary() {
  const losses = points.flatMap((point) => (point.loss === null ? [] : [point.loss]));
  if (losses.length === 0) return undefined;
  /** @param {number[]} some */
  const mean = (some) => some.reduce((sum, x) => sum + x, 0) / some.length;
  return { first: losses[0] ?? NaN, last: mean(losses.slice(-OVER)) };
}

function describe() {
  const found = summary();
  if (!found) return "Nothing ran yet.";
  return `The loss went from ${digits(found.first)} to ${digits(found.last)} in ${points.at(-1)?.step ?? 0} steps.`;
}

const draw = chart(
  byId("loss-chart", HTMLElement),
  {
    cursor: { y: false, points: { show: false } },
    scales: { x: { time: false } },
    axes: [
      axis({ incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }),
      axis({ values: (_, ticks) => ticks.map(digits), size: 48, space: 36 }),
    ],
    series: [
      {},
      { stroke: () => colour("--sea"), width: 1, alpha: 0.55, points: { show: false } },
      { stroke: () => colour("--deep"), width: 2.5, points: { show: false }, spanGaps: true },
      { stroke: () => colour("--limit"), fill: () => colour("--limit"), width: 0, points: { show: true, size: 8, fill: () => colour("--limit") } },
    ],
  },
  () => [points.map((p) => p.step), points.map((p) => p.loss), points.map((p) => p.mean), points.map((p) => p.valid)],
  describe,
);
