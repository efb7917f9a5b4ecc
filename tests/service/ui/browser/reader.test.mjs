// The reader: files that are dropped, filters, colours, groups, keys, links.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { drop, launch, newPage, readerWith, selected, serve, total, waitForRollouts, writeFiles } from "./page.mjs";

let service, browser, files;
before(async () => {
  [service, browser, files] = [await serve(), await launch(), writeFiles()];
});
after(async () => {
  await browser?.close();
  service?.stop();
  files?.remove();
});
const reader = (options) => readerWith(browser, service.url, files, options);
const names = (page) => page.locator("[role=option]:visible .row-name").allTextContents();
const choose = (page, label, value) => page.getByRole("search").getByLabel(label, { exact: true }).selectOption(value);
const type = (page, label, text) => page.getByRole("search").getByLabel(label, { exact: true }).fill(text);

test("a dropped file of JSON lines is listed, and its first rollout shown with messages, reward and status", async () => {
  const page = await reader();
  assert.equal((await names(page)).length, 12);
  assert.equal(await page.locator(".rollout-head h2").textContent(), "sample-0 · generation 0");
  assert.deepEqual(await page.locator(".message h3").allTextContents(), ["user", "assistant", "user"]);
  assert.equal(await page.locator(".outcome").textContent(), "completed1");
  assert.equal(await page.locator(".message.generated .content").textContent(), "Zwölf and 30 are \\boxed{42}");
  page.check();
});

for (const name of ["few.parquet", "run.jsonl"]) {
  test(`${name} shows the same rollouts as few.jsonl`, async () => {
    const page = await reader();
    const shown = [];
    for (const file of ["few.jsonl", name]) {
      await drop(page, file, files.read(file));
      await page.waitForFunction((wanted) => document.querySelector(".source-name h2").textContent === wanted, file);
      await waitForRollouts(page, "12 rollouts");
      await page.waitForSelector(".rollout");
      await page.keyboard.press("]");
      await page.waitForFunction(() => document.querySelector(".rollout-head h2")?.textContent.startsWith("sample-1"));
      shown.push([await names(page), await page.locator(".messages").textContent(), await page.locator(".turns").textContent()]);
    }
    assert.deepEqual(shown[0], shown[1]);
    assert.equal(shown[0][2], "0.250.251");
    page.check();
  });
}

const NAMES = ["a", "b", "c/../../policy"].map((digits) => `sha256:${digits.padEnd(64, "0")}`);
const PNG = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC", "base64");

test("images of a message are fetched once by their names, and shown with their tokens before its text", async () => {
  const page = await newPage(browser);
  const asked = [];
  await page.route(/blobs/, (route) => {
    asked.push(new URL(route.request().url()).pathname);
    const known = route.request().url().endsWith(NAMES[0]);
    return known
      ? route.fulfill({ contentType: "image/png", body: PNG })
      : route.fulfill({ status: 404, contentType: "application/problem+json", body: '{"title": "no such image"}' });
  });
  await page.goto(`${service.url}/ui/#reader`);
  const [first, second] = files.read("few.jsonl").toString().split("\n").map((line) => line && JSON.parse(line));
  for (const { message_log: log } of [first, second]) log[0].mm_ranges = NAMES.map((media, at) => ({ media, start: at, end: at + 1 }));
  await drop(page, "seen.jsonl", Buffer.from([first, second].map((one) => JSON.stringify(one)).join("\n")));
  await waitForRollouts(page, "2 rollouts");
  const shown = page.locator(".message").first().locator(".picture");
  await page.waitForFunction(() => document.querySelector(".picture img")?.naturalWidth === 1 && document.body.textContent.includes("not shown"));
  assert.deepEqual(await shown.locator("figcaption").allTextContents(), ["image sha256:a0000000… · tokens 1–1", "image sha256:b0000000… · tokens 2–2 · not shown: no such image"]);
  assert.equal(await page.locator(".message").first().evaluate((message) => [...message.children].map((one) => one.className).join()), "message-head,picture,picture,content");
  await page.keyboard.press("j");
  await page.waitForFunction(() => document.querySelector(".rollout-head h2").textContent.endsWith("generation 1") && document.querySelector(".picture img"));
  assert.deepEqual(asked.filter((path) => path.endsWith(NAMES[0])), [`/blobs/${NAMES[0]}`]);
  assert.deepEqual(asked.filter((path) => path.includes("policy")), []);
});

