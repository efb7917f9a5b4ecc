// Reads Prometheus' text format, as `GET /metrics` answers it. Pure functions.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };

/** The samples by the name of their metric, without the `ray_` before it: `{key, labels, value}`. */
export function parseExposition(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, labelText = "", valueText] = match;
    // Most lines are buckets, which nobody here looks at.
    if (name.endsWith("_bucket")) continue;
    const short = name.replace(/^ray_/, "");
    const labels = {};
    for (const [, label, value] of labelText.matchAll(LABEL)) labels[label] = value.replace(/\\(.)/g, (_, one) => ESCAPES[one] ?? one);
    if (!metrics.has(short)) metrics.set(short, []);
    metrics.get(short).push({ key: `${short}{${labelText}}`, labels, value: numberOf(valueText) });
  }
  return metrics;
}

function numberOf(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

/** The sum over all replicas; null where the metric is not there. */
export function total(metrics, name, labels = {}) {
  const found = (metrics.get(name) ?? []).filter((sample) => Object.entries(labels).every(([label, value]) => sample.labels[label] === value));
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** The sums by the value of a label. */
export function byLabel(metrics, name, label) {
  const sums = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) {
    if (label in labels) sums.set(labels[label], (sums.get(labels[label]) ?? 0) + value);
  }
  return sums;
}
