// The browser and the page for all tests: Chromium with the flags of `web/webdriver.json`, pages that fail their test on
// anything that the console calls an error, screenshots, and accessibility.
//
// `cargo xtask test` says where the page is served. By hand: `cargo xtask web` in one shell, `npm test` in another.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const here = fileURLToPath(new URL(".", import.meta.url));
const flags = JSON.parse(readFileSync(join(here, "../../webdriver.json"), "utf8"))["goog:chromeOptions"].args;
const axe = readFileSync(join(here, "../node_modules/axe-core/axe.min.js"), "utf8");
const shots = process.env.EBBTIDE_SHOTS ?? join(here, "../../../target/page");
export const address = process.env.EBBTIDE_PAGE ?? "http://localhost:8000/";

/** SwiftShader compiles pipelines and trains on two cores, which may have other work. */
export const PATIENCE = 400_000;

/** @returns {Promise<import("playwright-core").Browser>} */
export const launch = () =>
  chromium.launch({
    executablePath: process.env.EBBTIDE_CHROMIUM ?? "/usr/bin/chromium",
    args: [...flags.filter((flag) => flag !== "--headless"), "--js-flags=--expose-gc"],
  });

/**
 * Runs in front of the worker: an outside count of what the engine makes on the GPU. At every word of the engine's about
 * its memory, both counts are compared at that moment. Made of the API alone, so it shares no line with what it checks.
 */
const WITNESS = `{
const sizes = new WeakMap();
const witness = (self.witness = { live: 0, buffers: 0, made: 0, peak: 0, asked: 0, differences: [], memory: undefined });
const { createBuffer } = GPUDevice.prototype;
GPUDevice.prototype.createBuffer = function (descriptor) {
  const buffer = createBuffer.call(this, descriptor);
  sizes.set(buffer, descriptor.size);
  witness.live += descriptor.size;
  witness.buffers += 1;
  witness.made += 1;
  witness.peak = Math.max(witness.peak, witness.live);
  return buffer;
};
const { destroy } = GPUBuffer.prototype;
GPUBuffer.prototype.destroy = function () {
  if (sizes.has(this)) {
    witness.live -= sizes.get(this);
    witness.buffers -= 1;
    sizes.delete(this);
  }
  destroy.call(this);
};
const { postMessage } = self;
self.postMessage = function (message, ...rest) {
  if (message?.reply?.reply === "memory") {
    const { allocated, buffers, buffers_made } = (witness.memory = message.reply);
    const told = Object.values(allocated).reduce((sum, size) => sum + size, 0);
    witness.asked += 1;
    const [ours, theirs] = [[witness.live, witness.buffers, witness.made], [told, buffers, buffers_made]].map(String);
    if (ours !== theirs) witness.differences.push({ ours, theirs });
  }
  return postMessage.call(self, message, ...rest);
};
}
`;

/**
 * A page in a profile of its own, opened unless told not to. What its console calls an error is collected, and `close`
 * fails if there is any that was not expected.
 * @param {import("playwright-core").Browser} browser
 * @param {import("playwright-core").BrowserContextOptions & { fake?: boolean, witness?: boolean, before?: (page: import("playwright-core").Page) => Promise<void> }} [options]
 */
export async function open(browser, { fake = false, witness = false, before, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(fake ? 20_000 : PATIENCE);
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  if (fake || witness) {
    await page.route("**/worker.js", async (route) => {
      const worker = fake ? readFileSync(join(here, "fake-worker.js"), "utf8") : await (await route.fetch()).text();
      await route.fulfill({ contentType: "text/javascript", body: witness ? WITNESS + worker : worker });
    });
  }
  await before?.(page);
  await page.goto(address);
  const close = async () => {
    await context.close();
    assert.deepEqual(errors, [], "errors in the page's console");
  };
  return { page, errors, close };
}

/** @param {import("playwright-core").Page} page */
export const ready = (page) => page.waitForSelector("html[data-ready=yes]", { timeout: PATIENCE });

/**
 * Leaves a picture of the whole page in `target/page`.
 * @param {import("playwright-core").Page} page
 * @param {string} name
 */
export async function shoot(page, name) {
  mkdirSync(shots, { recursive: true });
  await page.screenshot({ path: join(shots, `${name}.png`), fullPage: true });
}

/**
 * Fails on serious and critical findings of axe-core.
 * @param {import("playwright-core").Page} page
 */
export async function accessible(page) {
  // Through the debugger, which the page's security policy does not bind.
  await page.evaluate(axe);
  const found = await page.evaluate(async () => {
    const { violations } = await /** @type {any} */ (window).axe.run(document, { resultTypes: ["violations"] });
    return violations
      .filter(({ impact }) => impact === "serious" || impact === "critical")
      .map(({ id, nodes }) => `${id}: ${nodes.map(({ target, failureSummary }) => `${target} ${failureSummary}`).join("; ")}`);
  });
  assert.deepEqual(found, []);
}

/** Bytes of a shown size, from its title. @param {string | null} title */
export const bytesIn = (title) => Number(title?.replace(/[^\d]/g, ""));

/**
 * Bytes of JavaScript objects after a forced collection, in the page and in its worker.
 * @param {import("playwright-core").Page} page
 */
export async function heaps(page) {
  const client = await page.context().newCDPSession(page);
  /** @type {Promise<string>} */
  const worker = new Promise((resolve) => client.on("Target.attachedToTarget", ({ sessionId, targetInfo }) => targetInfo.type === "worker" && resolve(sessionId)));
  await client.send("Target.setAutoAttach", { autoAttach: true, waitForDebuggerOnStart: false, flatten: false });
  const sessionId = await worker;
  let last = 0;
  const asked = new Map();
  client.on("Target.receivedMessageFromTarget", ({ message }) => {
    const { id, result } = JSON.parse(message);
    asked.get(id)?.(result);
  });
  const inWorker = (/** @type {string} */ method) =>
    new Promise((resolve) => {
      asked.set(++last, resolve);
      client.send("Target.sendMessageToTarget", { sessionId, message: JSON.stringify({ id: last, method }) });
    });
  await client.send("HeapProfiler.collectGarbage");
  await inWorker("HeapProfiler.collectGarbage");
  const used = { page: (await client.send("Runtime.getHeapUsage")).usedSize, worker: (await inWorker("Runtime.getHeapUsage")).usedSize };
  await client.detach();
  return used;
}

/**
 * The files of a zip that stores them as they are: name and bytes.
 * @param {Buffer} zip
 * @returns {Map<string, Buffer>}
 */
export function unzip(zip) {
  const files = new Map();
  const end = zip.lastIndexOf("PK\x05\x06", undefined, "latin1");
  assert.ok(end >= 0, "no zip");
  let at = zip.readUInt32LE(end + 16);
  for (let left = zip.readUInt16LE(end + 10); left > 0; left--) {
    assert.equal(zip.readUInt16LE(at + 10), 0, "stored");
    const [size, name, extra, comment, local] = [zip.readUInt32LE(at + 24), zip.readUInt16LE(at + 28), zip.readUInt16LE(at + 30), zip.readUInt16LE(at + 32), zip.readUInt32LE(at + 42)];
    const data = local + 30 + zip.readUInt16LE(local + 26) + zip.readUInt16LE(local + 28);
    files.set(zip.toString("utf8", at + 46, at + 46 + name), zip.subarray(data, data + size));
    at += 46 + name + extra + comment;
  }
  return files;
}
