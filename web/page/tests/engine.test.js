// The page with the real engine, on SwiftShader.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, open, ready } from "./browser.js";

/** @type {import("playwright-core").Browser} */
let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

test("the engine loads under the page's policy and opens the GPU", async () => {
  const { page, close } = await open(browser);
  await ready(page);
  await page.locator("#device-box summary").click();
  assert.ok((await page.locator("#device-facts dt").count()) > 3);
  await close();
});
