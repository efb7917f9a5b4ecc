// One row of the list of rollouts: reused for another rollout when the list is scrolled. Texts change in place, because
// making nodes is most of what a frame of scrolling costs.

import { h } from "../app/dom.js";
import { plural, reward } from "../app/numbers.js";
import { STATUS_CLASSES } from "./transcript.js";

export const ROW_HEIGHT = 50;

export function rowOption() {
  const [name, status, snippet, value, size] = Array.from({ length: 5 }, () => document.createTextNode(""));
  const statusElement = h("span", { class: "row-status" }, status);
  const element = h(
    "div",
    { class: "option" },
    h(
      "span",
      { class: "row-first" },
      h("span", { class: "row-name" }, name),
      statusElement,
      h("span", { class: "unseen" }, "reward"),
      h("span", { class: "row-reward" }, value),
    ),
    h("span", { class: "row-second" }, h("span", { class: "row-snippet" }, snippet), h("span", { class: "row-size" }, size)),
  );
  let shownStatus = "completed";
  return {
    element,
    /** Args: `before` is the row above it. */
    show(row, before) {
      element.classList.toggle("begins", before !== undefined && before.group !== row.group);
      name.data = `${row.name} · g${row.generation}`;
      value.data = row.reward === null ? "–" : reward(row.reward);
      snippet.data = row.snippet;
      size.data = `${plural(row.turns, "turn")}, ${row.tokens} tok`;
      const shown = row.finish === "length" ? `${row.status} clipped` : row.status;
      if (shown === shownStatus) return;
      shownStatus = shown;
      status.data = shown.replace(/^completed ?/, "");
      statusElement.className = `row-status ${shown === "completed clipped" ? "warn" : (STATUS_CLASSES[row.status] ?? "warn")}`;
    },
  };
}
