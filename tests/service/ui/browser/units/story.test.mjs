// The parts of stories and of the mismatch ledger that need no browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { duration, ratio } from "../../../../../service/ui/page/app/numbers.js";
import { ratioOf, stepOfRatio } from "../../../../../service/ui/page/reader/colours.js";
import { isCompared, isTrained } from "../../../../../service/ui/page/reader/data/rollout_row.js";
import { attributesOf } from "../../../../../service/ui/page/story/ledger.js";
import { eventsOf, explained, placeOf, timesOf } from "../../../../../service/ui/page/story/record.js";

const made = (message, at, fields = {}) => ({ message, start: 0, end: 2, replica: "a", began_at: at, waited_s: 1, took_s: 2, ...fields });
const generated = (...spans) => ({ generation_logprobs: [-1, -2], token_ids: [1, 2], weight_versions: spans.map(([version, start, end]) => ({ version, start, end })) });
const RECORD = {
  rollout: { message_log: [{ token_ids: [5] }, generated(["6", 0, 1], ["7", 1, 2]), { token_ids: [6] }, generated(["7", 0, 2])] },
  began_at: 100,
  ended_at: 110,
  generations: [made(1, 100), made(3, 104, { end: 1 }), made(3, 107.5, { start: 1, replica: "b" })],
  steps: [{ turn: 0, began_at: 103, took_s: 0.5 }],
  retries: [{ at: 107.2, kind: "generation", message: "It died." }],
};

test("what happened is in order: each step after its turn, each retry before what came after it", () => {
  assert.deepEqual(
    eventsOf(RECORD).map(({ kind, turn, versions, note }) => [kind, turn, versions.join(), note]),
    [
      ["generation", 0, "6,7", ""],
      ["step", 0, "", ""],
      ["generation", 1, "7", ""],
      ["retry", null, "", "generation: It died."],
      ["generation", 1, "7", ""],
    ],
  );
});

test("the time of a rollout is divided into the queue, engines and steps; what nothing says is null", () => {
  assert.deepEqual(timesOf(RECORD), { all: 10, queue: 3, engine: 6, steps: 0.5 });
  const unknown = { rollout: { message_log: [] }, ended_at: 110 };
  assert.deepEqual(timesOf(unknown), { all: null, queue: null, engine: null, steps: null });
});

test("a bar lies where its time is, and within the whole", () => {
  const [first, step] = eventsOf(RECORD);
  assert.deepEqual(placeOf(first, RECORD), { begin: 0, waited: 0.1, took: 0.19999999999999998 });
  assert.equal(placeOf(step, RECORD).begin, 0.3);
  const { begin, waited, took } = placeOf({ at: 109, waited: 5, took: 5 }, RECORD);
  assert.ok(Math.abs(begin + waited + took - 1) < 1e-9);
  assert.equal(placeOf({ at: null, waited: 0, took: 0 }, RECORD), null);
  assert.equal(placeOf(first, { ...RECORD, began_at: null, ended_at: 0 }), null);
});

test("each generated message gets its own part of the trainer's numbers, and what made it", () => {
  const { message_log: messages } = explained({ ...RECORD, mismatch: { logprobs: [-1, -2, -3, -4] } });
  assert.deepEqual(messages.map(({ trainer_logprobs: logprobs }) => logprobs), [undefined, [-1, -2], undefined, [-3, -4]]);
  assert.deepEqual(messages[3].made.map(({ replica }) => replica), ["a", "b"]);
  assert.equal(explained(RECORD).message_log[1].trainer_logprobs, undefined);
});

test("numbers of the trainer belong to the messages that are compared, from the token on at which they start", () => {
  const forced = { ...generated(), constrained: true };
  const log = [forced, generated(), { ...generated(), sampled_with: { temperature: 0.5 } }, generated()];
  const explain = (mismatch) => explained({ rollout: { message_log: log }, mismatch }).message_log.map((message) => message.trainer_logprobs);
  assert.deepEqual(explain({ logprobs: [-1, -2, -3, -4] }), [undefined, [-1, -2], undefined, [-3, -4]]);
  assert.deepEqual(explain({ logprobs: [-2, -3], start: 1 }), [undefined, [undefined, -2], undefined, [-3, undefined]]);
});

test("a response is in the loss unless it was bound, or greedy in a request that samples", () => {
  assert.deepEqual(
    [{}, { constrained: true }, { constrained: null, sampled_with: null }, { sampled_with: { temperature: 0 } }, { sampled_with: { temperature: 0.5 } }].map((fields) => [
      isTrained({ ...generated(), ...fields }),
      isCompared({ ...generated(), ...fields }),
    ]),
    [[true, true], [false, false], [true, true], [false, false], [true, false]],
  );
  assert.equal(isTrained({ token_ids: [1] }), false);
});

test("a ratio is at least 1, whoever has the larger number, and has the colour of its step", () => {
  assert.equal(ratioOf(-1, -1), 1);
  assert.equal(ratioOf(-1, -2), ratioOf(-2, -1));
  assert.deepEqual([1, 1.02, 1.4, 1.5, 4.9, 5, Infinity].map(stepOfRatio), [0, 1, 2, 3, 4, 5, 5]);
});

test("ratios and durations are short", () => {
  assert.deepEqual([1, 1.0234, 12.345, null].map(ratio), ["1.000", "1.023", "12.3", "–"]);
  assert.deepEqual([0.0123, 0.9999, 1.234, 300, null].map(duration), ["12.3 ms", "1 s", "1.23 s", "5 min", "–"]);
});

test("attributes are compared where they have several values", () => {
  const sums = (mean) => ({ tokens: 1, mean_ratio: mean, largest_ratio: mean });
  const shown = attributesOf({ replica: { a: sums(1), b: sums(2) }, version: { 7: sums(1) } });
  assert.deepEqual(shown.map(([name, cells]) => [name, cells.map(([value]) => value)]), [["replica", ["b", "a"]]]);
});
