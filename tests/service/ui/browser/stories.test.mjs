// Stories of rollouts, and the mismatch ledger.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, newPage, playReported, scriptedLedger, serve, waitForRollouts } from "./page.mjs";

let service, browser, rollouts;
before(async () => {
  [service, browser] = [await serve(), await launch()];
});
after(async () => {
  await browser?.close();
  service?.stop();
});

async function opened(fragment) {
  const page = await newPage(browser);
  await page.goto(`${service.url}/ui/${fragment}`);
  return page;
}

async function story(number = 0) {
  const page = await opened(`#rollouts?rollout=${encodeURIComponent(rollouts[number].rollout_id)}`);
  await page.locator("#rollouts .t").first().waitFor();
  return page;
}

const rows = (page, name) => page.getByRole("table", { name }).locator("tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));

test("before anything was played or reported both views say so", async () => {
  const page = await opened("#rollouts");
  await page.getByText("No rollout of this key has ended").waitFor();
  await page.keyboard.press("5");
  await page.getByText("No trainer has reported log-probabilities yet.").waitFor();
  page.check();
  rollouts = await playReported(service.url);
});

test("the newest rollouts are listed with their rewards and ratios, and a click tells the story of one", async () => {
  const page = await opened("#rollouts");
  const listed = await (await page.waitForSelector("#rollouts tbody"), rows(page, "Rollouts that ended last"));
  assert.equal(listed.length, 2);
  const ratios = Object.fromEntries(listed.map(([id, task, status, , mean]) => [id, [task, status, mean !== "–"]]));
  assert.deepEqual(ratios, { [rollouts[0].rollout_id]: ["steps", "completed", true], [rollouts[1].rollout_id]: ["steps", "completed", false] });
  await page.getByRole("link", { name: rollouts[0].rollout_id }).click();
  await page.getByRole("heading", { name: rollouts[0].rollout_id }).waitFor();
  assert.ok(page.url().includes(`rollout=${encodeURIComponent(rollouts[0].rollout_id)}`));
  assert.equal(await page.title(), "Stories · Rollouts");
  await page.keyboard.press("Escape");
  await page.getByRole("table", { name: "Rollouts that ended last" }).waitFor();
  page.check();
});

test("a story has its turns in order with times, and replicas", async () => {
  const page = await story();
  const told = await rows(page, "Timeline");
  const generated = rollouts[0].message_log.filter((message) => message.generation_logprobs);
  assert.deepEqual(told.map(([turn, kind]) => [turn, kind]), [1, 2, 3].flatMap((turn) => [[String(turn), "generation"], [String(turn), "step"]]));
  const made = told.filter(([, kind]) => kind === "generation");
  assert.deepEqual(made.map((row) => [row[5], row[6], row[8], row[9], row[10]]), [
    [String(generated[0].token_ids.length), "g1", "4", "6, 7", ""],
    [String(generated[1].token_ids.length), "g2", "4", "6, 7", ""],
    [String(generated[2].token_ids.length), "g2", "4", "6, 7", ""],
  ]);
  for (const row of made) assert.match(`${row[3]} ${row[4]}`, /^[\d.]+ ms [\d.]+ m?s$/);
  const tile = (label) => page.locator("#rollouts .tile", { hasText: label }).locator(".tile-value").textContent();
  assert.equal(await tile("status"), "completed");
  assert.match(await tile("took"), /^[\d.]+ m?s$/);
  // The bars are where the times are: each begins where the one before has ended, or later.
  const edges = await page.locator("#rollouts tbody .time-room").evaluateAll((all) => all.map((room) => room.lastElementChild.getBoundingClientRect()).map(({ left, right }) => [left, right]));
  assert.equal(edges.length, 6);
  edges.forEach(([left], at) => assert.ok(!at || left >= edges[at - 1][1] - 2, JSON.stringify(edges)));
  page.check();
});

test("its tokens are coloured by the ratio to the trainer's, and each says both numbers and its replica", async () => {
  const page = await story();
  await page.getByText("Mean ratio").waitFor();
  const classes = await page.locator("#rollouts .message.generated .t").evaluateAll((all) => all.map((one) => one.className.match(/p\d/)[0]));
  assert.deepEqual([classes[0], [...new Set(classes.slice(1))]], ["p5", ["p0"]]);
  await page.keyboard.press("l");
  assert.match(await page.locator("#rollouts .inspector").textContent(), /weight version 6 · replica g1 · the trainer's -?\d+\.\d{4} · ratio 12 · in the loss/);
  await page.keyboard.press("c");
  assert.equal(await page.getByLabel("Colour by").last().inputValue(), "none");
  page.check();
});

test("a story without a report is coloured by log-probability, and says how to report", async () => {
  const page = await story(1);
  await page.getByText("No trainer has reported its log-probabilities of this rollout").waitFor();
  assert.equal(await page.locator("#rollouts select").inputValue(), "logprob");
  assert.ok(!(await page.locator("#rollouts select option").allTextContents()).includes("trainer's ratio"));
});

test("where a fork began and retries are shown where a record has them", async () => {
  const page = await newPage(browser);
  await page.route("**/rollouts/*", async (route) => {
    const record = await (await route.fetch()).json();
    record.retries = [{ at: record.steps[0].began_at, kind: "generation", message: "The generator replica died." }];
    Object.assign(record.rollout, { parent: "parent-1", forked_at: { turn: 0, token: 12 } });
    await route.fulfill({ json: record });
  });
  await page.goto(`${service.url}/ui/#rollouts?rollout=${encodeURIComponent(rollouts[0].rollout_id)}`);
  await page.getByText("Forked from").waitFor();
  const told = await rows(page, "Timeline");
  assert.deepEqual(told.slice(1, 4).map((row) => [row[1], row[10]]), [
    ["step", ""],
    ["retry", "generation: The generator replica died."],
    ["generation", ""],
  ]);
  assert.equal(await page.getByRole("link", { name: "parent-1" }).getAttribute("href"), "#rollouts?rollout=parent-1");
});

test("a story opens in the reader, with its tokens", async () => {
  const page = await story();
  await page.getByRole("button", { name: "Open in the reader" }).click();
  await waitForRollouts(page, "1 rollout");
  assert.equal(await page.locator("#reader .message.generated").count(), 3);
});

test("a rollout that is not kept is a sentence, and another one can be asked for by its id", async () => {
  const page = await opened("#rollouts?rollout=nobody");
  await page.getByText("there is no record of it").waitFor();
  await page.getByLabel("Rollout id").fill(rollouts[1].rollout_id);
  await page.getByRole("button", { name: "Show", exact: true }).click();
  await page.getByRole("heading", { name: rollouts[1].rollout_id }).waitFor();
});

test("the ledger has means by replica and by version, and leads to the rollouts that part the most", async () => {
  const page = await opened("#mismatch");
  await page.getByRole("table", { name: "Mismatch by replica" }).waitFor();
  assert.equal((await rows(page, "Mismatch by replica"))[0][0], "g1");
  // The trainer says that it has version 7: tokens of 6 are counted.
  assert.deepEqual((await rows(page, "Mismatch by version")).map(([version]) => version), ["6", "7"]);
  await page.getByRole("table", { name: "Rollouts that part the most" }).getByRole("link").first().click();
  await page.getByRole("heading", { name: rollouts[0].rollout_id }).waitFor();
  page.check();
});

test("causes are told with the time since they were found last", async () => {
  const page = await newPage(browser);
  await page.route("**/mismatch", (route) => route.fulfill({ json: scriptedLedger() }));
  await page.goto(`${service.url}/ui/#mismatch`);
  await page.getByText(/It was taken out of service\. 4\d s ago/).waitFor();
  page.check();
});

test("a service without records says in both views what to configure", async () => {
  const page = await newPage(browser);
  const refused = { status: 501, json: { title: "The service keeps no records of rollouts", detail: "rollout_records: add it.", status: 501 } };
  await page.route("**/rollouts?count=*", (route) => route.fulfill(refused));
  await page.route("**/mismatch", (route) => route.fulfill(refused));
  for (const view of ["rollouts", "mismatch"]) {
    await page.goto(`${service.url}/ui/#${view}`);
    await page.locator(`#${view}`).getByText("rollout_records: {}").waitFor();
  }
});
