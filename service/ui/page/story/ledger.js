// What the view of the mismatch shows, from the answer of `GET /mismatch`. Pure functions.

/**
 * The history by replica and version, those first whose mean is the largest now.
 *
 * @returns of each `{replica, version, tokens, mean, largest, means, largests, places}`: `mean` and `largest` of the last
 *  minute; of each minute how far the ratio is above 1, and its place in the time of all, from 0 to 1
 */
export function linesOf(history) {
  const first = Math.min(...history.map(({ at }) => at));
  const span = Math.max(...history.map(({ at }) => at)) - first;
  const lines = new Map();
  for (const period of [...history].sort((a, b) => a.at - b.at)) {
    const key = JSON.stringify([period.replica, period.version]);
    if (!lines.has(key)) lines.set(key, { replica: period.replica, version: period.version, tokens: 0, means: [], largests: [], places: [] });
    const line = lines.get(key);
    line.tokens += period.tokens;
    line.means.push(period.mean_ratio - 1);
    line.largests.push(period.largest_ratio - 1);
    line.places.push(span ? (period.at - first) / span : 0);
    line.mean = period.mean_ratio;
    line.largest = period.largest_ratio;
  }
  return [...lines.values()].sort((a, b) => b.mean - a.mean);
}

const NAMES = {
  replica: "replica",
  node: "node",
  version: "version",
  policy: "policy",
  position: "place in the message",
  prefix_cache: "prompt in the prefix cache",
  batch_size: "batch of the engine",
  engine: "settings of the engine",
};

/** `[name, [[value, sums], ...]]` of each attribute that has more than one value, the largest mean first. */
export function attributesOf(by) {
  return Object.entries(by)
    .filter(([, cells]) => Object.keys(cells).length > 1)
    .map(([name, cells]) => [NAMES[name] ?? name, Object.entries(cells).sort(([, a], [, b]) => b.mean_ratio - a.mean_ratio)]);
}
