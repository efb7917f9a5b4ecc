// The playground: a sample that is edited, checked and played, and what arrives.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, newPage, serve, waitForRollouts } from "./page.mjs";

let service, browser;
before(async () => {
  [service, browser] = [await serve(), await launch()];
});
after(async () => {
  await browser?.close();
  service?.stop();
});

async function playground(fragment = "#play?task=math") {
  const page = await newPage(browser);
  await page.goto(`${service.url}/ui/${fragment}`);
  await page.waitForFunction(() => document.querySelector(".editor textarea")?.value);
  return page;
}
const editor = (page) => page.getByRole("textbox", { name: "Sample" });
const playButton = (page) => page.getByRole("button", { name: "Play", exact: true });
const arrived = (page, count) => page.waitForFunction((wanted) => document.querySelectorAll(".arrival").length === wanted, count);

test("an example is played as it is: its rollouts arrive with their turns, and are in the reader", async () => {
  const page = await playground("#play?task=steps");
  await page.getByRole("spinbutton", { name: "Rollouts" }).fill("3");
  await playButton(page).click();
  await arrived(page, 3);
  await page.getByText("3 of 3 have ended").waitFor();
  assert.match(await page.locator(".results > .small").textContent(), /^mean reward .* · 9 turns · .* tokens\/s · .* s · weights 6 to 7$/);
  const first = page.locator(".arrival").first();
  assert.deepEqual(await first.locator(".message h3").allTextContents(), ["user", ...Array(3).fill(["assistant", "user"]).flat()]);
  await page.getByRole("button", { name: "All in the reader" }).click();
  await waitForRollouts(page, "3 rollouts");
  assert.match(page.url(), /#reader\?source=played/);
  page.check();
});

test("the edited sample and the options are what is sent", async () => {
  const page = await playground();
  const sample = JSON.parse(await editor(page).inputValue());
  sample.messages[0].content = "What is 1 + 41?";
  await editor(page).fill(JSON.stringify(sample));
  await page.getByRole("spinbutton", { name: "Rollouts" }).fill("2");
  await page.getByLabel("Temperature").fill("0.5");
  await page.getByLabel("Max new tokens").fill("");
  await page.getByText("More options").click();
  await page.getByLabel("Stop strings").fill('["\\n"]');
  await page.getByLabel("Seed").fill("7");
  const [request] = await Promise.all([page.waitForRequest("**/rollout"), playButton(page).click()]);
  assert.deepEqual(request.postDataJSON(), {
    samples: [sample],
    sampling: { temperature: 0.5, seed: 7, stop_strings: ["\n"] },
    priority: "interactive",
    num_generations: 2,
  });
  assert.equal(request.headers().accept, "application/x-ndjson");
  await arrived(page, 2);
  page.check();
});

for (const [text, problem] of [
  ['{\n  "task_name": math\n}', /^This is no JSON: line 2, column 16: a value is expected\.$/],
  ['{"task_name": "chess"}', /^task_name: the service has no task "chess"\.$/],
  ['{"task_name": "math", "messages": []}', /^messages: a list with at least one message\.$/],
  ['{"task_name": "math", "messages": [{"role": "me", "content": "a"}]}', /^messages\[0\]\.role: one of system, user/],
  ['{"task_name": "math", "messages": [{"role": "user", "content": "a"}], "extra_env_info": {}}', /^extra_env_info\.ground_truth: the task needs it\.$/],
  ['{"task_name": "math", "messages": [{"role": "user", "content": "a"}], "extra_env_info": {"ground_truth": 4}}', /^extra_env_info\.ground_truth: a value of the type string\.$/],
]) {
  test(`a sample that is wrong is not sent, and its place is named: ${problem.source}`, async () => {
    const page = await playground();
    await editor(page).fill(text);
    assert.match(await page.locator("#sample-problem").textContent(), problem);
    assert.equal(await editor(page).getAttribute("aria-invalid"), "true");
    assert.ok(await playButton(page).isDisabled());
  });
}

test("what only the service can refuse is shown beside the sample", async () => {
  const page = await playground();
  const sample = { ...JSON.parse(await editor(page).inputValue()), seed: -1 };
  await editor(page).fill(JSON.stringify(sample));
  await playButton(page).click();
  await page.waitForFunction(() => document.getElementById("sample-problem").textContent.startsWith("seed: "));
  assert.ok(await playButton(page).isEnabled());
});

test("a failed rollout arrives as one, with its reason and without a reward", async () => {
  const page = await playground("#play?task=shaky");
  await page.getByText("More options").click();
  await page.getByRole("spinbutton", { name: "Rollouts" }).fill("1");
  await page.route("**/rollout", async (route) => route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), retries: 0 }) }));
  await playButton(page).click();
  await arrived(page, 1);
  assert.equal(await page.locator(".arrival .status").first().textContent(), "error");
  assert.equal(await page.locator(".arrival > summary .row-reward").textContent(), "–");
  assert.match(await page.locator(".failure").textContent(), /^environment The process of the environment has ended/);
});

test("rollouts arrive one by one, and can be cancelled", async () => {
  const page = await playground("#play?task=steps");
  await page.getByRole("spinbutton", { name: "Rollouts" }).fill("400");
  await playButton(page).click();
  await page.locator(".arrival").first().waitFor();
  const early = await page.locator(".arrival").count();
  assert.ok(early < 400, `${early} arrived at once`);
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByText(/^Cancelled after \d+ rollouts?$/).waitFor();
  assert.ok(await playButton(page).isEnabled());
});

test("played rollouts are saved as a file that the reader opens again", async () => {
  const page = await playground();
  await playButton(page).click();
  await page.getByText("4 of 4 have ended").waitFor();
  await page.getByRole("button", { name: "All in the reader" }).click();
  await waitForRollouts(page, "4 rollouts");
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Save" }).click()]);
  assert.equal(download.suggestedFilename(), "played.jsonl");
  const other = await newPage(browser);
  await other.goto(`${service.url}/ui/#reader`);
  await other.setInputFiles("input[type=file]", await download.path());
  await waitForRollouts(other, "4 rollouts");
  other.check();
});
