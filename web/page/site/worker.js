// The engine's worker. For now the module opens the GPU and no more; the other commands say so.
import init, { open_device } from "./ebbtide_web.js";

const failed = (id, code, message) => postMessage({ message: "failed", id, error: { code, message, fields: {} } });
const ended = (error) => (error instanceof Error ? error.message : String(error));

addEventListener("message", async ({ data: { id, command } }) => {
  if (command !== "open-device") return failed(id, "not-built", `The engine of this page does not know "${command}" yet.`);
  try {
    postMessage({ message: "done", id, reply: { reply: "device", ...JSON.parse(await open_device()) } });
  } catch (error) {
    failed(id, "no-adapter", ended(error));
  }
});

try {
  await init();
  postMessage({ message: "ready", format: 1, version: "without training" });
} catch (error) {
  failed(0, "worker", `The engine could not be loaded: ${ended(error)}`);
}
