// The page with the real engine, on SwiftShader: what a visitor does, and what is promised about memory while it is done.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { accessible, bytesIn, heaps, launch, open, ready, shoot, unzip } from "./browser.js";
import { smallModel } from "./model.js";

/** @typedef {import("playwright-core").Page} Page */
/** @type {import("playwright-core").Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

/** Text of one's own: rows so short that a step is quick on a GPU in software, and none to validate on. */
const TEXT = ["Low water at dawn.", "High water at noon.", "Slack at dusk."].join("\n\n");

/** @param {Page} page */
async function useText(page) {
  await page.locator("#data-box summary").click();
  await page.getByLabel("Or text of your own, a paragraph a row").fill(TEXT);
  await page.getByRole("button", { name: "Use this text" }).click();
  await page.locator("#data-name").getByText("3 rows").waitFor();
}

/** Sets fields of the settings by their labels. @param {Page} page @param {Record<string, string>} fields */
async function set(page, fields) {
  await page.locator("#settings-box summary").click();
  for (const [label, value] of Object.entries({ "Rows a batch": "1", "Tokens written": "6", ...fields })) {
    await page.getByLabel(label, { exact: true }).fill(value);
    await page.getByLabel(label, { exact: true }).blur();
  }
  await page.locator("#settings-box summary").click();
}

/** Moves the slider and waits for its forecast. @param {Page} page @param {string} percent */
async function budget(page, percent) {
  await page.getByRole("slider").fill(percent);
  await page.waitForFunction((percent) => document.querySelector("#budget")?.ariaValueText?.startsWith(`${percent}%,`), percent);
  await page.locator("#start:enabled").waitFor();
}

/** @param {Page} page @param {string} words */
const phase = (page, words) => page.locator("#phase").getByText(words).waitFor();
/**
 * Looks twice a second and not at every frame: each look leaves something in the heap that is measured here.
 * @param {Page} page @param {number} wanted
 */
const reaches = (page, wanted) =>
  page.waitForFunction((wanted) => Number(document.querySelector("#stats dd")?.firstChild?.textContent) >= wanted, wanted, { polling: 500 });
/** The exact bytes of a figure. @param {Page} page @param {string} list @param {string} name */
const exact = async (page, list, name) => bytesIn(await page.locator(`${list} dt:text-is("${name}") + dd`).getAttribute("title"));

