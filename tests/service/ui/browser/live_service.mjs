// The page against a running service: node live_service.mjs URL. Ends with 1 and a sentence if something is not as it
// should be. Caller: tests/live/test_ui.py.

import assert from "node:assert/strict";
import { launch, newPage, waitForRollouts } from "./page.mjs";

const [url] = process.argv.slice(2);
const WAIT_MS = 60_000;
const browser = await launch();
try {
  const page = await newPage(browser);
  page.setDefaultTimeout(WAIT_MS);
  await page.goto(`${url}/ui`);
  await page.getByText("Ready", { exact: true }).waitFor();
  const replicas = page.getByRole("table", { name: "Generator replicas" }).locator("tbody tr");
  await replicas.first().waitFor();
  assert.equal(await replicas.locator("td").nth(1).textContent(), "0");
  const replica = await replicas.first().locator("td").first().textContent();

  await page.keyboard.press("2");
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  await page.getByLabel("Task", { exact: true }).first().selectOption("math");
  await page.getByRole("spinbutton", { name: "Max new tokens" }).fill("16");
  await page.getByRole("button", { name: "Play", exact: true }).click();
  await page.getByText("4 of 4 have ended").waitFor();
  assert.deepEqual(await page.locator(".arrival > summary .status").allTextContents(), Array(4).fill("completed"));

  await page.getByRole("button", { name: "All in the reader" }).click();
  await waitForRollouts(page, "4 rollouts");
  const [plain, asTokens] = [page.locator("#reader .message.generated .content"), page.locator("#reader .message.generated .t")];
  const content = await plain.textContent();
  await page.keyboard.press("c");
  await asTokens.first().waitFor();
  const texts = await page.locator("#reader .message.generated .t:not(.special)").allTextContents();
  assert.equal(texts.join(""), content);
  await page.keyboard.press("c");
  await page.locator(".legend li").first().waitFor();
  assert.deepEqual(await page.locator(".legend li").allTextContents(), ["0"]);

  // The story of the newest one: its generation was made at the replica that the live state names.
  await page.keyboard.press("4");
  await page.locator("#rollouts tbody .story-link").first().click();
  const told = page.getByRole("table", { name: "Timeline" }).locator("tbody tr");
  await told.first().waitFor();
  assert.deepEqual(await told.locator("td:nth-child(2)").allTextContents(), ["generation", "step"]);
  assert.equal(await told.first().locator("td").nth(6).textContent(), replica);
  assert.match(await told.first().locator("td").nth(4).textContent(), /^[\d.]+ m?s$/);

  // What was played reaches the metrics within the seconds that Ray's exporter takes.
  await page.keyboard.press("1");
  await page.waitForFunction(() => [...document.querySelectorAll("[aria-label=Tasks] tbody tr")].some((row) => row.cells[0].textContent === "math" && Number(row.cells[1].textContent) > 0));
  await page.getByRole("table", { name: "Waiting generations by priority" }).waitFor();
  page.check();
  process.stdout.write(`${await replicas.first().textContent()}\n`);
} finally {
  await browser.close();
}
