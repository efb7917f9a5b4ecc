// The rollouts of the playground, in the order in which they end, with their turns.

import { h } from "../app/dom.js";
import { plural, reward } from "../app/numbers.js";
import { VersionColours } from "../reader/colours.js";
import { isGenerated } from "../reader/data/rollout_row.js";
import { nameOf, rolloutElement, STATUS_CLASSES } from "../reader/transcript.js";

const MOST_OPEN = 2;

export class Arrivals {
  #open = 0;
  element = h("div", { class: "arrivals" });

  clear() {
    this.#open = 0;
    this.element.replaceChildren();
  }

  /** Args: `onRead` opens the rollout in the reader. */
  add(rollout, onRead) {
    const turns = rollout.message_log.filter(isGenerated);
    const details = h(
      "details",
      { class: "arrival", open: this.#open < MOST_OPEN },
      h(
        "summary",
        {},
        h("span", { class: "row-name" }, nameOf(rollout)),
        h("span", { class: `status ${STATUS_CLASSES[rollout.status] ?? "warn"}` }, rollout.status),
        h("span", { class: "row-snippet" }, `${plural(turns.length, "turn")} · ${turns.at(-1)?.content ?? rollout.error?.message ?? ""}`),
        h("span", { class: "row-reward" }, rollout.total_reward === null ? "–" : reward(rollout.total_reward)),
      ),
    );
    // Its transcript is made when it is opened: hundreds may arrive.
    const fill = () => {
      if (!details.open || details.childElementCount > 1) return;
      const { element } = rolloutElement(rollout, null, { colour: "none", mask: false, versions: new VersionColours() });
      details.append(element, h("button", { type: "button", onclick: onRead }, "Open in the reader"));
    };
    details.addEventListener("toggle", fill);
    this.element.append(details);
    this.#open += 1;
    fill();
  }
}