test("a file that is none of rollouts is refused with a sentence, and wrong lines of one are counted", async () => {
  const page = await reader();
  await drop(page, "bad.parquet", Buffer.from("no parquet"));
  await page.waitForFunction(() => document.querySelector(".reader > .side > .warn").textContent.startsWith("bad.parquet cannot be read: it is no Parquet file"));
  const torn = Buffer.concat([files.read("few.jsonl").subarray(0, -400), Buffer.from('\n{"id": 1}\n')]);
  await drop(page, "torn.jsonl", torn);
  await waitForRollouts(page, "11 rollouts");
  assert.match(await page.locator(".side > .warn").textContent(), /^2 lines left out: line 12 is no JSON/);
  page.check();
});

test("filters by task, status, reward and text narrow the list, and are cleared together", async () => {
  const page = await reader();
  await choose(page, "Task", "steps");
  await waitForRollouts(page, "4 of 12 rollouts");
  await choose(page, "Task", "");
  await choose(page, "Status", "error");
  await waitForRollouts(page, "1 of 12 rollouts");
  assert.deepEqual(await names(page), ["sample-2 · g3"]);
  await choose(page, "Status", "");
  await type(page, "Reward from", "0.1");
  await type(page, "to", "1");
  await waitForRollouts(page, "6 of 12 rollouts");
  await type(page, "Text", "ZWÖLF");
  await waitForRollouts(page, "4 of 12 rollouts");
  await page.getByRole("button", { name: "Clear" }).click();
  await waitForRollouts(page, "12 rollouts");
  page.check();
});

test("the order is by reward where that is chosen, with failed rollouts last", async () => {
  const page = await reader();
  await choose(page, "Order", "lowest");
  await page.waitForFunction(() => location.hash.includes("order=lowest"));
  const rewards = await page.locator("[role=option]:visible").evaluateAll((all) =>
    all.sort((a, b) => a.dataset.at - b.dataset.at).map((one) => one.querySelector(".row-reward").textContent),
  );
  assert.deepEqual(rewards, [...rewards.slice(0, -1)].sort((a, b) => a - b).concat("–"));
});

test("the histogram says the rewards of what is listed, and a click on a bar filters by its range", async () => {
  const page = await reader();
  const drawing = page.locator(".histogram svg");
  assert.match(await drawing.getAttribute("aria-label"), /^Rewards of 11 rollouts: mean 0\.\d+, from 0 to 1\.5$/);
  await page.locator(".histogram .bin").last().click();
  await page.waitForFunction(() => location.hash.includes("min=1.5") && location.hash.includes("max=1.5"));
  assert.match(await total(page).textContent(), /^\d of 12 rollouts$/);
});

test("tokens are coloured by log-probability, with their texts also where a character has several tokens", async () => {
  const page = await reader();
  await page.getByLabel("Colour by").selectOption("logprob");
  const tokens = page.locator(".message.generated .t");
  const [lines] = [files.read("few.jsonl").toString().split("\n")];
  const message = JSON.parse(lines[0]).message_log[1];
  await tokens.first().waitFor();
  assert.equal(await tokens.count(), message.token_ids.length);
  const texts = await tokens.allTextContents();
  assert.equal(texts.slice(0, -1).join(""), message.content);
  assert.equal(texts.at(-1), "<|end|>");
  const bounds = [0.9, 0.6, 0.3, 0.1, 0.01, 0];
  const steps = message.generation_logprobs.map((logprob) => `p${bounds.findIndex((bound) => Math.exp(logprob) >= bound)}`);
  assert.deepEqual(await tokens.evaluateAll((all) => all.map((one) => /\bp\d\b/.exec(one.className)[0])), steps);
  page.check();
});

