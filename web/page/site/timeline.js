// A run as it happened: which part was in memory when, and for which pass it had been loaded.

/** @import { Timed } from "../protocol.d.ts" */
import { axis, chart, colour } from "./chart.js";
import { digits, duration, plural } from "./format.js";
import { Slots } from "./slots.js";
import uPlot from "./vendor/uPlot.esm.js";

/** @typedef {"forward" | "backward" | "stays"} Why */
/** @typedef {{ lane: number, from: number, to: number, why: Why }} Bar */
/** @typedef {{ bars: Bar[], time: number, turn: number | undefined, loads: number }} Run */

const COLOURS = { forward: "--sea", backward: "--backward", stays: "--shallow" };

/**
 * @param {HTMLElement} place
 * @param {string} kind of run: what the names of its programs begin with
 * @param {string} name for those who do not see it
 */
export function timeline(place, kind, name) {
  /** @type {string[]} */
  let lanes = [];
  let slots = new Slots(0);
  /** What is in memory, since when and why. @type {Map<string, { from: number, why: Why }>} */
  let here = new Map();
  /** What runs now. @type {{ start: number, bars: Bar[], turn: number | undefined, loads: number } | undefined} */
  let now;
  /** The last that is complete. @type {Run | undefined} */
  let shown;

  /** @param {Timed} timed */
  function one(timed) {
    for (const { at, name, pass, here: came } of slots.change(timed)) {
      if (came) here.set(name, { from: at, why: pass === "backward" ? "backward" : "forward" });
      else leave(name, at);
    }
    switch (timed.event) {
      case "run-start":
        now = timed.program.startsWith(kind) ? { start: timed.at, bars: [], turn: undefined, loads: 0 } : undefined;
        for (const name of here.keys()) here.set(name, { from: timed.at, why: "stays" });
        break;
      case "load":
      case "evict":
        if (!now) break;
        if (timed.pass === "backward") now.turn ??= timed.at - now.start;
        if (timed.event === "load") now.loads += 1;
        break;
      case "run-end":
        if (!now) break;
        for (const [name, since] of here) bar(name, since, timed.at);
        shown = { bars: now.bars, time: timed.at - now.start, turn: now.turn, loads: now.loads };
        now = undefined;
        draw();
    }
  }

  /** @param {string} name @param {number} at */
  function leave(name, at) {
    const since = here.get(name);
    if (since) bar(name, since, at);
    here.delete(name);
  }

  /** @param {string} name @param {{ from: number, why: Why }} since @param {number} at */
  function bar(name, { from, why }, at) {
    const lane = lanes.indexOf(name);
    if (now && lane >= 0) now.bars.push({ lane, from: Math.max(0, from - now.start), to: at - now.start, why });
  }

  /** @param {uPlot} plot */
  function paint(plot) {
    if (!shown) return;
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const lane = height / Math.max(1, lanes.length);
    const gap = Math.min(3 * devicePixelRatio, lane * 0.15);
    const x = (/** @type {number} */ time) => plot.valToPos(time, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (const why of /** @type {const} */ (["stays", "forward", "backward"])) {
      ctx.fillStyle = colour(COLOURS[why]);
      for (const bar of shown.bars) {
        if (bar.why !== why) continue;
        ctx.fillRect(x(bar.from), top + bar.lane * lane + gap, Math.max(2, x(bar.to) - x(bar.from)), lane - 2 * gap);
      }
    }
    if (shown.turn !== undefined) {
      ctx.fillStyle = colour("--ink");
      ctx.fillRect(x(shown.turn), top, Math.max(1, devicePixelRatio), height);
    }
    ctx.restore();
  }

  const describe = () =>
    shown ? `${name} took ${duration(shown.time)}; ${plural(shown.loads, "part was", "parts were")} loaded in it.` : "Nothing ran yet.";

  /** The middles of the lanes that have room for a name. @param {uPlot} plot */
  function middles(plot) {
    const every = Math.max(1, Math.ceil((lanes.length * 16 * devicePixelRatio) / Math.max(1, plot.bbox.height)));
    return lanes.map((_, lane) => lane).filter((lane) => lane % every === 0);
  }

  const draw = chart(
    place,
    {
      cursor: { show: false },
      scales: {
        x: { time: false, range: () => [0, shown?.time ?? 1] },
        y: { range: () => [0, Math.max(1, lanes.length)], dir: -1 },
      },
      axes: [
        axis({ values: (_, ticks) => ticks.map((t) => `${digits(t)} ms`), space: 70 }),
        axis({
          size: 72,
          splits: (plot) => middles(plot).map((lane) => lane + 0.5),
          values: (plot) => middles(plot).map((lane) => lanes[lane] ?? ""),
          grid: { show: false },
        }),
      ],
      series: [{}, { points: { show: false } }],
      hooks: { draw: [paint] },
    },
    () => (shown ? [[0, shown.time], [null, null]] : [[], []]),
    describe,
  );

  return {
    /**
     * @param {string[]} names of the parts, in the order of the forward pass
     * @param {number} room bytes of all weight slots
     */
    begin(names, room) {
      lanes = names;
      slots = new Slots(room);
      now = shown = undefined;
      here = new Map();
      draw();
    },
    /** @param {Timed[]} events */
    happened(events) {
      for (const timed of events) one(timed);
    },
  };
}
