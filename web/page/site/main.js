// The page begins: which view is shown, and the engine behind it.
//
// Nothing here waits for the engine before the page can be seen and used.

import { app, know, onChange } from "./app.js";
import { byId, fillList } from "./dom.js";
import { EngineError } from "./engine.js";
import { listSessions } from "./keep.js";
import { tell, tellError } from "./notices.js";
import "./programs.js";
import { listKept, openModel } from "./setup.js";
import "./training.js";

const VIEWS = /** @type {const} */ (["train", "programs"]);
const gpu = byId("gpu", HTMLElement);
const facts = byId("device-facts", HTMLElement);
const lose = byId("lose", HTMLButtonElement);

function showView() {
  const wanted = VIEWS.find((view) => location.hash === `#${view}`) ?? VIEWS[0];
  for (const view of VIEWS) {
    byId(`view-${view}`, HTMLElement).hidden = view !== wanted;
    const link = byId(`nav-${view}`, HTMLElement);
    if (view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
addEventListener("hashchange", showView);
addEventListener("beforeunload", (event) => {
  if (app.doing === "training") event.preventDefault();
});
showView();

/** Why there can be no engine here. @returns {string | undefined} */
function obstacle() {
  if (!isSecureContext) return "Browsers offer WebGPU to https pages and to localhost only. Open this page that way.";
  if (!navigator.gpu) {
    return (
      "This browser has no WebGPU. Chrome and Edge have it from version 113 on, Safari from 26, Firefox from 141. " +
      "On Linux, Chrome may need chrome://flags/#enable-unsafe-webgpu."
    );
  }
  return undefined;
}

async function begin() {
  know({ doing: "starting", phase: "Loading the engine…" });
  const missing = obstacle();
  if (missing) return end("No GPU for this page", missing);
  try {
    const version = await app.engine.start();
    know({ phase: "Opening the GPU…" });
    const { rows } = await app.engine.ask({ command: "open-device" }, "device");
    const name = rows.find(([name]) => name === "adapter")?.[1];
    gpu.textContent = name && !name.startsWith("not named") ? `On ${name}` : "On your GPU";
    fillList(facts, [...rows, ["engine", version]]);
  } catch (error) {
    const code = error instanceof EngineError ? error.code : "page";
    return end(code === "no-adapter" ? "No GPU for this page" : "The engine did not start", error instanceof Error ? error.message : String(error), code);
  }
  know({ doing: "idle", phase: "" });
  await openModel({ from: "embedded" });
  await Promise.all([listSessions(), listKept()]);
  document.documentElement.dataset["ready"] = "yes";
}

/** @param {string} title @param {string} text @param {string} [code] */
function end(title, text, code) {
  know({ doing: "stopped", phase: "" });
  gpu.textContent = "No GPU in use";
  tell({ title, text, ...(code && { code }), actions: [["Try again", begin]] });
  document.documentElement.dataset["ready"] = "failed";
}

app.ended = ({ message, code }) => end("The engine stopped", message, code);
lose.addEventListener("click", () => app.engine.ask({ command: "lose-device" }, "ok").catch(tellError));
onChange(() => {
  lose.disabled = app.doing === "starting" || app.doing === "stopped";
});
begin();