test("tokens are coloured by weight version, and the legend names the versions", async () => {
  const page = await reader();
  await page.getByLabel("Colour by").selectOption("version");
  await page.locator(".legend li").first().waitFor();
  assert.deepEqual(await page.locator(".legend li").allTextContents(), ["6", "7"]);
  const classes = await page.locator(".message.generated .t").evaluateAll((all) => all.map((one) => /\bv\d\b/.exec(one.className)[0]));
  const middle = Math.floor(classes.length / 2);
  assert.deepEqual(classes, [...Array(middle).fill("v0"), ...Array(classes.length - middle).fill("v1")]);
});

test("the loss mask shows all tokens: those that the policy made are trained, and only those", async () => {
  const page = await reader();
  await page.getByRole("button", { name: "Loss mask" }).click();
  await page.locator(".t.trained").first().waitFor();
  const of = async (selector) => [await page.locator(`${selector} .t.trained`).count(), await page.locator(`${selector} .t.masked`).count()];
  const log = JSON.parse(files.read("few.jsonl").toString().split("\n")[0]).message_log;
  assert.deepEqual(await of(".message.generated"), [log[1].token_ids.length, 0]);
  assert.deepEqual(await of(".message.given"), [0, log[0].token_ids.length + log[2].token_ids.length]);
  const trained = log[1].token_ids.length;
  const all = log.reduce((sum, message) => sum + message.token_ids.length, 0);
  await page.getByRole("img", { name: `Loss mask: ${trained} of ${all} tokens are in the loss` }).waitFor();
  assert.equal(await page.locator(".message.given").first().locator(".tokens").textContent(), "<|user|>↵What is 0 + 30?<|end|>↵");
});

test("tokens of another model are shown by their ids, until its tokenizer.json is dropped", async () => {
  const page = await reader();
  await page.route("**/info/vocabulary", (route) => route.fulfill({ json: { tokens: Array(262).fill("x") } }));
  await page.getByLabel("Colour by").selectOption("logprob");
  await page.locator(".tokens.ids .t").first().waitFor();
  assert.equal(await page.locator(".message.generated .t").first().textContent(), String("Z".charCodeAt(0)));
  assert.equal(await page.locator(".message.generated .content").textContent(), "Zwölf and 30 are \\boxed{42}");
  const names = {};
  for (let byte = 0; byte < 128; byte += 1) names[byte === 32 ? "Ġ" : byte === 10 ? "Ċ" : String.fromCharCode(byte)] = byte;
  Object.assign(names, { Ã: 195, "¶": 182 });
  const tokenizer = { model: { vocab: names }, added_tokens: [{ id: 261, content: "<stop>" }] };
  await drop(page, "tokenizer.json", Buffer.from(JSON.stringify(tokenizer)));
  await page.locator(".tokens:not(.ids) .t").first().waitFor();
  assert.equal(await page.locator(".message.generated .t").last().textContent(), "<stop>");
});

test("a group stands side by side, with the prompt that it shares once", async () => {
  const page = await reader();
  await page.keyboard.press("g");
  await page.locator(".columns .rollout").first().waitFor();
  assert.deepEqual(await page.locator(".columns h3:first-child").filter({ hasText: "generation" }).allTextContents(), [0, 1, 2, 3].map((at) => `generation ${at}`));
  assert.equal(await page.getByText("What is 0 + 30?").count(), 1);
  assert.equal(await page.locator(".columns [aria-current]").count(), 1);
});

test("the keys go through rollouts, groups and tokens, and do nothing while somebody writes", async () => {
  const page = await reader();
  const press = async (key) => {
    await page.keyboard.press(key);
    return selected(page);
  };
  assert.equal(await press("j"), "sample-0 · g1");
  assert.equal(await press("k"), "sample-0 · g0");
  assert.equal(await press("]"), "sample-1 · g0");
  assert.equal(await press("]"), "sample-2 · g0");
  assert.equal(await press("j"), "sample-2 · g1");
  assert.equal(await press("["), "sample-1 · g0");
  await page.keyboard.press("c");
  await page.locator(".message.generated .t").first().waitFor();
  await page.keyboard.press("l");
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator(".inspector").textContent(), /^token 2 of \d+ · ".+" · id \d+ · log-probability -\d\.\d{4} \(\d+\.\d%\) · weight version 7 · in the loss$/);
  await page.keyboard.press("/");
  await page.keyboard.type("jjk");
  assert.equal(await page.getByLabel("Text").inputValue(), "jjk");
  await waitForRollouts(page, "0 of 12 rollouts");
  page.check();
});

