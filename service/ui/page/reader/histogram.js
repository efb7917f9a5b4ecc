// The rewards of the rollouts that are shown, as bars. A click on a bar filters by its range; the two fields for the
// range do the same from the keyboard.

import { h, svg } from "../app/dom.js";
import { count, plural, reward } from "../app/numbers.js";

const MOST_BINS = 24;
const HEIGHT = 56;
const WIDTH = 360;

/** Bins that cover the rewards. Few different values, such as 0 and 1, have a bin each. */
export function binsOf(rewards) {
  if (!rewards.length) return [];
  const values = new Map();
  let min = Infinity;
  let max = -Infinity;
  for (const value of rewards) {
    if (values.size <= MOST_BINS) values.set(value, (values.get(value) ?? 0) + 1);
    if (value < min) min = value;
    if (value > max) max = value;
  }
  if (values.size <= MOST_BINS / 2) {
    return [...values].sort((a, b) => a[0] - b[0]).map(([value, size]) => ({ from: value, to: value, size }));
  }
  const width = (max - min) / MOST_BINS;
  const bins = Array.from({ length: MOST_BINS }, (_, at) => ({ from: min + at * width, to: min + (at + 1) * width, size: 0 }));
  for (const value of rewards) bins[Math.min(MOST_BINS - 1, Math.floor((value - min) / width))].size += 1;
  return bins;
}

export class Histogram {
  #onRange;
  element = h("figure", { class: "histogram" });

  constructor(onRange) {
    this.#onRange = onRange;
  }

  show(rows) {
    const rewards = rows.map((row) => row.reward).filter((value) => value !== null);
    const bins = binsOf(rewards);
    if (!bins.length) {
      this.element.replaceChildren(h("figcaption", { class: "small quiet" }, "No rewards"));
      return;
    }
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const label = `Rewards of ${plural(rewards.length, "rollout")}: mean ${reward(mean)}, from ${reward(bins[0].from)} to ${reward(bins.at(-1).to)}`;
    this.element.replaceChildren(
      this.#bars(bins, label),
      h(
        "figcaption",
        { class: "small quiet", "aria-hidden": "true" },
        h("span", {}, reward(bins[0].from)),
        h("span", {}, `mean ${reward(mean)}`),
        h("span", {}, bins.length > 1 ? reward(bins.at(-1).to) : ""),
      ),
    );
  }

  #bars(bins, label) {
    const most = Math.max(...bins.map((bin) => bin.size));
    const width = WIDTH / bins.length;
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
    bins.forEach((bin, at) => {
      // A bin with anything in it is seen.
      const height = bin.size ? Math.max(2, (bin.size / most) * (HEIGHT - 2)) : 0;
      const title = svg("title");
      title.textContent = `${bin.from === bin.to ? reward(bin.from) : `${reward(bin.from)} to ${reward(bin.to)}`}: ${count(bin.size)}`;
      const part = svg("g", { class: "bin" }, title);
      part.append(
        svg("rect", { class: "reach", x: at * width, y: 0, width, height: HEIGHT }),
        svg("rect", { class: "bar", x: at * width + Math.min(1, width / 8), y: HEIGHT - height, width: Math.max(1, width - 2 * Math.min(1, width / 8)), height }),
      );
      part.addEventListener("click", () => this.#onRange(bin.from, bin.to));
      drawing.append(part);
    });
    return drawing;
  }
}
