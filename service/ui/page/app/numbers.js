// How numbers are written: short, and the same everywhere.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export function count(value) {
  return whole.format(value);
}

/** Whole numbers as they are, others with at most three decimals. */
export function reward(value) {
  if (value === null || value === undefined) return "none";
  return Number.isInteger(value) ? String(value) : String(Number(value.toFixed(3)));
}

export function rate(value) {
  return value === null ? "–" : value >= 1000 ? whole.format(value) : short.format(value);
}

/** Of a share; a dash where it is null. */
export function percent(share) {
  return share === null ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.01 ? 1 : 0)}%`;
}

export function seconds(value) {
  if (value < 120) return `${whole.format(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return value < 172800 ? `${whole.format(value / 3600)} h` : `${whole.format(value / 86400)} days`;
}

/** Of something that takes milliseconds or minutes; a dash where it is null. */
export function duration(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${short.format(value * 1000)} ms`;
  return value < 120 ? `${short.format(value)} s` : seconds(value);
}

/** Between two probabilities: 1 where they agree. */
export function ratio(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 ? value.toFixed(3) : short.format(value);
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** Args: `date` as the service writes it, null where nobody knows it; `now` in milliseconds. */
export const ago = (date, now) => (date === null || date === undefined ? "–" : `${seconds(Math.max(0, (now - Date.parse(date)) / 1000))} ago`);
