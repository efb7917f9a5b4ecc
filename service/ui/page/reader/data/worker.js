// Holds the rollouts, off the page's main thread: reads files, searches in texts, hands out single rollouts.
// It has one source at a time under each name: "file" and "played". Counterpart: client.js.

import { readJsonLines, rolloutAt } from "./jsonl.js";
import { readParquet } from "./parquet.js";
import { GroupNumbers, flaw, rowOf, textOf } from "./rollout_row.js";

const FIRST_ROWS = 200;
const ROWS_OF_A_MESSAGE = 1000;

class Source {
  constructor(file = null) {
    this.file = file;
    this.held = [];
    this.texts = [];
    this.groups = new GroupNumbers();
  }

  /** Returns the row of a rollout that it takes in. */
  add(rollout, place) {
    const row = rowOf(rollout, this.held.length, this.groups.of(rollout));
    this.held.push(place ? { place } : { rollout });
    this.texts.push(textOf(rollout));
    return row;
  }

  async rollout(n) {
    const held = this.held[n];
    return held.rollout ?? (await rolloutAt(this.file, held.place));
  }
}

const sources = new Map();
let opening = 0;

function sourceOf(name) {
  if (!sources.has(name)) sources.set(name, new Source());
  return sources.get(name);
}

async function open({ file }, report) {
  const source = new Source(file);
  const turn = (opening += 1);
  sources.set("file", source);
  const reading = /\.parquet$/i.test(file.name) ? readParquet(file) : readJsonLines(file);
  let rows = [];
  let summary = null;
  let flaws = 0;
  let firstFlaw = null;
  for await (const read of reading) {
    if (turn !== opening) return { left: true };
    if (read.summary) summary = read.summary;
    const found = read.flaw ?? (read.rollout === undefined ? null : flawAt(read));
    if (found) {
      flaws += 1;
      firstFlaw ??= found;
    } else if (read.rollout !== undefined) {
      rows.push(source.add(read.rollout, read.place));
    }
    if (rows.length >= (source.held.length <= FIRST_ROWS ? FIRST_ROWS : ROWS_OF_A_MESSAGE)) {
      report({ rows });
      rows = [];
    }
  }
  report({ rows });
  return { summary, flaws, firstFlaw };
}

function flawAt({ rollout, where }) {
  const found = flaw(rollout);
  return found && `${where} is no rollout: ${found}`;
}

const doing = {
  open,
  add: ({ rollouts, begins }) => {
    const source = sourceOf("played");
    if (begins) source.groups.close();
    return { rows: rollouts.map((rollout) => source.add(rollout)) };
  },
  rollouts: async ({ source, numbers }) => Promise.all(numbers.map((n) => sourceOf(source).rollout(n))),
  search: ({ source, text }) => {
    const found = sourceOf(source).texts.map((one) => (one.includes(text) ? 1 : 0));
    return Uint8Array.from(found);
  },
};

addEventListener("message", async ({ data: { id, task, ...rest } }) => {
  try {
    postMessage({ id, result: await doing[task](rest, (progress) => postMessage({ id, progress })) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
});
postMessage({ ready: true });
