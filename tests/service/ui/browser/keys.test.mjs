// A service that asks for keys: the page asks for one, and keeps it for its tab alone.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, newPage, serve } from "./page.mjs";

let service, browser;
before(async () => {
  [service, browser] = [await serve({ key: true }), await launch()];
});
after(async () => {
  await browser?.close();
  service?.stop();
});

async function asked(fragment = "") {
  const page = await newPage(browser);
  await page.goto(`${service.url}/ui/${fragment}`);
  await page.getByRole("dialog", { name: "Key of the service" }).waitFor();
  return page;
}

async function give(page, key) {
  await page.getByLabel("Key", { exact: true }).fill(key);
  await page.getByRole("button", { name: "Use the key" }).click();
}

test("the page asks once, shows the state with the key, and keeps it in the storage of the tab alone", async () => {
  const page = await asked();
  assert.equal(await page.getByRole("dialog").count(), 1);
  await give(page, service.key);
  await page.getByRole("cell", { name: "g1" }).waitFor();
  const stored = await page.evaluate(() => [JSON.stringify({ ...sessionStorage }), JSON.stringify({ ...localStorage }), document.cookie, location.href]);
  assert.equal(stored[0], JSON.stringify({ "rollout-key": service.key }));
  for (const other of stored.slice(1)) assert.ok(!other.includes(service.key));
  await page.reload();
  await page.getByRole("cell", { name: "g1" }).waitFor();
  const another = await page.context().newPage();
  await another.goto(`${service.url}/ui/`);
  await another.getByRole("dialog", { name: "Key of the service" }).waitFor();
});

test("a wrong key is asked for again, and cancelling says what is missing", async () => {
  const page = await asked();
  await give(page, "wrong");
  await page.getByText("The key is not valid any longer, or never was.").waitFor();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByText("the key is not valid (any longer); ask for one that is").first().waitFor();
});

test("a sample is played with the key", async () => {
  const page = await asked("#play?task=math");
  await give(page, service.key);
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  const [request] = await Promise.all([page.waitForRequest("**/rollout"), page.getByRole("button", { name: "Play", exact: true }).click()]);
  assert.equal(request.headers().authorization, `Bearer ${service.key}`);
  await page.getByText("4 of 4 have ended").waitFor();
});

test("a file is read without a key", async () => {
  const page = await newPage(browser);
  await page.goto(`${service.url}/ui/#reader`);
  await page.getByText("Drop a file of rollouts").waitFor();
  assert.equal(await page.getByRole("dialog").count(), 0);
});

test("the key is forgotten where that is asked for", async () => {
  const page = await asked();
  await give(page, service.key);
  await page.getByRole("cell", { name: "g1" }).waitFor();
  await page.evaluate(() => sessionStorage.setItem("rollout-key", "revoked"));
  await page.reload();
  await page.getByRole("dialog", { name: "Key of the service" }).waitFor();
  await page.getByRole("button", { name: "Forget it" }).click();
  await page.waitForFunction(() => sessionStorage.getItem("rollout-key") === null);
});
