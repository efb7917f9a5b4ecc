// The mismatch ledger: how far trainers' log-probabilities part from the sampled ones, where, and why.

import { h } from "../app/dom.js";
import { count, percent, ratio, seconds } from "../app/numbers.js";
import { table } from "../app/table.js";
import { tile } from "../live/tables.js";
import { get } from "../service/api.js";
import { panel, refusal, storyLink } from "./answers.js";
import { attributesOf } from "./ledger.js";

const NOTHING = "No trainer has reported log-probabilities yet. A trainer does so with client.report_logprobs(samples, logprobs), or by POST /v1/rollouts/logprobs.";

export class MismatchView {
  #asked = 0;

  constructor(section) {
    this.content = h("div", { class: "story-content" });
    const head = h("div", { class: "row story-head" }, h("p", { class: "quiet" }, "Ratio of a trainer's probability of a token to the sampled one: 1 where they agree. A mean counts no token as more than 10."), h("button", { type: "button", onclick: () => this.refresh() }, "Refresh"));
    section.append(h("div", { class: "page story" }, head, this.content));
  }

  enter() {
    return this.refresh();
  }

  async refresh() {
    const turn = (this.#asked += 1);
    let shown;
    try {
      shown = ledgerElements(await get("mismatch"));
    } catch (problem) {
      shown = [refusal(problem)];
    }
    if (turn === this.#asked) this.content.replaceChildren(...shown);
  }
}

function ledgerElements(ledger) {
  if (!ledger.rollouts && !ledger.causes.length) return [h("p", { class: "notice" }, NOTHING)];
  return [
    h(
      "section",
      { class: "panel", "aria-label": "All reports" },
      h(
        "dl",
        { class: "tiles" },
        tile("mean ratio", ratio(ledger.mean_ratio)),
        tile("tokens beyond 10", percent(ledger.share_beyond)),
        tile("largest ratio", ratio(ledger.largest_ratio)),
        tile("rollouts", count(ledger.rollouts)),
        tile("tokens", count(ledger.tokens)),
      ),
    ),
    panel("Causes", causesOf(ledger.causes)),
    panel("Rollouts that part the most", worstOf(ledger.worst)),
    panel("By attribute", ...attributesOf(ledger.by).map(([name, cells]) => cellsOf(name, cells))),
  ];
}

function causesOf(causes) {
  if (!causes.length) return h("p", { class: "small quiet" }, "None was found.");
  const now = Date.now() / 1000;
  const last = (cause) => (cause.last === null || cause.last === undefined ? "" : ` ${seconds(Math.max(0, now - cause.last))} ago`);
  return h(
    "ul",
    { class: "causes" },
    ...causes.map((cause) => h("li", {}, h("strong", { class: "bad" }, cause.kind.replaceAll("_", " ")), ` ${cause.message}`, h("span", { class: "small quiet" }, last(cause)))),
  );
}

function worstOf(worst) {
  const rows = worst.map((one) => [storyLink(one.rollout_id), ratio(one.mean_ratio), percent(one.share_beyond), ratio(one.largest_ratio)]);
  return table("Rollouts that part the most", [["rollout"], ["mean", true], ["beyond 10", true], ["largest", true]], rows, "No rollout of this key was reported.", { scrolls: true });
}

function cellsOf(name, cells) {
  const rows = cells.map(([value, sums]) => [value || "none", count(sums.tokens), ratio(sums.mean_ratio), percent(sums.share_beyond), ratio(sums.largest_ratio)]);
  return table(`Mismatch by ${name}`, [[name], ["tokens", true], ["mean", true], ["beyond 10", true], ["largest", true]], rows, "", { scrolls: true });
}
