// A line of the last minutes, without axes: its figure stands beside it.

import { svg } from "../app/dom.js";

const WIDTH = 120;
const HEIGHT = 28;

export function sparkline(values) {
  const drawing = svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    const most = Math.max(...values, Number.MIN_VALUE);
    const points = values.map((value, at) => `${(at / (values.length - 1)) * WIDTH},${HEIGHT - 1 - (value / most) * (HEIGHT - 3)}`);
    drawing.append(
      svg("polygon", { points: `0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}` }),
      svg("polyline", { points: points.join(" ") }),
    );
  }
  return drawing;
}
