// The page alone, before a worker that speaks the protocol and computes nothing: what is shown, said, refused and reached
// by keyboard. What the real engine does is in `engine.test.js`.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { accessible, bytesIn, launch, open, ready, shoot } from "./browser.js";

/** @type {import("playwright-core").Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

/** @param {import("playwright-core").Page} page @param {number} step */
const reaches = (page, step) =>
  page.waitForFunction((step) => Number(document.querySelector("#stats dd")?.firstChild?.textContent) >= step, step);

/** A name and value of the forecast. @param {import("playwright-core").Page} page @param {string} name */
const fact = async (page, name) => bytesIn(await page.locator(`#forecast dt:text-is("${name}") + dd`).getAttribute("title"));

test("the page can be seen and used while the engine is still on its way", async () => {
  const { page, close } = await open(browser, { before: (page) => page.route("**/worker.js", () => {}) });
  assert.ok(await page.getByRole("heading", { level: 1 }).isVisible());
  // A paint is noted a frame after it happened, so on a busy machine the entry comes later than the heading.
  await page.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length === 1);
  await page.getByRole("slider").fill("60");
  assert.equal(await page.locator("#budget-text").inputValue(), "60%");
  await page.locator("#settings-box summary").click();
  await page.getByLabel("Steps", { exact: true }).fill("20");
  await page.getByRole("link", { name: "Founding programs" }).click();
  assert.ok(await page.getByRole("heading", { name: "Stream and release" }).isVisible());
  assert.equal(await page.getByRole("button", { name: "Run" }).first().isEnabled(), false);
  await close();
});

test("the forecast follows the slider, by keys too, and a budget that cannot be kept is refused in words", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  const peaks = [];
  for (const percent of ["30", "60", "90"]) {
    await page.getByRole("slider").fill(percent);
    await page.waitForFunction((percent) => document.querySelector("#budget")?.ariaValueText?.startsWith(`${percent}%`), percent);
    await page.waitForTimeout(100);
    peaks.push(await fact(page, "Forecast peak"));
  }
  assert.ok(peaks[0] < peaks[1] && peaks[1] < peaks[2], `${peaks}`);
  await page.getByRole("slider").press("End");
  await page.getByText("nothing", { exact: true }).waitFor();
  assert.equal(await page.locator("#budget-text").inputValue(), "all");
  await page.locator("#budget-text").fill("1000");
  await page.locator("#budget-text").press("Tab");
  await page.getByRole("alert").filter({ hasText: "below the floor" }).waitFor();
  assert.equal(await page.locator("#start").isEnabled(), false);
  await page.getByRole("slider").press("Home");
  await page.getByRole("button", { name: "Start training" }).and(page.locator(":enabled")).waitFor();
  await close();
});

test("a training is started, paused, resumed and stopped by keys alone, and the focus is never lost", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  const focused = () => page.evaluate(() => document.activeElement?.id);
  await page.locator("#budget").focus();
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "start");
  await page.keyboard.press("Enter");
  await reaches(page, 2);
  assert.equal(await focused(), "pause");
  await page.keyboard.press("Enter");
  await page.getByText("Paused; its memory stays.").waitFor();
  assert.equal(await page.locator("#pause").textContent(), "Resume");
  const held = await page.locator("#stats dd").first().textContent();
  await page.waitForTimeout(300);
  assert.equal(await page.locator("#stats dd").first().textContent(), held, "a paused training stands still");
  await page.keyboard.press("Enter");
  await reaches(page, Number.parseInt(held ?? "") + 2);
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.locator("#go-on").waitFor();
  assert.equal(await page.locator("#phase").getByText(/^Stopped after/).count(), 1);
  assert.equal(await focused(), "go-on");
  await page.keyboard.press("Enter");
  await reaches(page, Number.parseInt(held ?? "") + 4);
  await close();
});

