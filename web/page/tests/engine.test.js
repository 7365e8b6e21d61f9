// The page with the real engine, on SwiftShader: what a visitor does, and what is promised about memory while it is done.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { accessible, bytesIn, heaps, launch, open, ready, shoot, unzip } from "./browser.js";

/** For work on these tests alone: `EBBTIDE_FAKE=1` runs what it can before the fake worker. */
const fake = process.env.EBBTIDE_FAKE === "1";
/** @typedef {import("playwright-core").Page} Page */
/** @type {import("playwright-core").Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

/** Sets fields of the settings by their labels. @param {Page} page @param {Record<string, string>} fields */
async function set(page, fields) {
  await page.locator("#settings-box summary").click();
  for (const [label, value] of Object.entries(fields)) {
    await page.getByLabel(label, { exact: true }).fill(value);
    await page.getByLabel(label, { exact: true }).blur();
  }
  await page.locator("#settings-box summary").click();
  await page.locator("#start:enabled").waitFor();
}

/** @param {Page} page */
const step = async (page) => Number.parseInt((await page.locator("#stats dd").first().textContent()) ?? "0");
/** @param {Page} page @param {number} wanted */
const reaches = (page, wanted) =>
  page.waitForFunction((wanted) => Number(document.querySelector("#stats dd")?.firstChild?.textContent) >= wanted, wanted);
/** The number that a figure of the training's row shows. @param {Page} page @param {string} name */
const figure = (page, name) => page.locator(`#stats dt:text-is("${name}") + dd`);

