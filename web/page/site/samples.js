// What the model writes: before and after, side by side. Generated text is the least trusted there is, and stays text.

import { alone, app, know, onChange } from "./app.js";
import { byId, element } from "./dom.js";
import { tellError } from "./notices.js";
import { sampleSettings } from "./settings.js";

const places = { before: byId("before", HTMLElement), after: byId("after", HTMLElement) };
const form = byId("sample-form", HTMLFormElement);
const prompt = byId("prompt", HTMLInputElement);
const button = byId("write", HTMLButtonElement);

/** @typedef {keyof typeof places} Place */

/** @param {Place[]} which */
export function clear(which) {
  for (const place of which) places[place].replaceChildren();
}

/**
 * @param {Place} place
 * @param {string} start
 * @param {string} text
 */
export function write(place, start, text) {
  places[place].replaceChildren(element("b", start), text);
}

/**
 * Another piece of what is being written.
 * @param {Place} place
 * @param {string} piece
 */
export function append(place, piece) {
  if (!places[place].hasChildNodes()) places[place].append(element("b", prompt.value));
  places[place].append(piece);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  await alone("writing", "Writing…", async () => {
    const start = prompt.value;
    try {
      for (const place of /** @type {const} */ (["before", "after"])) {
        if (place === "after" && app.trained === 0) break;
        clear([place]);
        const sample = { ...sampleSettings(), without_adapter: place === "before" };
        const { text } = await app.engine.ask({ command: "sample", sample }, "sampled", {
          progress: (progress) => progress.progress === "text" && append(place, progress.text),
        });
        write(place, start, text);
      }
    } catch (error) {
      tellError(error);
    }
    know({ phase: "" });
  });
});

onChange(() => {
  button.disabled = app.doing !== "idle" || app.forecast === undefined;
});