test("a training shows its loss, its memory and its samples, and that the peak was the forecast", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await page.locator("#settings-box summary").click();
  await page.getByLabel("Steps", { exact: true }).fill("25");
  await page.getByLabel("Steps", { exact: true }).blur();
  await page.locator("#start").click();
  await page.getByText(/^Done after 25 steps/).first().waitFor();
  assert.ok(await page.locator("#stats").getByText("as forecast").isVisible());
  assert.match((await page.locator("#loss-chart").getAttribute("aria-label")) ?? "", /^The loss went from \d/);
  assert.match((await page.locator("#memory-chart").getAttribute("aria-label")) ?? "", /^Allocated 3\.\d+ MiB of a budget/);
  assert.match((await page.locator("#step-chart").getAttribute("aria-label")) ?? "", /parts were loaded/);
  assert.match((await page.locator("#after").textContent()) ?? "", /^Day 211\. Low water/);
  await close();
});

test("what files, errors and models say enters the page as text", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await page.locator("#start").click();
  await page.getByText("<b>my lord</b>").waitFor();
  await page.locator("#stop").click();
  await page.locator("#go-on").waitFor();
  await page.locator("#model-files").setInputFiles({ name: "broken.safetensors", mimeType: "application/octet-stream", buffer: Buffer.from("?") });
  await page.getByRole("alert").filter({ hasText: "<img src=x onerror=alert(1)>" }).waitFor();
  await page.locator("#model-files").setInputFiles({ name: "<i>good</i>.safetensors", mimeType: "application/octet-stream", buffer: Buffer.from("?") });
  await page.getByText("<i>good</i>.safetensors").first().waitFor();
  assert.equal(await page.locator("main img, #notices b, #before b b, #model-name i").count(), 0);
  await close();
});

test("a file dropped on the page is opened, and one that is nothing is told so", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await drop(page, "holiday.png");
  await page.getByRole("alert").filter({ hasText: "Nothing to open here" }).waitFor();
  await drop(page, "notes.txt");
  await page.locator("#spoken").getByText("is read").waitFor({ state: "attached" });
  await drop(page, "broken.safetensors");
  await page.getByRole("button", { name: "Back to the tiny model" }).click();
  await page.locator("#spoken").getByText("tiny-shakespeare-llama is open").waitFor({ state: "attached" });
  await close();
});

/** @param {import("playwright-core").Page} page @param {string} name */
const drop = (page, name) =>
  page.evaluate((name) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File(["?"], name));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
  }, name);

test("a model at an address is copied before it is trained, and the copy can be deleted", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await page.locator("#model-box summary").click();
  await page.getByLabel("Address of a folder").fill("https://example.org/model/");
  await page.getByRole("button", { name: "Open", exact: true }).click();
  await page.getByText("is copied into this browser first").waitFor();
  assert.equal(await page.locator("#start").isEnabled(), false);
  await page.getByRole("button", { name: "Copy into this browser" }).click();
  await page.locator("#start:enabled").waitFor();
  await page.getByRole("button", { name: "The tiny model of this page" }).click();
  await page.locator("#start:enabled").waitFor();
  await page.getByRole("button", { name: "Delete the model far-away" }).click();
  await page.getByRole("button", { name: "Open the model far-away" }).waitFor({ state: "detached" });
  await close();
});

test("sessions are saved, opened and deleted, and the adapter is a zip of its two files", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await page.locator("#start").click();
  await reaches(page, 3);
  await page.locator("#stop").click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download the adapter" }).click()]);
  assert.match(download.suggestedFilename(), /^ebbtide-adapter-\d+-steps\.zip$/);
  await page.getByLabel("Name of the session").fill("spring tide");
  await page.getByRole("button", { name: "Save in this browser" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).click();
  await page.getByText(/steps done; go on when you like/).waitFor();
  assert.equal(await page.locator("#budget-text").inputValue(), "50%");
  await page.getByRole("button", { name: "Delete the session spring tide" }).click();
  await page.getByRole("button", { name: "Open the session spring tide" }).waitFor({ state: "detached" });
  await close();
});

