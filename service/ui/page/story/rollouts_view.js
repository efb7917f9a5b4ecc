// The stories of rollouts: those that ended last, and one of them. Which one is shown, the address says.

import { announce } from "../app/announce.js";
import { field, h, options } from "../app/dom.js";
import * as link from "../app/link.js";
import { count, duration, percent, plural, ratio, reward, seconds } from "../app/numbers.js";
import { table } from "../app/table.js";
import { tile } from "../live/tables.js";
import { VersionColours, versionsOf } from "../reader/colours.js";
import { isGenerated } from "../reader/data/rollout_row.js";
import { TokenCursor } from "../reader/token_cursor.js";
import { COLOURS, legendItems } from "../reader/toolbar.js";
import { rolloutElement, STATUS_CLASSES } from "../reader/transcript.js";
import { get } from "../service/api.js";
import { panel, refusal, storyLink } from "./answers.js";
import { explained, timesOf } from "./record.js";
import { timeline, timelineLegend } from "./timeline.js";

const LISTED = 50;

export class RolloutsView {
  #shown = null;
  #asked = 0;
  #record = null;
  #tokens = null;

  /** Args: `reader` takes rollouts in, and knows the vocabulary. */
  constructor(section, reader) {
    this.reader = reader;
    this.name = h("input", { type: "text", spellcheck: "false", autocomplete: "off", required: true });
    const form = h("form", { class: "row find" }, field("Rollout id", this.name), h("button", {}, "Show"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      link.go("rollouts", { rollout: this.name.value.trim() });
    });
    this.backButton = h("button", { type: "button", onclick: () => this.back() }, "‹ All rollouts");
    const head = h("div", { class: "row story-head" }, this.backButton, form, h("button", { type: "button", onclick: () => this.refresh() }, "Refresh"));
    this.content = h("div", { class: "story-content" });
    this.colour = h("select");
    this.legend = h("ul", { class: "legend", "aria-label": "Colours" });
    this.colour.addEventListener("change", () => this.#showTokens());
    this.transcript = h("div", { class: "story-transcript" });
    this.cursor = new TokenCursor(this.transcript, () => this.#tokens);
    section.append(h("div", { class: "page story" }, head, this.content));
  }

  enter({ rollout }) {
    this.#shown = rollout ?? null;
    this.name.value = rollout ?? "";
    return this.refresh();
  }

  back() {
    if (this.#shown !== null) link.go("rollouts");
  }

  async refresh() {
    const turn = (this.#asked += 1);
    const rolloutId = this.#shown;
    this.backButton.hidden = rolloutId === null;
    let shown;
    try {
      shown = rolloutId === null ? listElement(await get(`rollouts?count=${LISTED}`)) : await this.#storyOf(rolloutId);
    } catch (problem) {
      shown = refusal(problem);
    }
    if (turn !== this.#asked) return;
    this.content.replaceChildren(...[shown].flat());
    if (rolloutId !== null) announce(`Story of rollout ${rolloutId}`);
  }

  // One story

  async #storyOf(rolloutId) {
    const [record, vocabulary] = await Promise.all([get(`rollouts/${encodeURIComponent(rolloutId)}`), this.reader.vocabulary.names()]);
    this.#record = { ...record, rollout: explained(record), vocabulary };
    const colours = record.mismatch ? { ratio: "trainer's ratio", ...COLOURS } : COLOURS;
    options(this.colour, Object.entries(colours), record.mismatch ? "ratio" : "logprob");
    this.#showTokens();
    const read = h("button", { type: "button", onclick: () => this.#read() }, "Open in the reader");
    return [
      h("section", { class: "panel", "aria-label": "Rollout" }, headOf(record), factsOf(record)),
      panel("Timeline", timelineLegend(), timeline(record)),
      h("div", { class: "pair" }, panel("Trainer", mismatchOf(record)), panel("Fork", lineageOf(record))),
      panel("Transcript", h("div", { class: "row" }, field("Colour by", this.colour), read, this.legend), this.transcript, this.cursor.element),
    ];
  }

  #showTokens() {
    const { rollout, vocabulary } = this.#record;
    const versions = new VersionColours();
    for (const message of rollout.message_log.filter(isGenerated)) versions.learn(versionsOf(message).filter((version) => version !== null));
    const colour = this.colour.value;
    const { element, shown } = rolloutElement(rollout, vocabulary, { colour, mask: false, versions });
    this.#tokens = shown;
    this.transcript.replaceChildren(element);
    const items = legendItems(colour, false, versions);
    this.legend.replaceChildren(...items);
    this.legend.hidden = !items.length;
    this.cursor.reset();
  }

  nextColour() {
    if (this.#shown === null || !this.#record) return;
    this.colour.selectedIndex = (this.colour.selectedIndex + 1) % this.colour.options.length;
    announce(`Colours: ${this.colour.selectedOptions[0].textContent}`);
    this.#showTokens();
  }

  async #read() {
    const [row] = await this.reader.addPlayed([this.#record.rollout], true);
    link.go("reader", { source: "played", rollout: row.n });
  }
}

function listElement({ rollouts }) {
  const now = Date.now() / 1000;
  const columns = [["rollout"], ["task"], ["status"], ["reward", true], ["mean ratio", true], ["ended", true]];
  const rows = rollouts.map((one) => [
    storyLink(one.rollout_id),
    one.task_name,
    h("span", { class: STATUS_CLASSES[one.status] ?? "warn" }, one.status),
    one.total_reward === null || one.total_reward === undefined ? "–" : reward(one.total_reward),
    ratio(one.mean_ratio),
    `${seconds(Math.max(0, now - one.ended_at))} ago`,
  ]);
  const empty = "No rollout of this key has ended, or newer ones took the place of its records (rollout_records.max_bytes).";
  return panel("Rollouts that ended last", table("Rollouts that ended last", columns, rows, empty, { scrolls: true }));
}

function headOf({ rollout }) {
  return h(
    "div",
    { class: "story-title" },
    h("h2", {}, rollout.rollout_id),
    h("p", { class: "quiet" }, `${rollout.task_name} · ${rollout.id ?? rollout.idx} · generation ${rollout.generation_index}`),
  );
}

function factsOf(record) {
  const { rollout } = record;
  const times = timesOf(record);
  const facts = [
    ["request", record.request_id],
    ["policy", record.policy ?? "the one without a name"],
    ["priority", record.priority],
    ["ended", new Date(record.ended_at * 1000).toISOString()],
    ["played anew", record.restarts ? plural(record.restarts, "time") : null],
    ["retries", record.retries?.length ? `${count(record.retries.length)}, ${count(record.retries_used)} of the request's` : null],
  ].filter(([, value]) => value !== null && value !== undefined);
  return h(
    "div",
    {},
    h(
      "dl",
      { class: "tiles" },
      tile("status", rollout.status, { note: rollout.error ? rollout.error.message : "" }),
      tile("reward", reward(rollout.total_reward)),
      tile("took", duration(times.all)),
      tile("in the queue", duration(times.queue)),
      tile("in engines", duration(times.engine), { note: times.steps === null ? "" : `${duration(times.steps)} in steps` }),
    ),
    h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
  );
}

function mismatchOf({ mismatch }) {
  if (!mismatch) return h("p", { class: "small quiet" }, "No trainer has reported its log-probabilities of this rollout (client.report_logprobs).");
  const by = mismatch.weight_version ? ` by a trainer with version ${mismatch.weight_version}` : "";
  return h(
    "p",
    {},
    `Mean ratio ${ratio(mismatch.mean_ratio)}, ${percent(mismatch.share_beyond)} beyond 10, largest ${ratio(mismatch.largest_ratio)}, of ${plural(mismatch.tokens, "token")}`,
    h("span", { class: "quiet" }, `, reported${by} ${new Date(mismatch.reported_at * 1000).toISOString()}`),
  );
}

function lineageOf({ rollout }) {
  if (typeof rollout.parent !== "string") return h("p", { class: "small quiet" }, "It began with its prompt.");
  const at = rollout.forked_at ? ` at turn ${rollout.forked_at.turn + 1}, after ${plural(rollout.forked_at.token, "token")}` : "";
  return h("p", {}, h("span", {}, "Forked from"), " ", storyLink(rollout.parent), at);
}
