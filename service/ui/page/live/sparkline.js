// A line of the last minutes, without axes: its figure stands beside it.

import { svg } from "../app/dom.js";

const WIDTH = 120;
const HEIGHT = 28;

/**
 * @param most the value at the top; by default the largest
 * @param places of the values from left to right, from 0 to 1; by default equally far from each other
 */
export function sparkline(values, { most = Math.max(...values), places = values.map((_, at) => at / (values.length - 1)) } = {}) {
  const drawing = svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    const scale = Math.max(most, Number.MIN_VALUE);
    const points = values.map((value, at) => `${places[at] * WIDTH},${HEIGHT - 1 - (value / scale) * (HEIGHT - 3)}`);
    drawing.append(
      svg("polygon", { points: `${places[0] * WIDTH},${HEIGHT} ${points.join(" ")} ${places.at(-1) * WIDTH},${HEIGHT}` }),
      svg("polyline", { points: points.join(" ") }),
    );
  }
  return drawing;
}
