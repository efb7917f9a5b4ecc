// Takes the pictures of docs/ui.md: node pictures.mjs FOLDER. What they show are scripted parts, not a measurement.

import { join } from "node:path";
import { launch, newPage, playReported, readerWith, serve, writeFiles } from "./page.mjs";

const [folder] = process.argv.slice(2);
const SIZE = { viewport: { width: 1120, height: 700 }, reducedMotion: "reduce" };
// A picture of the state has its rates: the window has to be filled.
const RATES_AFTER_MS = 7000;

const service = await serve();
const browser = await launch();
const files = writeFiles(10_000);

async function take(page, name) {
  // Nothing is pointed at.
  await page.mouse.move(1119, 699);
  await page.waitForTimeout(300);
  await page.screenshot({ path: join(folder, `ui-${name}.png`) });
  page.check();
  await page.context().close();
}

async function live(options, name) {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui`);
  await page.waitForTimeout(RATES_AFTER_MS);
  await take(page, name);
}

async function playground(options, name) {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui/#play?task=steps`);
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  await page.getByRole("button", { name: "Play", exact: true }).click();
  await page.getByText("4 of 4 have ended").waitFor();
  await take(page, name);
}

async function recorded(fragment, options, name) {
  const page = await newPage(browser, options);
  await page.goto(`${service.url}/ui/${fragment}`);
  await page.locator("main > section:not([hidden]) table").first().waitFor();
  await take(page, name);
}

async function reader(keys, options, name, ready) {
  const page = await readerWith(browser, service.url, files, options);
  await page.setInputFiles("input[type=file]", files.path("many.jsonl"));
  await page.getByText("10,000 rollouts", { exact: true }).waitFor();
  for (const key of keys) await page.keyboard.press(key);
  await page.locator(ready).first().waitFor();
  await take(page, name);
}

try {
  await live({ ...SIZE, colorScheme: "light" }, "live");
  await playground({ ...SIZE, colorScheme: "light" }, "playground");
  await reader(["]", "c"], { ...SIZE, colorScheme: "light" }, "reader-light", ".t");
  await reader(["]", "j", "c", "m"], { ...SIZE, colorScheme: "dark" }, "reader-dark", ".mask-bar");
  const [reported] = await playReported(service.url);
  await recorded(`#rollouts?rollout=${encodeURIComponent(reported.rollout_id)}`, { ...SIZE, colorScheme: "light", viewport: { width: 1120, height: 1140 } }, "story");
  await reader(["]", "c", "c", "g"], { ...SIZE, colorScheme: "dark" }, "group", ".columns");
} finally {
  await browser.close();
  service.stop();
  files.remove();
}
