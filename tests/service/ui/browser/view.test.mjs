// What all views have: themes, narrow windows, accessibility, and the live state.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { launch, newPage, playReported, readerWith, serve, writeFiles } from "./page.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
let service, browser, files;
before(async () => {
  [service, browser, files] = [await serve(), await launch(), writeFiles()];
});
after(async () => {
  await browser?.close();
  service?.stop();
  files?.remove();
});

async function live(options) {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui`);
  await page.getByRole("cell", { name: "g1" }).waitFor();
  return page;
}

async function played(options) {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui/#play?task=steps`);
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  await page.getByRole("button", { name: "Play", exact: true }).click();
  await page.getByText("4 of 4 have ended").waitFor();
  return page;
}

const keyed = (keys) => async (options) => {
  const page = await readerWith(browser, service.url, files, options);
  // Where there is room for one pane, a rollout has to be chosen.
  await page.keyboard.press("j");
  await page.keyboard.press("j");
  for (const key of keys) await page.keyboard.press(key);
  if (keys.includes("?")) await page.locator("dialog").waitFor();
  else await page.locator(keys.includes("g") ? ".columns" : ".tokens").first().waitFor();
  return page;
};
const empty = async (options) => {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui/#reader`);
  await page.getByText("Drop a file of rollouts").waitFor();
  return page;
};
let reported = null;
const recorded = (fragmentOf) => async (options) => {
  reported ??= await playReported(service.url);
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui/${fragmentOf(reported[0])}`);
  await page.locator("main > section:not([hidden]) table").first().waitFor();
  return page;
};
const VIEWS = {
  "live state": live,
  playground: played,
  "reader without a file": empty,
  "reader with log-probabilities": keyed(["c"]),
  "reader with weight versions and loss mask": keyed(["c", "c", "m"]),
  "reader with a group": keyed(["g", "c"]),
  "newest rollouts": recorded(() => "#rollouts"),
  "story of a rollout": recorded((rollout) => `#rollouts?rollout=${encodeURIComponent(rollout.rollout_id)}`),
  "mismatch ledger": recorded(() => "#mismatch"),
  shortcuts: keyed(["?"]),
};
const NARROW = { viewport: { width: 360, height: 740 } };

