// The fields of the filters. Tells of each change; what it means is decided in filters.js.

import { field, h, options } from "../app/dom.js";
import { count } from "../app/numbers.js";
import { counted, ORDERS } from "./filters.js";

const TYPING_MS = 200;
export const FILTERS = ["task", "status", "finish", "min", "max", "q", "order"];

export class FilterForm {
  #task = h("select");
  #status = h("select");
  #finish = h("select");
  #min = h("input", { type: "text", inputmode: "decimal", placeholder: "any", size: "5" });
  #max = h("input", { type: "text", inputmode: "decimal", placeholder: "any", size: "5" });
  #order = h("select");
  #clear = h("button", { type: "button" }, "Clear");
  text = h("input", { type: "search", placeholder: "words in messages, ids, errors" });

  constructor(onChange) {
    options(this.#order, Object.entries(ORDERS), "file");
    const fields = { task: this.#task, status: this.#status, finish: this.#finish, min: this.#min, max: this.#max, q: this.text, order: this.#order };
    this.fields = fields;
    let typing = 0;
    for (const control of Object.values(fields)) {
      control.addEventListener("input", () => {
        clearTimeout(typing);
        if (control.tagName === "SELECT") onChange();
        else typing = setTimeout(onChange, TYPING_MS);
      });
    }
    this.#clear.addEventListener("click", () => {
      this.values = {};
      onChange();
      this.text.focus();
    });
    const wide = field("Text", this.text);
    wide.classList.add("wide");
    this.element = h(
      "form",
      { class: "filters", role: "search", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
      field("Task", this.#task),
      field("Status", this.#status),
      field("Finish", this.#finish),
      field("Reward from", this.#min),
      field("to", this.#max),
      field("Order", this.#order),
      wide,
      this.#clear,
    );
  }

  /** Offers the tasks, statuses and finish reasons of last responses that occur, with how often. */
  offer(rows) {
    for (const [name, select, any] of [["task", this.#task, "all tasks"], ["status", this.#status, "all statuses"], ["finish", this.#finish, "all reasons"]]) {
      const chosen = select.value;
      const found = counted(rows, name);
      const choices = [["", any], ...found.map(([value, size]) => [value, `${value || "none"} (${count(size)})`])];
      // A link may name what does not occur: it stays chosen, and nothing is shown.
      if (chosen && !found.some(([value]) => value === chosen)) choices.push([chosen, `${chosen} (0)`]);
      options(select, choices, chosen);
    }
  }

  get values() {
    const values = {};
    for (const name of FILTERS) values[name] = this.fields[name].value.trim();
    if (values.order === "file") values.order = "";
    return values;
  }

  set values(values) {
    for (const name of FILTERS) {
      const value = values[name] ?? (name === "order" ? "file" : "");
      const control = this.fields[name];
      if (control.tagName === "SELECT" && ![...control.options].some((one) => one.value === value)) control.append(h("option", { value }, value));
      control.value = value;
    }
  }
}
