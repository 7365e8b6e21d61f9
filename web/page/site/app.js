// What the page knows, in one place: the engine, what is open in it, and what it does now. The parts of the page draw
// themselves from it whenever it changed, at the next frame.

/** @import { DataInfo, Forecast, ModelInfo } from "../protocol.d.ts" */
import { eachFrame } from "./dom.js";
import { Engine, EngineError } from "./engine.js";

/** @typedef {"starting" | "idle" | "opening" | "training" | "writing" | "probing" | "stopped"} Doing */

/** @type {(() => void)[]} */
const parts = [];
const draw = eachFrame(() => {
  for (const part of parts) part();
});

export const app = {
  engine: new Engine(new URL("worker.js", import.meta.url), (error) => app.ended(error)),
  /** What happens when the engine has ended by itself. @type {(error: EngineError) => void} */ ended: () => {},
  /** @type {Doing} */ doing: "starting",
  /** @type {string} */ phase: "Loading the engine…",
  /** @type {ModelInfo | undefined} */ model: undefined,
  /** @type {DataInfo | undefined} */ data: undefined,
  /** @type {Forecast | undefined} */ forecast: undefined,
  /** Optimizer steps of the adapter that is in the engine; 0: there is none. */
  trained: 0,
};

/**
 * Changes what the page knows and draws it.
 * @param {Partial<typeof app>} change
 */
export function know(change) {
  Object.assign(app, change);
  draw();
}

/** @param {() => void} part draws itself from `app` */
export function onChange(part) {
  parts.push(part);
  draw();
}

/**
 * Does something that no other such thing may run beside; nothing if one does.
 * @template T
 * @param {Doing} doing
 * @param {string} phase
 * @param {() => Promise<T>} what
 * @returns {Promise<T | undefined>}
 */
export async function alone(doing, phase, what) {
  if (app.doing !== "idle") return undefined;
  know({ doing, phase });
  try {
    return await what();
  } finally {
    // A worker that ended meanwhile has said so itself.
    if (app.doing === doing) know({ doing: "idle", phase: app.phase === phase ? "" : app.phase });
  }
}
