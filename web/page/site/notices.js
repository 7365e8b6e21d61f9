// What went wrong, in words: what was asked, what there is, what to do. Notices stay until they are closed or answered.

import { byId, element } from "./dom.js";
import { EngineError } from "./engine.js";

const place = byId("notices", HTMLElement);
const spoken = byId("spoken", HTMLElement);

/** What the codes mean to somebody who sees this page for the first time. */
const TITLES = new Map([
  ["no-adapter", "No GPU for this page"],
  ["device-lost", "The GPU was lost"],
  ["out-of-memory", "The GPU is out of memory"],
  ["budget-below-floor", "The budget is too small"],
  ["format", "This file is not what it should be"],
  ["io", "A file could not be read"],
  ["cancelled", "Stopped"],
]);

/**
 * @typedef {object} Notice
 * @property {string} title
 * @property {string} text
 * @property {string} [code]
 * @property {[string, () => void][]} [actions]
 */

/** @param {Notice} notice */
export function tell({ title, text, code, actions = [] }) {
  const close = element("button", { text: "×", class: "close" });
  close.type = "button";
  close.ariaLabel = "Close this message";
  const box = element("div", { class: "notice" }, element("strong", title), close, element("p", text));
  box.setAttribute("role", "alert");
  close.onclick = () => box.remove();
  if (code) box.append(element("small", code));
  if (actions.length > 0) {
    box.append(
      element("div", { class: "actions" }, ...actions.map(([words, act]) => {
        const button = element("button", words);
        button.type = "button";
        button.onclick = () => {
          box.remove();
          act();
        };
        return button;
      })),
    );
  }
  place.append(box);
  box.scrollIntoView({ block: "nearest" });
}

/**
 * Tells an error of the engine; what the visitor stopped is none.
 * @param {unknown} error
 * @param {[string, () => void][]} [actions]
 */
export function tellError(error, actions = []) {
  const code = error instanceof EngineError ? error.code : "page";
  if (code === "cancelled" || (error instanceof EngineError && error.ended)) return;
  const text = error instanceof Error ? error.message : String(error);
  tell({ title: TITLES.get(code) ?? "This did not work", text, code, actions });
}

/** Removes all notices. */
export const forget = () => place.replaceChildren();

/**
 * Says something to those who do not see the page change.
 * @param {string} words
 */
export function say(words) {
  spoken.textContent = words;
}
