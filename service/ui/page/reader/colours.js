// Which colour a token has: a step of the scale of log-probabilities, or one of the colours of weight versions.
// Colours are classes, whose two halves (light and dark) are in styles/transcript.css.

/** Steps of probability, from likely to unlikely: a token has the first one whose bound it reaches. */
export const STEPS = [
  { least: 0.9, label: "90% and more" },
  { least: 0.6, label: "60–90%" },
  { least: 0.3, label: "30–60%" },
  { least: 0.1, label: "10–30%" },
  { least: 0.01, label: "1–10%" },
  { least: 0, label: "below 1%" },
];
export const VERSION_COLOURS = 6;

/** Steps of the ratio between a trainer's probability and the sampled one: a token has the first one that it is below. */
export const RATIO_STEPS = [
  { below: 1.02, label: "ratio below 1.02" },
  { below: 1.1, label: "1.02–1.1" },
  { below: 1.5, label: "1.1–1.5" },
  { below: 2, label: "1.5–2" },
  { below: 5, label: "2–5" },
  { below: Infinity, label: "5 and more" },
];

export function stepOf(logprob) {
  const probability = Math.exp(logprob);
  return STEPS.findIndex(({ least }) => probability >= least);
}

/** How far two log-probabilities of a token part, as a factor of at least 1. */
export function ratioOf(logprob, other) {
  return Math.exp(Math.abs(logprob - other));
}

export function stepOfRatio(ratio) {
  const step = RATIO_STEPS.findIndex(({ below }) => ratio < below);
  return step < 0 ? RATIO_STEPS.length - 1 : step;
}

/** The version of each token of a message; null where no span says. */
export function versionsOf(message) {
  const versions = new Array(message.token_ids.length).fill(null);
  for (const { version, start, end } of message.weight_versions ?? []) versions.fill(String(version), start, end);
  return versions;
}

/** Numbers versions in their order, so that each has the same colour wherever it is shown. */
export class VersionColours {
  #versions = [];

  learn(versions) {
    const known = new Set(this.#versions);
    for (const version of versions) known.add(version);
    if (known.size > this.#versions.length) {
      this.#versions = [...known].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    }
  }

  get versions() {
    return this.#versions;
  }

  of(version) {
    return this.#versions.indexOf(version) % VERSION_COLOURS;
  }
}
