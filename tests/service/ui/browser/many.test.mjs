// 10,000 rollouts: measured in the browser. The machine is shared, so the figures are printed beside the bounds.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { launch, newPage, serve, writeFiles } from "./page.mjs";

const PAINTED_WITHIN_MS = 2000;
const FRAMES_PER_S = 50;
const SCROLLED_MS = 4000;
const ATTEMPTS = 4;
let service, browser, files, page;
before(async () => {
  [service, browser, files] = [await serve(), await launch(), writeFiles(10_000)];
  page = await newPage(browser);
});
after(async () => {
  await browser?.close();
  service?.stop();
  files?.remove();
});

test("the page is painted within two seconds, and so are the first of 10,000 rollouts after their file is given", async (context) => {
  await page.goto(`${service.url}/ui/#reader`);
  await page.waitForSelector(".reader");
  const painted = await page.evaluate(
    () =>
      new Promise((found) => {
        new PerformanceObserver((list) => {
          const entry = list.getEntriesByName("first-contentful-paint")[0];
          if (entry) found(entry.startTime);
        }).observe({ type: "paint", buffered: true });
      }),
  );
  await page.evaluate(() => {
    globalThis.longTasks = [];
    new PerformanceObserver((list) => globalThis.longTasks.push(...list.getEntries().map(({ duration }) => duration))).observe({ type: "longtask" });
    globalThis.shownAfter = new Promise((found) => {
      const input = document.querySelector("input[type=file]");
      input.addEventListener("change", () => {
        const began = performance.now();
        const look = () => {
          if (document.querySelector(".option .row-name")?.textContent && document.querySelector(".rollout")) found(performance.now() - began);
          else requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
      });
    });
  });
  const began = performance.now();
  await page.setInputFiles("input[type=file]", files.path("many.jsonl"));
  const shown = await page.evaluate(() => globalThis.shownAfter);
  await page.waitForFunction(() => document.querySelector(".source-name p").textContent === "10,000 rollouts");
  const read = performance.now() - began;
  const longest = Math.max(0, ...(await page.evaluate(() => globalThis.longTasks)));
  context.diagnostic(`first paint ${painted.toFixed(0)} ms; first rollouts ${shown.toFixed(0)} ms; all of them read ${read.toFixed(0)} ms; longest task ${longest.toFixed(0)} ms`);
  assert.ok(painted < PAINTED_WITHIN_MS, `first paint after ${painted} ms`);
  assert.ok(shown < PAINTED_WITHIN_MS, `first rollouts after ${shown} ms`);
});

/** Frames a second while the list is scrolled from its first row to its last, or left where it is. */
function framesWhile(moves) {
  return page.evaluate(
    ([milliseconds, scrolls]) =>
      new Promise((found) => {
        const list = document.querySelector(".list");
        const rows = list.scrollHeight - list.clientHeight;
        const began = performance.now();
        let frames = 0;
        let longest = 0;
        let last = began;
        const frame = (now) => {
          frames += 1;
          longest = Math.max(longest, now - last);
          last = now;
          const share = Math.min(1, (now - began) / milliseconds);
          if (scrolls) list.scrollTop = share * rows;
          if (share < 1) requestAnimationFrame(frame);
          else found({ rate: frames / ((now - began) / 1000), longest });
        };
        requestAnimationFrame(frame);
      }),
    [SCROLLED_MS, moves],
  );
}

// Other programs of the machine can only take frames away: the best of a few attempts is the page's own.
test("the list is scrolled through 10,000 rollouts at 50 frames a second and more, with a few elements", async (context) => {
  let best = 0;
  for (let attempt = 0; attempt < ATTEMPTS && best < FRAMES_PER_S; attempt += 1) {
    const idle = await framesWhile(false);
    const scrolled = await framesWhile(true);
    context.diagnostic(`${scrolled.rate.toFixed(1)} frames/s, longest gap ${scrolled.longest.toFixed(0)} ms; without scrolling ${idle.rate.toFixed(1)}`);
    best = Math.max(best, scrolled.rate);
  }
  assert.ok(best >= FRAMES_PER_S, `${best} frames/s`);
  const elements = await page.locator(".option").count();
  assert.ok(elements < 60, `${elements} rows are elements`);
  await page.waitForFunction(() => [...document.querySelectorAll(".option")].some((one) => one.dataset.at === "9999"));
});

test("a turn of the wheel and a filter are answered at once", async (context) => {
  const box = await page.locator(".list").boundingBox();
  await page.mouse.move(box.x + 50, box.y + 50);
  const frames = page.evaluate(
    () =>
      new Promise((found) => {
        const times = [];
        const frame = (now) => {
          times.push(now);
          if (now - times[0] < 2000) requestAnimationFrame(frame);
          else found((times.length - 1) / ((now - times[0]) / 1000));
        };
        requestAnimationFrame(frame);
      }),
  );
  for (let turn = 0; turn < 40; turn += 1) {
    await page.mouse.wheel(0, -900);
    await page.waitForTimeout(40);
  }
  const began = performance.now();
  await page.getByRole("search").getByLabel("Text").fill("boxed{41}");
  await page.waitForFunction(() => document.querySelector(".source-name p").textContent.includes(" of 10,000"));
  const filtered = performance.now() - began;
  context.diagnostic(`${(await frames).toFixed(1)} frames/s by the wheel; the text filter took ${filtered.toFixed(0)} ms, 200 of them waiting for the next key`);
  assert.ok((await frames) >= FRAMES_PER_S);
  assert.ok(filtered < PAINTED_WITHIN_MS);
  page.check();
});
