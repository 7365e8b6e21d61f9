// The engine's worker: loads the module and hands it what the page posts. Ending this worker frees everything.
import init, { Engine } from "./ebbtide_web.js";

/** @type {unknown[]} */
const early = [];
self.onmessage = ({ data }) => early.push(data);

try {
  await init();
  const engine = new Engine((/** @type {unknown} */ message, /** @type {Transferable[]} */ transfer) => postMessage(message, { transfer }));
  self.onmessage = ({ data }) => engine.receive(data);
  for (const data of early) engine.receive(data);
} catch (error) {
  const message = `The engine could not be loaded: ${error instanceof Error ? error.message : error}`;
  postMessage({ message: "failed", id: 0, error: { code: "worker", message, fields: {} } });
}
