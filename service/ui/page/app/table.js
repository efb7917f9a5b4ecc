// A table as an element.

import { h } from "./dom.js";

/**
 * @param columns `[label, isNumber]` of each
 * @param rows the contents of the cells of each
 * @param empty the sentence in place of a table without rows
 * @param scrolls whether it may be wider than its place: then the keyboard can scroll it
 */
export function table(caption, columns, rows, empty, { scrolls = false } = {}) {
  if (!rows.length) return h("p", { class: "small quiet" }, empty);
  const cell = (tag, [label, isNumber], content) => h(tag, { class: isNumber ? "number" : null, scope: tag === "th" ? "col" : null }, content ?? label);
  const place = scrolls ? { tabindex: "0", role: "group", "aria-label": `${caption}, scrolls sideways` } : {};
  return h(
    "div",
    { class: "table-room", ...place },
    h(
      "table",
      { "aria-label": caption },
      h("thead", {}, h("tr", {}, ...columns.map((column) => cell("th", column)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((content, at) => cell("td", columns[at], content))))),
    ),
  );
}
