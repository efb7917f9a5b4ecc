// The live state: what /readyz, /policy, /metrics and /info say, again and again while the view is shown.

import { h } from "../app/dom.js";
import { get, getText } from "../service/api.js";
import { parseExposition } from "./exposition.js";
import * as figures from "./figures.js";
import { Rates } from "./rates.js";
import { policyElement, queueTable, readinessElement, replicaTable, taskTable, tiles } from "./tables.js";

const EVERY_MS = 2000;

export class LiveView {
  #timer = 0;
  #rates = new Rates();
  #metrics = new Map();
  #info = null;
  #isFirst = true;
  #isLooking = false;

  constructor(section) {
    this.readiness = h("div");
    this.tiles = h("div");
    this.replicas = h("div");
    this.queue = h("div");
    this.policy = h("div");
    this.tasks = h("div");
    this.problem = h("p", { class: "notice bad", role: "status" });
    const panel = (title, content) => h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), content);
    section.append(
      h(
        "div",
        { class: "page live" },
        h("div", { class: "live-head" }, this.readiness, this.problem),
        h("section", { class: "panel whole", "aria-label": "Throughput" }, this.tiles),
        h("div", { class: "stack" }, panel("Generator replicas", this.replicas), panel("Tasks", this.tasks)),
        h("div", { class: "stack" }, panel("Policy", this.policy), panel("Queue by priority", this.queue)),
      ),
    );
    document.addEventListener("visibilitychange", () => {
      if (this.#timer && !document.hidden) this.#look();
    });
  }

  enter() {
    this.leave();
    this.#timer = setInterval(() => document.hidden || this.#look(), EVERY_MS);
    this.#look();
  }

  leave() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  /** One look at a time: on a slow network one may take longer than the pause between two. */
  async #look() {
    if (this.#isLooking) return;
    this.#isLooking = true;
    try {
      await this.#lookOnce();
    } finally {
      this.#isLooking = false;
    }
  }

  async #lookOnce() {
    // The first look asks for a key if there must be one. Later looks do not open a dialog under somebody's hands.
    const quiet = !this.#isFirst;
    this.#isFirst = false;
    const answers = await Promise.allSettled([
      get("readyz", { quiet }),
      get("policy", { quiet }),
      metricsNow(quiet),
      this.#info ?? get("info", { quiet }),
    ]);
    const [ready, policy, metrics, info] = answers.map(({ value }) => value);
    if (metrics !== undefined) {
      this.#metrics = parseExposition(metrics.text);
      this.#rates.look(this.#metrics, figures.COUNTERS, metrics.atS);
    }
    this.#info = info ?? null;
    this.#showReadiness(ready, answers[0].reason);
    this.#showProblems(answers.slice(1));
    this.#show(policy, info);
  }

  #showReadiness(ready, reason) {
    renew(this.readiness, readinessElement(ready ?? { problem: reason.message }));
  }

  /** Each sentence once: without a key all routes say the same. What is said already is not said again. */
  #showProblems(answers) {
    const sentences = new Set(answers.filter(({ reason }) => reason).map(({ reason }) => reason.message));
    const text = [...sentences].join(" ");
    if (this.problem.textContent !== text) this.problem.textContent = text;
    this.problem.hidden = !text;
  }

  #show(policy, info) {
    const headline = figures.headline(this.#metrics, this.#rates);
    renew(this.tiles, tiles(headline));
    renew(this.replicas, replicaTable(figures.replicas(policy, this.#metrics, this.#rates)));
    renew(this.queue, queueTable(figures.queue(this.#metrics), headline.waiting));
    renew(this.tasks, taskTable(figures.tasks(info?.tasks ?? [], this.#rates)));
    renew(this.policy, policy ? policyElement(policy, headline.age, Date.now()) : h("p", { class: "small quiet" }, "It is not known."));
  }
}

/** The metrics with the moment of which they are: the middle of the time that the answer took. */
async function metricsNow(quiet) {
  const asked = performance.now();
  const text = await getText("metrics", { quiet });
  return { text, atS: (asked + performance.now()) / 2000 };
}

/** Puts in a new content. The focus, such as on the link of a task, stays at its place. */
function renew(container, content) {
  const places = (element) => [...element.querySelectorAll("a, button")];
  const at = places(container).indexOf(document.activeElement);
  container.replaceChildren(content);
  if (at >= 0) places(container)[at]?.focus();
}