test("the list is walked with the arrow keys when it has the focus, and names the selected option", async () => {
  const page = await reader();
  await page.getByRole("listbox", { name: "Rollouts" }).focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("End");
  assert.equal(await selected(page), "sample-2 · g3");
  const active = await page.getByRole("listbox").getAttribute("aria-activedescendant");
  const option = page.locator(`#${active}`);
  assert.equal(await option.getAttribute("aria-posinset"), "12");
  assert.equal(await option.getAttribute("aria-setsize"), "12");
  assert.match((await option.textContent()).replaceAll(/\s+/g, " "), /^sample-2 · g3errorreward–environment: .*1 turn, 11 tok$/);
});

test("shortcuts of one letter can be turned off", async () => {
  const page = await reader();
  await page.keyboard.press("?");
  await page.getByRole("checkbox", { name: "Shortcuts of one letter are on" }).uncheck();
  await page.getByRole("button", { name: "Close" }).click();
  await page.keyboard.press("j");
  assert.equal(await selected(page), "sample-0 · g0");
});

test("a link opens the same view: it asks for the file, and shows the rollout with its filters and colours", async () => {
  const page = await reader();
  await choose(page, "Task", "steps");
  await type(page, "Reward from", "1");
  await page.waitForFunction(() => location.hash.includes("min=1"));
  await page.getByRole("listbox").focus();
  for (const key of ["j", "c", "m"]) await page.keyboard.press(key);
  await page.locator(".mask-bar").waitFor();
  const link = page.url();
  const view = (one) => Promise.all([names(one), selected(one), one.locator(".transcript").innerHTML(), total(one).textContent()]);
  const shown = await view(page);

  const other = await newPage(browser);
  await other.goto(link);
  await other.getByText("This link is of the file few.jsonl.").waitFor();
  await drop(other, "few.jsonl", files.read("few.jsonl"));
  await other.locator(".mask-bar").waitFor();
  assert.deepEqual(await view(other), shown);
  assert.equal(other.url(), link);
  other.check();
});

test("the view stays when another one is looked at meanwhile, and the address is that of the view", async () => {
  const page = await reader();
  await choose(page, "Task", "steps");
  await waitForRollouts(page, "4 of 12 rollouts");
  await page.getByRole("listbox").focus();
  await page.keyboard.press("j");
  const link = page.url();
  await page.getByRole("link", { name: "Playground" }).click();
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  await page.getByRole("button", { name: "Play", exact: true }).click();
  await page.getByText("4 of 4 have ended").waitFor();
  assert.match(page.url(), /#play/);
  await page.getByRole("link", { name: "Reader" }).click();
  await waitForRollouts(page, "4 of 12 rollouts");
  assert.equal(page.url(), link);
  await page.getByRole("button", { name: "Played here (4)" }).click();
  await waitForRollouts(page, "4 rollouts");
  page.check();
});

test("a file that is dropped on another view opens the reader", async () => {
  const page = await newPage(browser);
  await page.goto(`${service.url}/ui/#live`);
  await page.getByRole("cell", { name: "g1" }).waitFor();
  await drop(page, "few.jsonl", files.read("few.jsonl"));
  await waitForRollouts(page, "12 rollouts");
  assert.equal(await page.locator(".rollout-head h2").textContent(), "sample-0 · generation 0");
  page.check();
});

test("text of a model is text: markup in it is shown and never run", async () => {
  const page = await reader();
  const rollout = JSON.parse(files.read("few.jsonl").toString().split("\n")[0]);
  const attack = '<img src=x onerror="document.title=1"><script>document.title=2</script>';
  rollout.message_log[1].content = rollout.id = rollout.task_name = attack;
  await drop(page, "attack.jsonl", Buffer.from(JSON.stringify(rollout)));
  await waitForRollouts(page, "1 rollout");
  await page.locator(".message.generated .content").waitFor();
  assert.equal(await page.locator(".message.generated .content").textContent(), attack);
  assert.equal(await page.title(), "Reader · Rollouts");
  page.check();
});
