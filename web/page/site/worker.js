// The engine's worker: loads the module and hands it what the page posts. Ending this worker frees everything.
import init, { Engine } from "./ebbtide_web.js";

/** @type {unknown[]} */
const early = [];
self.onmessage = ({ data }) => early.push(data);

/** @type {(what: string, error: unknown) => void} */
const broken = (what, error) => {
  const message = `The engine ${what}: ${error instanceof Error ? error.message : error}`;
  postMessage({ message: "failed", id: 0, error: { code: "worker", message, fields: {} } });
};
// A panic ends a task of the engine without a word: the command that ran would never end.
self.addEventListener("unhandledrejection", ({ reason }) => broken("broke down", reason));

try {
  await init();
  const engine = new Engine((/** @type {unknown} */ message, /** @type {Transferable[]} */ transfer) => postMessage(message, { transfer }));
  self.onmessage = ({ data }) => engine.receive(data);
  for (const data of early) engine.receive(data);
} catch (error) {
  broken("could not be loaded", error);
}