test("a visitor trains at a third of the weights, keeps the adapter and the session, and goes on after a reload", async () => {
  const { page, close } = await open(browser);
  await ready(page);
  await useText(page);
  await set(page, { Steps: "6" });
  await budget(page, "33");
  const peak = await exact(page, "#forecast", "Forecast peak");
  assert.ok(peak <= (await exact(page, "#forecast", "Budget")));

  await page.locator("#start").click();
  await reaches(page, 3);
  await shoot(page, "engine-training");
  await phase(page, "Done after 6 steps");
  assert.equal(await exact(page, "#stats", "Peak of GPU memory"), peak, "the peak is the forecast");
  const words = (await page.locator("#loss-chart").getAttribute("aria-label")) ?? "";
  const [first, last] = (words.match(/\d+\.\d+/g) ?? []).map(Number);
  assert.ok(first !== undefined && last !== undefined && last < first, words);
  const written = (await page.locator("#after").textContent()) ?? "";
  assert.ok(written.startsWith("Day 211.") && written.length > 10, written);
  assert.ok(((await page.locator("#before").textContent()) ?? "").startsWith("Day 211."));
  await accessible(page);
  await shoot(page, "engine-trained");

  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download the adapter" }).click()]);
  const files = unzip(readFileSync(await download.path()));
  assert.deepEqual([...files.keys()].sort(), ["adapter_config.json", "adapter_model.safetensors"]);
  assert.equal(JSON.parse(String(files.get("adapter_config.json"))).peft_type, "LORA");
  const weights = files.get("adapter_model.safetensors") ?? Buffer.alloc(8);
  const header = JSON.parse(weights.toString("utf8", 8, 8 + Number(weights.readBigUInt64LE(0))));
  assert.ok(Object.keys(header).some((name) => name.endsWith("lora_B.weight")), Object.keys(header).join());

  await page.getByLabel("Name of the session").fill("spring tide");
  await page.getByRole("button", { name: "Save in this browser" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).waitFor();
  await page.reload();
  await ready(page);
  await page.getByRole("button", { name: "Open the session spring tide" }).click();
  await phase(page, "6 steps done; go on when you like.");
  assert.equal(await page.locator("#budget-text").inputValue(), "33%");
  await page.locator("#go-on:enabled").click();
  await reaches(page, 8);
  await page.locator("#stop").click();
  await phase(page, "Stopped after");
  await page.getByRole("button", { name: "Delete the session spring tide" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).waitFor({ state: "detached" });
  await close();
});

test("the ledger is what an outside count sees, and 200 steps leave no trace in any memory", async () => {
  const { page, close } = await open(browser, { witness: true });
  await ready(page);
  await page.locator("#model-files").setInputFiles(smallModel());
  await page.locator("#model-name").getByText("config.json").waitFor();
  await useText(page);
  await set(page, { Steps: "260", "Checkpoint every": "50" });
  await budget(page, "33");
  const [worker] = page.workers();
  assert.ok(worker);
  const witness = () => worker.evaluate(() => /** @type {any} */ (self).witness);
  await worker.evaluate(() => {
    /** @type {any} */ (self).witness.peak = 0;
  });
  await page.locator("#start").click();
  await reaches(page, 20);
  const [heap, seen] = [await heaps(page), await witness()];
  await reaches(page, 220);
  const [heapLater, seenLater] = [await heaps(page), await witness()];
  await page.locator("#stop").click();
  await page.locator("#go-on").waitFor();
  const end = await witness();

  assert.ok(end.asked > 10, `asked ${end.asked} times`);
  assert.deepEqual(end.differences, [], "live bytes, buffers, buffers ever made");
  assert.equal(end.peak, await exact(page, "#stats", "Peak of GPU memory"), "the peak, as counted outside");
  assert.equal(seenLater.made, seen.made, "a step makes no buffer");
  assert.equal(seenLater.memory.wasm_bytes, seen.memory.wasm_bytes, "the wasm memory did not grow");
  for (const place of /** @type {const} */ (["page", "worker"])) {
    const grown = heapLater[place] - heap[place];
    // The charts fill their windows meanwhile, and the browser compiles; a leak of one event a step would be more.
    assert.ok(grown < 300_000, `${place}: ${heap[place]} → ${heapLater[place]} bytes`);
  }
  await close();
});

test("a broken file is refused in words, and a lost GPU is opened again in the middle of a training", async () => {
  const { page, errors, close } = await open(browser);
  await ready(page);
  const broken = smallModel().map((file) => (file.name === "model.safetensors" ? { ...file, buffer: Buffer.from("\xff\xff\xff\xff\xff\xff\xff\x7f{}", "latin1") } : file));
  await page.locator("#model-files").setInputFiles(broken);
  await page.getByRole("alert").filter({ hasText: "model.safetensors" }).waitFor();
  await page.getByRole("button", { name: "Back to the tiny model" }).click();
  await page.locator("#start:enabled").waitFor();
  await page.locator("#model-files").setInputFiles(smallModel());
  await page.locator("#model-name").getByText("config.json").waitFor();
  await useText(page);
  await set(page, { Steps: "30", "Checkpoint every": "3" });
  await budget(page, "50");
  await page.locator("#start").click();
  await reaches(page, 5);
  await page.locator("#device-box summary").click();
  await page.getByRole("button", { name: "Lose the GPU" }).click();
  await page.getByRole("alert").filter({ hasText: "The GPU was lost" }).waitFor();
  await phase(page, "Done after 30 steps");
  // What the browser itself says about a lost device is no error of the page.
  errors.splice(0, errors.length, ...errors.filter((text) => !/lost|destroyed/i.test(text)));
  await close();
});

test("the first founding program runs in the page with equal bits at both budgets", async () => {
  const { page, close } = await open(browser);
  await ready(page);
  await page.getByRole("link", { name: "Founding programs" }).click();
  await page.locator("#stream-form button").click();
  await page.getByText("The same gradient, to the bit.").waitFor();
  assert.ok(await page.locator("#stream-result").getByRole("cell", { name: "39", exact: true }).first().isVisible());
  await shoot(page, "engine-programs");
  await close();
});
