// Which rollouts are shown, and in which order. No DOM: state in, rows out.

export const ORDERS = {
  file: "as in the file",
  lowest: "lowest reward first",
  highest: "highest reward first",
  longest: "most tokens first",
  unsure: "least likely tokens first",
};
const last = (value) => value ?? -Infinity;
const SORTS = {
  lowest: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || a.n - b.n,
  highest: (a, b) => last(b.reward) - last(a.reward) || a.n - b.n,
  longest: (a, b) => b.tokens - a.tokens || a.n - b.n,
  unsure: (a, b) => (a.logprob ?? Infinity) - (b.logprob ?? Infinity) || a.n - b.n,
};

/** A bound of the reward that a text gives; null for none, also for what is no number. */
export function bound(text) {
  if (text === undefined || text === null || String(text).trim() === "") return null;
  const value = Number(text);
  return Number.isFinite(value) ? value : null;
}

/**
 * The rows that `filters` lets through. A rollout without a reward is outside of every range.
 *
 * @param matches of `RolloutData.search`, null without a text
 */
export function filtered(rows, filters, matches = null) {
  const min = bound(filters.min);
  const max = bound(filters.max);
  const ranged = min !== null || max !== null;
  const shown = rows.filter(
    (row) =>
      (!filters.task || row.task === filters.task) &&
      (!filters.status || row.status === filters.status) &&
      (!filters.finish || row.finish === filters.finish) &&
      (!ranged || (row.reward !== null && (min === null || row.reward >= min) && (max === null || row.reward <= max))) &&
      (matches === null || matches[row.n] === 1),
  );
  return SORTS[filters.order] ? shown.sort(SORTS[filters.order]) : shown;
}

/** Which share of the responses their length has cut; 0 without one. */
export function clippedRatio(rows) {
  const of = (field) => rows.reduce((sum, row) => sum + row[field], 0);
  return of("turns") ? of("clipped") / of("turns") : 0;
}

/** The values of a field that occur, each with how often, the most frequent first. */
export function counted(rows, field) {
  const counts = new Map();
  for (const row of rows) counts.set(row[field], (counts.get(row[field]) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
