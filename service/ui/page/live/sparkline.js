// A line of the last minutes, without axes: its figure stands beside it.

import { svg } from "../app/dom.js";

const WIDTH = 120;
const HEIGHT = 28;

/** The values from left to right, equally far from each other; the largest is at the top. */
export function sparkline(values) {
  const drawing = svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    const scale = Math.max(...values, Number.MIN_VALUE);
    const points = values.map((value, at) => `${(at / (values.length - 1)) * WIDTH},${HEIGHT - 1 - (value / scale) * (HEIGHT - 3)}`);
    drawing.append(
      svg("polygon", { points: `0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}` }),
      svg("polyline", { points: points.join(" ") }),
    );
  }
  return drawing;
}
