// The budget and what it will mean: the slider, its text, and the forecast of the engine, which follows both.
//
// One forecast is asked for at a time; while it is made, only the newest wish is remembered. So a slider that moves
// faster than the engine plans never queues up.

/** @import { Forecast } from "../protocol.d.ts" */
import { app, know, onChange } from "./app.js";
import { byId, fillList } from "./dom.js";
import { EngineError } from "./engine.js";
import { bytes, count, exactBytes } from "./format.js";
import { tellError } from "./notices.js";
import { settings } from "./settings.js";
import * as tide from "./tide.js";

const slider = byId("budget", HTMLInputElement);
const text = byId("budget-text", HTMLInputElement);
const list = byId("forecast", HTMLElement);
const refused = byId("refused", HTMLElement);
const floorEnd = byId("floor-end", HTMLElement);
const allEnd = byId("all-end", HTMLElement);

let planning = false;
let again = false;

/** The budget as it is asked for. */
export const budget = () => text.value.trim().replace(/\s+%$/, "%");

/** @param {string} wanted */
export function setBudget(wanted) {
  text.value = wanted;
  slide();
}

/** Asks for a forecast of what is set now. */
export async function plan() {
  if (planning || app.doing === "training") {
    again = planning;
    return;
  }
  if (!app.model || !app.data) return;
  planning = true;
  do {
    again = false;
    try {
      const { forecast } = await app.engine.ask({ command: "plan", run: settings(budget()) }, "forecast");
      refused.hidden = true;
      know({ forecast });
    } catch (error) {
      if (error instanceof EngineError && error.ended) break;
      know({ forecast: undefined });
      refused.hidden = false;
      refused.textContent = error instanceof Error ? error.message : String(error);
      if (!(error instanceof EngineError)) tellError(error);
    }
  } while (again);
  planning = false;
}

slider.addEventListener("input", () => {
  const value = slider.valueAsNumber;
  text.value = value === 0 ? "floor" : value === 100 ? "all" : `${value}%`;
  spokenValue();
  plan();
});
text.addEventListener("change", () => {
  slide();
  plan();
});

/** Puts the slider where the text is. */
function slide() {
  const wanted = budget();
  const percent = /^(\d+(?:\.\d+)?)%$/.exec(wanted);
  const { forecast } = app;
  if (percent) slider.value = percent[1] ?? "0";
  else if (wanted === "floor") slider.value = "0";
  else if (wanted === "all") slider.value = "100";
  else if (forecast && forecast.budget === wanted) {
    const span = Math.max(1, forecast.all_bytes - forecast.floor_bytes);
    slider.value = String(Math.round((100 * (forecast.budget_bytes - forecast.floor_bytes)) / span));
  }
  spokenValue();
}

function spokenValue() {
  slider.ariaValueText = app.forecast ? `${budget()}, ${bytes(app.forecast.budget_bytes)}` : budget();
}

onChange(() => {
  const { forecast, doing } = app;
  const fixed = doing === "training";
  slider.disabled = text.disabled = fixed;
  if (!forecast) {
    fillList(list, [["Forecast peak", "–"], ["Budget", "–"], ["Loaded each step", "–"], ["Read each step", "–"]]);
    return;
  }
  floorEnd.textContent = `floor ${bytes(forecast.floor_bytes)}`;
  floorEnd.title = `${exactBytes(forecast.floor_bytes)}, set by ${forecast.floor_set_by}`;
  allEnd.textContent = `all ${bytes(forecast.all_bytes)}`;
  allEnd.title = exactBytes(forecast.all_bytes);
  fillList(list, rows(forecast));
  slide();
  tide.foresee(forecast, !fixed);
});

/**
 * @param {Forecast} forecast
 * @returns {[string, string, string?][]}
 */
function rows(forecast) {
  return [
    ["Forecast peak", bytes(forecast.peak_bytes), exactBytes(forecast.peak_bytes)],
    ["Budget", bytes(forecast.budget_bytes), exactBytes(forecast.budget_bytes)],
    ["Loaded each step", forecast.loads_per_step === 0 ? "nothing" : `${count(forecast.loads_per_step)} parts`],
    ["Read each step", bytes(forecast.bytes_per_step), exactBytes(forecast.bytes_per_step)],
  ];
}
