// One row of the list of rollouts: reused for another rollout when the list is scrolled.

import { h } from "../app/dom.js";
import { reward } from "../app/numbers.js";
import { STATUS_CLASSES } from "./transcript.js";

export const ROW_HEIGHT = 50;

export function rowOption() {
  const name = h("span", { class: "row-name" });
  const status = h("span", { class: "row-status" });
  const snippet = h("span", { class: "row-snippet" });
  const value = h("span", { class: "row-reward" });
  const size = h("span", { class: "row-size" });
  const element = h("div", { class: "option" }, h("span", { class: "row-first" }, name, status, value), h("span", { class: "row-second" }, snippet, size));
  return {
    element,
    show(row, before) {
      element.classList.toggle("begins", before !== undefined && before.group !== row.group);
      name.textContent = `${row.name} · g${row.generation}`;
      status.textContent = row.status === "completed" ? "" : row.status;
      status.className = `row-status ${STATUS_CLASSES[row.status] ?? "warn"}`;
      value.textContent = row.reward === null ? "–" : reward(row.reward);
      snippet.textContent = row.snippet.replaceAll("\n", " ");
      size.textContent = `${row.turns === 1 ? "1 turn" : `${row.turns} turns`}, ${row.tokens} tok`;
      element.setAttribute(
        "aria-label",
        `${row.name}, generation ${row.generation}, ${row.task}, ${row.status}, ${row.reward === null ? "no reward" : `reward ${reward(row.reward)}`}, ${row.turns} turns, ${row.tokens} tokens`,
      );
    },
  };
}