test("a visitor trains at a third of the weights, keeps the adapter and the session, and goes on after a reload", async () => {
  const { page, close } = await open(browser, { fake });
  await ready(page);
  await set(page, { Steps: "12", "Validate every": "6" });
  await page.getByRole("slider").fill("33");
  await page.locator("#budget").evaluate((slider) => slider.dispatchEvent(new Event("change")));
  await page.waitForFunction(() => document.querySelector("#budget")?.ariaValueText?.startsWith("33%"));
  const fact = async (/** @type {string} */ name) => bytesIn(await page.locator(`#forecast dt:text-is("${name}") + dd`).getAttribute("title"));
  const [peak, budget] = [await fact("Forecast peak"), await fact("Budget")];
  assert.ok(peak <= budget, `${peak} of ${budget}`);

  await page.locator("#start").click();
  await reaches(page, 4);
  await shoot(page, "engine-training");
  await page.getByText(/^Done after 12 steps/).first().waitFor();
  assert.equal(bytesIn(await figure(page, "Peak of GPU memory").getAttribute("title")), peak, "the peak is the forecast");
  const words = (await page.locator("#loss-chart").getAttribute("aria-label")) ?? "";
  const [first, last] = (words.match(/\d+\.\d+/g) ?? []).map(Number);
  assert.ok(first !== undefined && last !== undefined && last < first, words);
  const written = (await page.locator("#after").textContent()) ?? "";
  assert.ok(written.startsWith("Day 211.") && written.length > 20, written);
  assert.notEqual(written, await page.locator("#before").textContent());
  await accessible(page);
  await shoot(page, "engine-trained");

  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download the adapter" }).click()]);
  const files = unzip(readFileSync(await download.path()));
  assert.deepEqual([...files.keys()].sort(), ["adapter_config.json", "adapter_model.safetensors"]);
  assert.equal(JSON.parse(String(files.get("adapter_config.json"))).peft_type, "LORA");
  if (!fake) {
    const weights = files.get("adapter_model.safetensors") ?? Buffer.alloc(8);
    const header = JSON.parse(weights.toString("utf8", 8, 8 + Number(weights.readBigUInt64LE(0))));
    assert.ok(Object.keys(header).some((name) => name.endsWith("lora_B.weight")), Object.keys(header).join());
  }

  await page.getByLabel("Name of the session").fill("spring tide");
  await page.getByRole("button", { name: "Save in this browser" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).waitFor();
  if (!fake) {
    await page.reload();
    await ready(page);
  }
  await page.getByRole("button", { name: "Open the session spring tide" }).click();
  await page.getByText("12 steps done; go on when you like.").waitFor();
  await page.locator("#go-on:enabled").click();
  await reaches(page, 14);
  await page.locator("#stop").click();
  await page.getByText(/^Stopped after 1[4-9] steps/).first().waitFor();
  await page.getByRole("button", { name: "Delete the session spring tide" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).waitFor({ state: "detached" });
  await close();
});

test("the ledger is what an outside count sees, and 200 steps leave no trace in any memory", { skip: fake }, async () => {
  const { page, close } = await open(browser, { witness: true });
  await ready(page);
  // Short rows of one's own: as many steps as possible in the time there is.
  await page.locator("#data-box summary").click();
  await page.getByLabel("Or text of your own, a paragraph a row").fill(["Low water at dawn.", "High water at noon.", "Slack at dusk."].join("\n\n"));
  await page.getByRole("button", { name: "Use this text" }).click();
  await page.locator("#data-name").getByText("3 rows").waitFor();
  await set(page, { Steps: "260", "Rows a batch": "1", "Checkpoint every": "50" });
  await page.getByRole("slider").fill("33");
  const worker = page.workers()[0];
  assert.ok(worker);
  const witness = () => worker.evaluate(() => /** @type {any} */ (self).witness);
  await worker.evaluate(() => {
    /** @type {any} */ (self).witness.peak = 0;
  });
  await page.locator("#start:enabled").click();
  await reaches(page, 50);
  const [heap, seen] = [await heaps(page), await witness()];
  await reaches(page, 250);
  const [heapLater, seenLater] = [await heaps(page), await witness()];
  await page.locator("#stop").click();
  await page.locator("#go-on").waitFor();
  const end = await witness();

  assert.ok(end.asked > 10, `asked ${end.asked} times`);
  assert.deepEqual(end.differences, [], "live bytes, buffers, buffers ever made");
  assert.equal(end.peak, bytesIn(await figure(page, "Peak of GPU memory").getAttribute("title")), "the peak, as counted outside");
  assert.equal(seenLater.made, seen.made, "a step makes no buffer");
  assert.equal(seenLater.memory.wasm_bytes, seen.memory.wasm_bytes, "the wasm memory did not grow");
  for (const place of /** @type {const} */ (["page", "worker"])) {
    const grown = heapLater[place] - heap[place];
    // The charts fill their windows meanwhile, and the browser compiles; a leak of one event a step would be more.
    assert.ok(grown < 300_000, `${place}: ${heap[place]} → ${heapLater[place]} bytes`);
  }
  await close();
});

test("a broken file is refused in words, and a lost GPU is opened again in the middle of a training", { skip: fake }, async () => {
  const { page, errors, close } = await open(browser);
  await ready(page);
  await page.locator("#model-files").setInputFiles([
    { name: "config.json", mimeType: "application/json", buffer: Buffer.from('{"architectures":["LlamaForCausalLM"]}') },
    { name: "model.safetensors", mimeType: "application/octet-stream", buffer: Buffer.from("\xff\xff\xff\xff\xff\xff\xff\x7f{}", "latin1") },
  ]);
  await page.getByRole("alert").waitFor();
  await page.getByRole("button", { name: "Back to the tiny model" }).click();
  await page.locator("#start:enabled").waitFor();
  await set(page, { Steps: "16", "Rows a batch": "1", "Checkpoint every": "3" });
  await page.locator("#start").click();
  await reaches(page, 5);
  await page.locator("#device-box summary").click();
  await page.getByRole("button", { name: "Lose the GPU" }).click();
  await page.getByRole("alert").filter({ hasText: "The GPU was lost" }).waitFor();
  await page.getByText(/^Done after 16 steps/).first().waitFor();
  assert.equal(await step(page), 16);
  // What the browser itself says about a lost device is no error of the page.
  errors.splice(0, errors.length, ...errors.filter((text) => !/lost|destroyed/i.test(text)));
  await close();
});

test("both founding programs run in the page with equal bits", { skip: fake }, async () => {
  const { page, close } = await open(browser);
  await ready(page);
  await page.getByRole("link", { name: "Founding programs" }).click();
  await page.locator("#stream-form button").click();
  await page.getByText("The same gradient, to the bit.").waitFor();
  assert.ok(await page.locator("#stream-result").getByRole("cell", { name: "39", exact: true }).first().isVisible());
  await page.locator("#fold-form button").click();
  await page.getByText("The same result, to the bit.").waitFor();
  await shoot(page, "engine-programs");
  await close();
});
