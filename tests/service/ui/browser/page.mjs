// What the tests share: the page over scripted parts, a browser, files of rollouts, and how a file is dropped.

import { spawn, spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { chromium } from "playwright-core";

export const REPOSITORY = resolve(import.meta.dirname, "../../../..");
const PYTHON = process.env.PYTHON ?? join(REPOSITORY, ".venv/bin/python");
const environment = { ...process.env, PYTHONPATH: [REPOSITORY, join(REPOSITORY, "clients"), join(REPOSITORY, "clients/rollout_env")].join(":") };
const FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

/** Serves the page; `key` makes the service ask for one. Returns `{url, key, stop}`. */
export async function serve({ key = false } = {}) {
  const process = spawn(PYTHON, ["-m", "tests.service.ui.serve_page", ...(key ? ["--key"] : [])], {
    cwd: REPOSITORY,
    env: environment,
    stdio: ["pipe", "pipe", "inherit"],
  });
  const line = await new Promise((found, failed) => {
    process.stdout.once("data", found);
    process.once("exit", (code) => failed(new Error(`the server ended with ${code}`)));
  });
  return { ...JSON.parse(line), stop: () => process.stdin.end() };
}

/** Writes files with the client's own writers. Returns `{folder, path, read, remove}`. */
export function writeFiles(many = 100) {
  const folder = mkdtempSync(join(tmpdir(), "rollouts-"));
  const { status } = spawnSync(PYTHON, ["-m", "tests.service.ui.write_rollouts", folder, "--many", String(many)], {
    cwd: REPOSITORY,
    env: environment,
    stdio: "inherit",
  });
  if (status !== 0) throw new Error("the files were not written");
  return {
    path: (name) => join(folder, name),
    read: (name) => readFileSync(join(folder, name)),
    remove: () => rmSync(folder, { recursive: true }),
  };
}

export function launch() {
  return chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", chromiumSandbox: false, args: FLAGS });
}

/** Posts JSON to the service, and returns the answer. */
export async function post(url, path, body) {
  const response = await fetch(`${url}/v1/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

/**
 * Plays two rollouts of three turns. A trainer agrees with the tokens of the first one, but for its first, which it takes
 * for a twelfth as likely. Returns them.
 */
export async function playReported(url) {
  const sample = { task_name: "steps", messages: [{ role: "user", content: "What is 20 + 22?" }], extra_env_info: { ground_truth: "42" } };
  const { samples } = await post(url, "rollout", { samples: [sample], num_generations: 2 });
  const logprobs = samples[0].message_log.flatMap((message) => message.generation_logprobs ?? []);
  logprobs[0] -= Math.log(12);
  await post(url, "rollouts/logprobs", { reports: [{ rollout_id: samples[0].rollout_id, logprobs, weight_version: "7" }] });
  return samples;
}

/** A ledger with two replicas, of which `g2` parts from the trainer. */
export function scriptedLedger(now = Date.now() / 1000) {
  const sums = (mean, largest, tokens = 480_000) => ({ tokens, mean_ratio: mean, share_beyond: 0, largest_ratio: largest });
  return {
    ...sums(1.024, 2.94, 960_000),
    rollouts: 4200,
    by: {
      replica: { g1: sums(1.005, 1.08), g2: sums(1.042, 2.94) },
      version: { 5: sums(1.006, 1.08, 320_000), 6: sums(1.018, 1.71, 320_000), 7: sums(1.047, 2.94, 320_000) },
    },
    worst: [1.192, 1.188, 1.171].map((mean, at) => ({ rollout_id: `step-41-9c1f5a7be2d04f36-${at}-3`, mean_ratio: mean, share_beyond: 0, largest_ratio: 2.94 - at / 10 })),
    causes: [{ kind: "replica", message: "Generator replica g2 computes other log-probabilities than its siblings: of 4 rollouts that it and two others have scored again, 4 say so. It was taken out of service.", replica: "g2", last: now - 40 }],
  };
}

/** A page in a context of its own. What it prints as an error, or throws, fails the test that calls `page.check()`. */
export async function newPage(browser, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.check = () => {
    if (errors.length) throw new Error(`the page has failed: ${errors.join("; ")}`);
  };
  return page;
}

/** Drops a file on the page, as a hand does. */
export async function drop(page, name, content) {
  const handle = await page.evaluateHandle(
    ([fileName, base64]) => {
      const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], fileName));
      return transfer;
    },
    [name, content.toString("base64")],
  );
  await page.dispatchEvent("body", "drop", { dataTransfer: handle });
}

export const total = (page) => page.locator(".source-name p");
export const selected = (page) => page.locator("[role=option][aria-selected=true] .row-name").textContent();

/** Waits until the list has so many rollouts. */
export async function waitForRollouts(page, text) {
  await page.waitForFunction((wanted) => document.querySelector(".source-name p")?.textContent === wanted, text);
}

/** The reader with the file `few.jsonl` open. */
export async function readerWith(browser, url, files, options) {
  const page = await newPage(browser, options);
  await page.goto(`${url}/ui/#reader`);
  await page.waitForSelector(".reader");
  await drop(page, "few.jsonl", files.read("few.jsonl"));
  await waitForRollouts(page, "12 rollouts");
  // Where it is narrow, a rollout is shown when it is chosen.
  if ((options?.viewport?.width ?? 1280) > 860) await page.waitForSelector(".rollout");
  return page;
}
