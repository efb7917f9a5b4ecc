// The pane on the right: the selected rollout, or its group side by side.

import { h } from "../app/dom.js";
import { plural } from "../app/numbers.js";
import { VersionColours } from "./colours.js";
import { messageElement } from "./message.js";
import { TokenCursor } from "./token_cursor.js";
import { rolloutElement, sharedMessages } from "./transcript.js";

const MOST_SIDE_BY_SIDE = 16;

export class TranscriptPane {
  #shown = new Map();
  #turn = 0;
  versions = new VersionColours();
  element = h("div", { class: "transcript", tabindex: "0", role: "region", "aria-label": "Transcript" });

  /** Args: `data` is a `RolloutData`, `vocabulary` a `VocabularyStore`. */
  constructor(data, vocabulary) {
    this.data = data;
    this.vocabulary = vocabulary;
    this.cursor = new TokenCursor(this.element, (number) => this.#shown.get(number));
  }

  clear(text = "") {
    this.#turn += 1;
    this.#shown.clear();
    this.element.replaceChildren(text ? h("p", { class: "notice" }, text) : "");
    this.cursor.reset();
  }

  /**
   * @param row the selected one
   * @param group the rows of its group, null to show it alone
   * @param look `{colour, mask}`
   * @returns whether it is shown; false if something else was asked for meanwhile
   */
  async show(source, row, group, look) {
    const turn = (this.#turn += 1);
    const rows = group ? beside(group, row) : [row];
    const wantsTokens = look.mask || look.colour !== "none";
    const [rollouts, vocabulary] = await Promise.all([
      this.data.rollouts(source, rows.map(({ n }) => n)),
      wantsTokens ? this.vocabulary.names() : null,
    ]);
    if (turn !== this.#turn) return false;
    rollouts.forEach(complete);
    for (const { versions } of rows) this.versions.learn(versions);
    this.#shown.clear();
    const full = { ...look, versions: this.versions };
    const content = group
      ? this.#groupElement(rollouts, rows, row, group.length, vocabulary, full)
      : this.#single(rollouts[0], vocabulary, full);
    this.element.replaceChildren(content);
    this.element.scrollTop = 0;
    const current = this.element.querySelector("[aria-current]");
    if (current) current.parentElement.scrollLeft = current.offsetLeft - current.parentElement.offsetLeft;
    this.cursor.reset();
    return true;
  }

  #single(rollout, vocabulary, look) {
    const { element, shown } = rolloutElement(rollout, vocabulary, look);
    this.#shown.set("0", shown);
    return element;
  }

  #groupElement(rollouts, rows, row, size, vocabulary, look) {
    const shared = sharedMessages(rollouts.map((rollout) => rollout.message_log));
    const prompt = h("ol", { class: "messages", "data-rollout": "prompt" });
    const columns = h("div", { class: "columns" });
    rollouts.forEach((rollout, number) => {
      const { element, shown } = rolloutElement(rollout, vocabulary, look, { number, skip: shared, isColumn: true });
      if (rows[number].n === row.n) element.setAttribute("aria-current", "true");
      this.#shown.set(String(number), shown);
      if (!number) {
        this.#shown.set("prompt", shown);
        shown.messages.slice(0, shared).forEach((message, at) => prompt.append(messageElement(message, at, shown.pieces?.[at] ?? null, look)));
      }
      columns.append(element);
    });
    const hidden = size - rollouts.length;
    return h(
      "div",
      { class: "group" },
      h("h2", {}, `${rollouts[0].id ?? rollouts[0].idx ?? ""} · group of ${plural(size, "rollout")}`),
      hidden ? h("p", { class: "small quiet" }, `${plural(rollouts.length, "rollout")} around the selected one are shown.`) : null,
      shared ? prompt : null,
      columns,
    );
  }
}

/** Those of a large group that are near the selected one. */
function beside(group, row) {
  const at = group.findIndex(({ n }) => n === row.n);
  const begin = Math.max(0, Math.min(at - MOST_SIDE_BY_SIDE / 2, group.length - MOST_SIDE_BY_SIDE));
  return group.slice(begin, begin + MOST_SIDE_BY_SIDE);
}

/** Files of other programs may leave out what the contract always has. */
function complete(rollout) {
  for (const log of [rollout.message_log, ...(rollout.branches ?? []).map((branch) => branch.message_log)]) {
    for (const message of log) message.token_ids ??= [];
  }
}
