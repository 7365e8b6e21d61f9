// The picture: the model's parts as basins, wide as they are large. Water stands where weights are in GPU memory.
//
// Before a run it shows what the forecast keeps; while it runs, what the engine did, a moment later and at the pace at
// which it happened: events come in batches, and a picture that jumps would show nothing of the tide.

/** @import { Forecast, Timed } from "../protocol.d.ts" */
import { byId, element, stillness } from "./dom.js";
import { bytes } from "./format.js";
import { Slots } from "./slots.js";

const LAG = 350;
const MOST = 5000;

const place = byId("basins", HTMLElement);
const fill = byId("gauge-fill", HTMLElement);
const mark = byId("gauge-mark", HTMLElement);
const words = byId("tide-words", HTMLElement);

/** @type {Map<string, HTMLElement>} */
let basins = new Map();
let names = "";
let weights = 1;
let slots = new Slots(0);
/** @type {Timed[]} */
let queue = [];
let offset = 0;
let playing = false;

/**
 * Draws the forecast: which parts stay, and how much of the weights may be in memory at once.
 * @param {Forecast} forecast
 * @param {boolean} still whether no run shows what is really there
 */
export function foresee(forecast, still) {
  const wanted = JSON.stringify(forecast.segments);
  if (wanted !== names) {
    names = wanted;
    basins = new Map(forecast.segments.map(([name, size]) => [name, basin(name, size, forecast.segments.length)]));
    place.replaceChildren(...basins.values());
  }
  weights = Math.max(1, forecast.weight_bytes);
  const room = forecast.peak_by_category["weights"] ?? 0;
  mark.style.left = `${Math.min(100, (100 * room) / weights)}%`;
  if (!still) return;
  queue = [];
  slots = new Slots(room);
  for (const name of basins.keys()) stand(name, false);
  // Between two steps the slots hold what stays and, in paler blue, the first parts of the next forward pass.
  let [stays, left] = [forecast.resident_weights, room];
  for (const [name, size] of forecast.segments) {
    stand(name, size <= left, size > stays);
    if (size > left) break;
    stays -= Math.min(stays, size);
    left -= size;
  }
  fill.style.width = `${(100 * (room - left)) / weights}%`;
  words.textContent =
    forecast.loads_per_step === 0
      ? `All ${bytes(weights)} of weights stay in GPU memory.`
      : `Of ${bytes(weights)} of weights, ${bytes(room)} are in GPU memory at once. ` +
        (forecast.resident_weights > 0 ? `${bytes(forecast.resident_weights)} of them stay, the others ebb and flow.` : "They ebb and flow.");
}

/**
 * `block 3` or `3` for block.03, `head` for head.0.
 * @param {string} name
 * @param {boolean} long
 */
const label = (name, long) => name.replace(/^block\.0*(?=\d)/, long ? "block " : "").replace(/^head\.0$/, "head");

/**
 * @param {string} name
 * @param {number} size
 * @param {number} among
 */
function basin(name, size, among) {
  const made = element("div", { class: "basin", title: `${name}: ${bytes(size)}` }, element("div", "", element("i")));
  made.style.flexGrow = String(size);
  if (among <= 18) made.append(element("span", label(name, among <= 10)));
  return made;
}

/**
 * @param {string} name
 * @param {boolean} here
 * @param {boolean} fresh
 */
function stand(name, here, fresh = false) {
  const basin = basins.get(name);
  basin?.classList.toggle("in", here);
  basin?.classList.toggle("fresh", fresh);
}

/**
 * Plays what happened.
 * @param {Timed[]} events in order
 */
export function flow(events) {
  const last = events.at(-1);
  if (!last) return;
  const now = performance.now();
  if (Math.abs(last.at + offset - now) > 500) offset = now - last.at;
  queue = queue.concat(events);
  // In a hidden tab no frame comes: what is late is played at once, and nothing piles up.
  if (document.hidden || queue.length > MOST) return play();
  if (playing) return;
  playing = true;
  requestAnimationFrame(play);
}

function play() {
  const late = stillness.matches || document.hidden || queue.length > MOST;
  const until = late ? Infinity : performance.now() - offset - LAG;
  let done = 0;
  for (const timed of queue) {
    if (timed.at > until) break;
    done += 1;
    for (const { name, here } of slots.change(timed)) stand(name, here, here);
  }
  queue.splice(0, done);
  if (done > 0) {
    const held = slots.bytes;
    fill.style.width = `${Math.min(100, (100 * held) / weights)}%`;
    words.textContent = `${bytes(held)} of ${bytes(weights)} of weights are in GPU memory now.`;
  }
  playing = queue.length > 0;
  if (playing) requestAnimationFrame(play);
}
