// How to train: the form of settings as the engine wants it.

/** @import { DataSettings, RunSettings, SampleSettings } from "../protocol.d.ts" */
import { app, onChange } from "./app.js";
import { byId } from "./dom.js";
import { plural } from "./format.js";

const form = byId("settings", HTMLFormElement);
const words = byId("settings-words", HTMLElement);
const prompt = byId("prompt", HTMLInputElement);

const NUMBERS = /** @type {const} */ ([
  "steps", "batch_size", "grad_accumulation_steps", "learning_rate", "warmup", "rank", "alpha", "dropout", "seed",
  "steps_per_eval", "save_every",
]);
const TEXTS = /** @type {const} */ (["lr_schedule", "target_modules"]);

/** @param {string} name @returns {HTMLInputElement} */
const field = (name) => /** @type {HTMLInputElement} */ (form.elements.namedItem(name));

/** Whether all fields hold what they may. */
export const settingsAreValid = () => form.checkValidity();

/**
 * @param {string} budget
 * @returns {RunSettings}
 */
export function settings(budget) {
  /** @type {RunSettings} */
  const run = { budget, sample: sampleSettings() };
  for (const name of NUMBERS) {
    const value = field(name).valueAsNumber;
    if (Number.isFinite(value)) run[name] = value;
  }
  for (const name of TEXTS) {
    const value = field(name).value.trim();
    if (value !== "") run[name] = value;
  }
  return run;
}

/** @returns {SampleSettings} */
export const sampleSettings = () => ({ prompt: prompt.value, tokens: field("sample_tokens").valueAsNumber || 48 });

/** @returns {DataSettings} */
export const dataSettings = () => ({
  max_seq_length: field("max_seq_length").valueAsNumber || 256,
  mask_prompt: field("mask_prompt").checked,
});

/**
 * Shows the settings of a kept session.
 * @param {RunSettings} run
 */
export function showSettings(run) {
  for (const name of NUMBERS) field(name).value = String(run[name] ?? field(name).defaultValue);
  field("lr_schedule").value = run.lr_schedule ?? "constant";
  field("target_modules").value = run.target_modules ?? "";
  prompt.value = run.sample?.prompt ?? "";
  field("sample_tokens").value = String(run.sample?.tokens ?? 48);
  tellSettings();
}

/** @param {() => void} run runs when what is planned changed, and whether the data has to be read anew */
export function onSettings(/** @type {(data: boolean) => void} */ run) {
  form.addEventListener("change", (event) => {
    tellSettings();
    const name = event.target instanceof HTMLInputElement ? event.target.name : "";
    if (settingsAreValid()) run(name === "max_seq_length" || name === "mask_prompt");
    else form.reportValidity();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

function tellSettings() {
  words.textContent = `${plural(field("steps").valueAsNumber || 0, "step")}, rank ${field("rank").value}`;
}

onChange(() => {
  for (const input of form.elements) {
    if (input instanceof HTMLInputElement || input instanceof HTMLSelectElement) input.disabled = app.doing === "training";
  }
});
