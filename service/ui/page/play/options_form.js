// The options of a request: how tokens are sampled, how often and how far a sample is played. What is left empty is not
// sent, so that the service's own default holds.

import { field, h, options } from "../app/dom.js";

const NUMBERS = [
  // path, label, attributes
  ["num_generations", "Rollouts", { value: "4", min: 1, max: 1024, step: 1, required: true }],
  ["sampling.temperature", "Temperature", { value: "1", min: 0, max: 2, step: "any" }],
  ["sampling.max_new_tokens", "Max new tokens", { value: "256", min: 1, step: 1 }],
  ["max_rollout_turns", "Max turns", { placeholder: "16", min: 1, step: 1 }],
  ["sampling.top_p", "top-p", { placeholder: "1", min: 0, max: 1, step: "any" }],
  ["sampling.top_k", "top-k", { placeholder: "all", min: -1, step: 1 }],
  ["sampling.min_p", "min-p", { placeholder: "0", min: 0, max: 1, step: "any" }],
  ["sampling.seed", "Seed", { placeholder: "random", min: 0, step: 1 }],
  ["max_seq_len", "Max length", { placeholder: "the model's", min: 1, step: 1 }],
  ["deadline_s", "Deadline, s", { placeholder: "none", min: 0, step: "any" }],
];
const FIRST = 4;
const PRIORITIES = [["interactive", "interactive"], ["train", "train"], ["batch", "batch"]];

export class OptionsForm {
  #numbers = new Map();
  #stops = h("input", { type: "text", placeholder: 'a JSON list, such as ["\\n"]', spellcheck: "false" });
  #greedy = h("input", { type: "checkbox", id: "greedy" });
  #priority = h("select");

  constructor() {
    for (const [path, label, attributes] of NUMBERS) {
      const control = h("input", { type: "number", ...attributes });
      this.#numbers.set(path, { control, label, element: field(label, control) });
    }
    options(this.#priority, PRIORITIES, "interactive");
    const elements = [...this.#numbers.values()].map(({ element }) => element);
    const stops = field("Stop strings", this.#stops);
    stops.classList.add("stops");
    this.element = h(
      "fieldset",
      { class: "options" },
      h("legend", { class: "unseen" }, "Options"),
      h("div", { class: "options-grid" }, ...elements.slice(0, FIRST)),
      h(
        "details",
        {},
        h("summary", {}, "More options"),
        h(
          "div",
          { class: "options-grid" },
          ...elements.slice(FIRST),
          field("Priority", this.#priority),
          stops,
          h("div", { class: "row check" }, this.#greedy, h("label", { for: "greedy" }, "Greedy")),
        ),
      ),
    );
  }

  /** `{options}` to be merged into a request, or `{problem, control}`. */
  read() {
    const options = { sampling: {}, priority: this.#priority.value };
    for (const [path, { control, label }] of this.#numbers) {
      if (!control.checkValidity()) return { problem: `${label}: ${control.validationMessage}`, control };
      if (control.value === "") continue;
      const [first, second] = path.split(".");
      if (second) options[first][second] = Number(control.value);
      else options[first] = Number(control.value);
    }
    if (this.#greedy.checked) options.sampling.greedy = true;
    const stops = this.#stops.value.trim();
    if (stops) {
      const list = listOfTexts(stops);
      if (!list) return { problem: 'Stop strings: a JSON list of texts, such as ["\\n"].', control: this.#stops };
      options.sampling.stop_strings = list;
    }
    return { options };
  }
}

function listOfTexts(text) {
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) && list.every((one) => typeof one === "string" && one) ? list : null;
  } catch {
    return null;
  }
}
