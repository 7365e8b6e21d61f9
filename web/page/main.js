// Opens the GPU through the engine and shows what it found. All text enters by textContent: names of adapters and
// error messages are data, never markup.
import init, { open_device } from "./ebbtide_web.js";

const status = document.getElementById("status");
const table = document.getElementById("device");

function row(name, value) {
  const line = table.tBodies[0].insertRow();
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = name;
  line.append(head);
  line.insertCell().textContent = value;
}

async function main() {
  if (!window.isSecureContext) {
    status.textContent = "Browsers offer WebGPU to https pages and to localhost only. Open this page that way.";
    return;
  }
  if (!navigator.gpu) {
    status.textContent =
      "This browser has no WebGPU. Chrome and Edge 113, Safari 26 and Firefox 141 have it (on Linux, Chrome may need " +
      "chrome://flags/#enable-unsafe-webgpu).";
    return;
  }
  await init();
  const device = JSON.parse(await open_device());
  for (const [name, value] of device.rows) {
    row(name, value);
  }
  table.hidden = false;
  status.textContent = "The engine opened this device:";
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => {
  status.textContent = `The GPU could not be opened: ${error.message ?? error}`;
  document.documentElement.dataset.ready = "failed";
});