for (const [name, open] of Object.entries(VIEWS)) {
  for (const [kind, options] of Object.entries({ light: { colorScheme: "light" }, dark: { colorScheme: "dark" }, narrow: NARROW })) {
    test(`axe finds nothing to object to, and nothing is scrolled sideways: ${name}, ${kind}`, async () => {
      const page = await open({ ...options, bypassCSP: true });
      const widths = await page.evaluate(() => [document.documentElement.scrollWidth, ...[...document.querySelectorAll("main > section")].map((one) => one.scrollWidth)]);
      assert.ok(Math.max(...widths) <= (options.viewport?.width ?? 1280), String(widths));
      await page.evaluate(AXE);
      const { violations, passes } = await page.evaluate(() => globalThis.axe.run(document));
      const found = violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html, any }) => `${html.slice(0, 200)} ${any[0]?.message ?? ""}`).join("; ")}`);
      assert.deepEqual(found, []);
      assert.ok(passes.length > 10);
      page.check();
      await page.context().close();
    });
  }
}

test("where it is narrow, list and transcript take turns", async () => {
  const page = await readerWith(browser, service.url, files, NARROW);
  const seen = async () => [await page.locator(".list").isVisible(), await page.locator(".transcript").isVisible()];
  assert.deepEqual(await seen(), [true, false]);
  await page.locator("[role=option]").nth(1).click();
  await page.locator(".rollout").waitFor();
  assert.deepEqual(await seen(), [false, true]);
  await page.getByRole("button", { name: "All rollouts" }).click();
  assert.deepEqual(await seen(), [true, false]);
  assert.ok(!page.url().includes("rollout="));
});

const background = (page) => page.evaluate(() => getComputedStyle(document.body).backgroundColor + getComputedStyle(document.documentElement).backgroundColor);

test("the page is dark or light as the system says, and the switch wins and stays", async () => {
  const light = await background(await live({ colorScheme: "light" }));
  const page = await live({ colorScheme: "dark" });
  const dark = await background(page);
  assert.notEqual(light, dark);
  await page.getByRole("button", { name: "Theme: auto" }).click();
  assert.equal(await background(page), light);
  await page.reload();
  await page.getByRole("button", { name: "Theme: light" }).waitFor();
  assert.equal(await background(page), light);
  await page.keyboard.press("t");
  await page.getByRole("button", { name: "Theme: dark" }).waitFor();
  assert.equal(await background(page), dark);
  page.check();
});

test("the live state has replicas, versions, throughput, what is in flight, and the queue by priority", async () => {
  const page = await live();
  const rows = (name) => page.getByRole("table", { name }).locator("tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));
  assert.deepEqual((await rows("Generator replicas")).map(([id, version, , running, waiting, cache]) => [id, version, running, waiting, cache]), [
    ["g1", "7", "8", "1", "62%"],
    ["g2", "6", "3", "–", "31%"],
  ]);
  assert.deepEqual((await rows("Versions of the policy")).map(([version, kind, size]) => [version, kind, size]), [
    ["7", "delta", "1.8 MB"],
    ["6", "full", "1.8 MB"],
    ["0", "initial", "–"],
  ]);
  assert.deepEqual(await rows("Waiting generations by priority"), [["interactive", "1", ""], ["train", "4", ""]]);
  const tile = (label) => page.locator(".tile", { hasText: label }).locator(".tile-value").textContent();
  assert.deepEqual([await tile("in flight"), await tile("generations waiting"), await tile("in the engines")], ["16", "5", "11"]);
  // 20 rollouts and 8,000 tokens a second, as the counters of the scripted engines grow.
  await page.waitForFunction(() => Math.abs(Number(document.querySelector(".tile-value").textContent) - 20) < 2);
  assert.ok(Math.abs(Number((await tile("tokens/s")).replace(",", "")) - 8000) < 800);
  assert.match((await rows("Tasks"))[0].join(" "), /^math 1[567](\.\d)? [\d,]+ 0\.75 0%$/);
  page.check();
});

test("the focus stays on a link of the live state while its figures are renewed", async () => {
  const page = await live();
  const link = page.getByRole("link", { name: "steps" });
  await link.focus();
  await link.evaluate((element) => element.setAttribute("data-old", ""));
  await page.waitForFunction(() => !document.querySelector("[data-old]"));
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "steps");
});

test("the live state says what does not answer, and goes on with the rest", async () => {
  const page = await newPage(browser);
  await page.route("**/readyz", (route) => route.fulfill({ json: { status: "ready", degraded: [{ part: "environment", task_name: "math", replica_id: null, reason: "It died." }] } }));
  await page.route("**/metrics", (route) => route.fulfill({ status: 503, json: { title: "Not ready", detail: "None of 1 nodes answers with its metrics." } }));
  await page.goto(`${service.url}/ui`);
  await page.getByText("environment math: It died.").waitFor();
  await page.getByText("None of 1 nodes answers with its metrics.").waitFor();
  assert.equal(await page.getByRole("table", { name: "Generator replicas" }).locator("tbody tr").count(), 2);
});

test("the page asks nobody but its own service, and prints nothing under its strict policy", async () => {
  const page = await newPage(browser);
  const asked = new Set();
  page.on("request", (request) => asked.add(new URL(request.url()).origin));
  await page.goto(`${service.url}/ui`);
  for (const view of ["2", "3", "4", "5", "1"]) {
    await page.keyboard.press(view);
    await page.waitForTimeout(200);
  }
  assert.deepEqual([...asked], [service.url]);
  page.check();
});

test("the focus goes from the link that skips the bar through the views to the tools", async () => {
  const page = await live();
  const order = [];
  for (let step = 0; step < 8; step += 1) {
    await page.keyboard.press("Tab");
    order.push(await page.evaluate(() => document.activeElement.textContent));
  }
  assert.deepEqual(order, ["Skip to the content", "Live", "Playground", "Reader", "Rollouts", "Mismatch", "Theme: auto", "Shortcuts"]);
  await page.locator("#skip").focus();
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "main");
});
