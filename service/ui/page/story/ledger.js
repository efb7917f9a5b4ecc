// What the view of the mismatch shows, from the answer of `GET /mismatch`. Pure functions.

/** `[name, [[value, sums], ...]]` of each attribute that has more than one value, the largest mean first. */
export function attributesOf(by) {
  return Object.entries(by)
    .filter(([, cells]) => Object.keys(cells).length > 1)
    .map(([name, cells]) => [name, Object.entries(cells).sort(([, a], [, b]) => b.mean_ratio - a.mean_ratio)]);
}
