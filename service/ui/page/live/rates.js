// Rates of counters. Ray exports a value only every few seconds, so that a rate is that of a window, not of two looks.
// A counter that has fallen is of a replica that has started anew: what it shows now was counted since. No DOM, no clock.

const WINDOW_S = 30;
const KEPT_S = 300;

export class Rates {
  #last = new Map();
  #looks = [];

  /** Args: `counters` as `parseExposition` gives them, `names` of those that are wanted. */
  look(metrics, names, nowS) {
    const isFirst = !this.#looks.length;
    const grown = new Map();
    const seen = new Map();
    for (const name of names) {
      for (const { key, labels, value } of metrics.get(name) ?? []) {
        const before = this.#last.get(key);
        const growth = before === undefined ? (isFirst ? 0 : value) : value >= before ? value - before : value;
        seen.set(key, value);
        if (growth) grown.set(key, { name, labels, growth });
      }
    }
    // A replica that is not listed for a moment has not started anew.
    for (const [key, value] of seen) this.#last.set(key, value);
    this.#looks.push({ at: nowS, grown });
    while (this.#looks[0].at < nowS - KEPT_S) this.#looks.shift();
  }

  /** A second's growth over the window; null before the second look. `accepts` chooses by labels. */
  rate(name, accepts = () => true, endAt = this.#looks.length - 1) {
    const end = this.#looks[endAt];
    if (!end) return null;
    let begin = endAt;
    let sum = 0;
    while (begin > 0 && end.at - this.#looks[begin].at < WINDOW_S) {
      for (const one of this.#looks[begin].grown.values()) if (one.name === name && accepts(one.labels)) sum += one.growth;
      begin -= 1;
    }
    const seconds = end.at - this.#looks[begin].at;
    return seconds > 0 ? sum / seconds : null;
  }

  /** The rate at each look that is kept, for a line. */
  history(name, accepts) {
    return this.#looks.map((_, at) => this.rate(name, accepts, at)).filter((value) => value !== null);
  }

  /** The values of a label that any growth had. */
  values(name, label) {
    const found = new Set();
    for (const { grown } of this.#looks) {
      for (const one of grown.values()) if (one.name === name) found.add(one.labels[label]);
    }
    return [...found].sort();
  }
}