test("the page runs no script but its own and connects to nowhere else", async () => {
  const { page, errors, close } = await open(browser, { fake: true });
  await ready(page);
  const refused = await page.evaluate(async () => {
    /** @type {string[]} */
    const seen = [];
    document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
    const script = document.createElement("script");
    script.textContent = "window.injected = true";
    document.body.append(script);
    document.body.insertAdjacentHTML("beforeend", `<p style="color: red" onclick="window.injected = true"></p>`);
    await fetch("http://127.0.0.2:9/secret").catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, 100));
    return { seen: [...new Set(seen)].sort(), injected: "injected" in window };
  });
  assert.deepEqual(refused, { seen: ["connect-src", "script-src-attr", "script-src-elem", "style-src-attr"], injected: false });
  errors.splice(0, errors.length, ...errors.filter((text) => !text.includes("Content Security Policy")));
  await close();
});

test("without WebGPU, and without its worker, the page says what is missing and lets one try again", async () => {
  const blind = await open(browser, { before: (page) => page.addInitScript(() => Object.defineProperty(Navigator.prototype, "gpu", { value: undefined })) });
  await blind.page.getByRole("alert").filter({ hasText: "This browser has no WebGPU" }).waitFor();
  await accessible(blind.page);
  await blind.close();

  const { page, close } = await open(browser, { before: (page) => page.route("**/worker.js", (route) => route.fulfill({ status: 404 })) });
  await page.getByRole("alert").filter({ hasText: "could not be loaded" }).waitFor();
  await page.unroute("**/worker.js");
  await page.route("**/worker.js", (route) => route.fulfill({ contentType: "text/javascript", body: `postMessage({ message: "ready", format: 2, version: "9" })` }));
  await page.getByRole("button", { name: "Try again" }).click();
  await page.getByRole("alert").filter({ hasText: "reload the page" }).waitFor();
  await close();
});

test("an engine that breaks down says so once, and can be started anew", async () => {
  const { page, close } = await open(browser, { fake: true });
  await ready(page);
  await page.locator("#start").click();
  await reaches(page, 1);
  await page.workers()[0]?.evaluate(() => postMessage({ message: "failed", id: 0, error: { code: "panic", message: "It <b>broke</b>.", fields: {} } }));
  await page.getByRole("alert").filter({ hasText: "It <b>broke</b>." }).waitFor();
  assert.equal(await page.locator(".notice").count(), 1);
  assert.equal(page.workers().length, 0, "the worker has ended");
  await page.getByRole("button", { name: "Try again" }).click();
  await page.locator("#start:enabled").waitFor();
  await close();
});

const LOOKS = [
  { name: "desktop" },
  { name: "dark", colorScheme: "dark" },
  { name: "phone", viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true },
  { name: "small-phone", viewport: { width: 320, height: 640 }, isMobile: true, hasTouch: true, reducedMotion: "reduce" },
];
for (const { name, ...look } of LOOKS) {
  test(`in its look "${name}" the page fits, and axe finds nothing serious`, async () => {
    const { page, close } = await open(browser, { fake: true, .../** @type {any} */ (look) });
    await ready(page);
    const fits = async () => assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "nothing is wider than the page");
    await accessible(page);
    await page.locator("#start").click();
    await reaches(page, 12);
    await accessible(page);
    await fits();
    await shoot(page, name);
    await page.locator("#stop").click();
    await page.locator("#go-on").waitFor();
    for (const box of ["model-box", "data-box", "settings-box"]) {
      await page.locator(`#${box} summary`).click();
      await accessible(page);
      await fits();
    }
    await page.getByRole("link", { name: "Founding programs" }).click();
    for (const program of ["stream", "fold"]) {
      await page.locator(`#${program}-form button`).click();
      await page.locator(`#${program}-result table`).waitFor();
    }
    await accessible(page);
    await fits();
    await shoot(page, `${name}-programs`);
    await close();
  });
}
