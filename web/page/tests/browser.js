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

/** SwiftShader compiles pipelines and trains on two cores. */
export const PATIENCE = 120_000;

/** @returns {Promise<import("playwright-core").Browser>} */
export const launch = () =>
  chromium.launch({
    executablePath: process.env.EBBTIDE_CHROMIUM ?? "/usr/bin/chromium",
    args: [...flags.filter((flag) => flag !== "--headless"), "--js-flags=--expose-gc"],
  });

/**
 * A page in a profile of its own, opened unless told not to. What its console calls an error is collected, and `close`
 * fails if there is any that was not expected.
 * @param {import("playwright-core").Browser} browser
 * @param {import("playwright-core").BrowserContextOptions & { fake?: boolean, before?: (page: import("playwright-core").Page) => Promise<void> }} [options]
 */
export async function open(browser, { fake = false, before, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(fake ? 20_000 : PATIENCE);
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  if (fake) await page.route("**/worker.js", (route) => route.fulfill({ path: join(here, "fake-worker.js"), contentType: "text/javascript" }));
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
