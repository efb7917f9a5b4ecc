// How the transcript is shown: the colours of tokens, the loss mask, one rollout or its group.

import { h } from "../app/dom.js";
import { RATIO_STEPS, STEPS } from "./colours.js";

export const COLOURS = { none: "no colours", logprob: "log-probability", version: "weight version" };

/** What the colours mean, as items of a list. Args: `versions` are those of `VersionColours`. */
export function legendItems(colour, mask, versions) {
  const parts = [];
  if (colour === "logprob") STEPS.forEach(({ label }, at) => parts.push([`t p${at}`, label]));
  if (colour === "ratio") RATIO_STEPS.forEach(({ label }, at) => parts.push([`t p${at}`, label]));
  if (colour === "version") versions.versions.forEach((version) => parts.push([`t v${versions.of(version)}`, version]));
  if (mask) parts.push(["t trained", "in the loss"], ["t masked", "not in the loss"]);
  return parts.map(([classes, label]) => h("li", {}, h("span", { class: classes }, label)));
}

export class Toolbar {
  #colour = h("select", { id: "colour" }, ...Object.entries(COLOURS).map(([value, label]) => h("option", { value }, label)));
  #mask = h("button", { type: "button", "aria-pressed": "false" }, "Loss mask");
  #group = h("button", { type: "button", "aria-pressed": "false" }, "Group side by side");
  #legend = h("ul", { class: "legend", "aria-label": "Colours" });

  /** Args: `onChange` is called after each change; `onBack` leaves the transcript where there is room for one pane. */
  constructor({ onChange, onBack, onCopy }) {
    this.#colour.addEventListener("change", onChange);
    for (const button of [this.#mask, this.#group]) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
        onChange();
      });
    }
    const back = h("button", { type: "button", class: "back", onclick: onBack }, "‹ All rollouts");
    const copy = h("button", { type: "button", onclick: () => onCopy(copy) }, "Copy link");
    this.element = h(
      "div",
      { class: "toolbar", role: "group", "aria-label": "How it is shown" },
      back,
      h("label", { for: "colour" }, "Colour by"),
      this.#colour,
      this.#mask,
      this.#group,
      copy,
      this.#legend,
    );
  }

  get values() {
    const colour = this.#colour.value;
    return {
      colour: colour === "none" ? "" : colour,
      mask: this.#mask.getAttribute("aria-pressed") === "true" ? "1" : "",
      group: this.#group.getAttribute("aria-pressed") === "true" ? "1" : "",
    };
  }

  set values({ colour, mask, group }) {
    this.#colour.value = COLOURS[colour] ? colour : "none";
    this.#mask.setAttribute("aria-pressed", mask === "1");
    this.#group.setAttribute("aria-pressed", group === "1");
  }

  nextColour() {
    const names = Object.keys(COLOURS);
    this.#colour.value = names[(names.indexOf(this.#colour.value) + 1) % names.length];
    return COLOURS[this.#colour.value];
  }

  toggleMask() {
    this.#mask.click();
  }

  toggleGroup() {
    this.#group.click();
  }

  /** Args: `versions` are those of `VersionColours`. */
  explain(versions) {
    const { colour, mask } = this.values;
    const items = legendItems(colour, mask, versions);
    this.#legend.replaceChildren(...items);
    this.#legend.hidden = !items.length;
  }
}
