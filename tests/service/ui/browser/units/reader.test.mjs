// The parts of the reader that need no browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { align, BYTE_OF, piecesOf } from "../../../../../service/ui/page/reader/alignment.js";
import { linesOf, readJsonLines, rolloutAt } from "../../../../../service/ui/page/reader/data/jsonl.js";
import { plain, rolloutOf } from "../../../../../service/ui/page/reader/data/parquet.js";
import { flaw, GroupNumbers, rowOf } from "../../../../../service/ui/page/reader/data/rollout_row.js";
import { bound, clippedRatio, filtered } from "../../../../../service/ui/page/reader/filters.js";
import { binsOf } from "../../../../../service/ui/page/reader/histogram.js";
import { rewardsByTurn } from "../../../../../service/ui/page/reader/rewards.js";
import { isClipped, sharedMessages } from "../../../../../service/ui/page/reader/transcript.js";
import { namesOf } from "../../../../../service/ui/page/reader/vocabulary.js";

const CHARACTERS = Object.fromEntries([...BYTE_OF].map(([character, byte]) => [byte, character]));
const spelledIn = (text) => [...new TextEncoder().encode(text)].map((byte) => CHARACTERS[byte]).join("");
const texts = (pieces) => pieces.map(({ text, special }) => (special ? `<${text}>` : text));
const said = (content, token_ids) => ({ role: "assistant", content, token_ids, generation_logprobs: token_ids.map(() => -1) });

test("byte-level tokens are cut out of the content, with special tokens beside it", () => {
  const names = ["Hello", spelledIn(" wörld"), spelledIn("\n"), "<|end|>"];
  const { pieces, fits } = align(names, "Hello wörld\n");
  assert.deepEqual([texts(pieces), fits], [["Hello", " wörld", "\n", "<<|end|>>"], true]);
});

test("a character of several tokens is the text of the last of them", () => {
  const names = [...new TextEncoder().encode("é!")].map((byte) => CHARACTERS[byte]);
  assert.deepEqual(texts(align(names, "é!").pieces), ["", "é", "!"]);
});

test("tokens of SentencePiece have their spaces, bytes and the dropped space of the first one", () => {
  const { pieces, fits } = align(["▁Hello", "▁you", "<0x0A>", "</s>"], "Hello you\n");
  assert.deepEqual([texts(pieces), fits], [["Hello", " you", "\n", "<</s>>"], true]);
});

test("bytes that are no text do not keep what follows from fitting", () => {
  const { fits } = align([CHARACTERS[0xc3], "a", "b"], "\ufffdab");
  assert.equal(fits, true);
});

test("a vocabulary of another model gives no pieces", () => {
  const vocabulary = ["cat", "dog"];
  assert.equal(piecesOf([said("Hello", [0, 1])], vocabulary), null);
  assert.deepEqual(piecesOf([said("dogcat", [1, 0])], vocabulary).map(texts), [["dog", "cat"]]);
});

test("a prompt that a template has changed is spelled token by token, as the generated messages are", () => {
  const vocabulary = ["<|user|>", spelledIn(" tools:"), "Hi", "<|end|>"];
  const prompt = { role: "user", content: "Something else", token_ids: [0, 1, 2] };
  const pieces = piecesOf([prompt, said("Hi", [2, 3])], vocabulary);
  assert.deepEqual(pieces.map(texts), [["<|user|>", " tools:", "Hi"], ["Hi", "<<|end|>>"]]);
});

test("the names of a tokenizer.json are by id, those added included", () => {
  assert.deepEqual(namesOf({ model: { vocab: { a: 0, b: 1 } }, added_tokens: [{ id: 2, content: "<s>" }] }), ["a", "b", "<s>"]);
  assert.deepEqual(namesOf({ model: { vocab: [["a", -1], ["b", -2]] } }), ["a", "b"]);
  assert.throws(() => namesOf({}), /it has no model.vocab/);
});

const blob = (text) => new Blob([text]);
const collect = async (generator) => {
  const all = [];
  for await (const one of generator) all.push(one);
  return all;
};

test("lines are found by their bytes, also where a character or a line lies across chunks", async () => {
  const text = `${"ä".repeat(70_000)}\n\n{"a": "\u2028"}\nlast`;
  const file = blob(text);
  const lines = await collect(linesOf(file));
  assert.deepEqual(lines.map((line) => line.text), text.split("\n").filter(Boolean));
  for (const { text: line, start, end } of lines) assert.equal(await file.slice(start, end).text(), line);
});

test("a byte-order mark is no part of the first line", async () => {
  const rollout = { message_log: [], status: "completed", answer: "a\u2028b\u0085c" };
  const file = blob(`\ufeff${JSON.stringify(rollout)}\r\n${JSON.stringify(rollout)}\n`);
  const read = await collect(readJsonLines(file));
  assert.deepEqual(read.map(({ rollout: one }) => one), [rollout, rollout]);
  for (const { place } of read) assert.deepEqual(await rolloutAt(file, place), rollout);
});

test("each kind of file has its rollouts: lines, a stream that was saved, a whole answer", async () => {
  const rollout = { message_log: [], status: "completed" };
  const line = JSON.stringify(rollout);
  const read = await collect(readJsonLines(blob(`${line}\n{"summary": {"request_id": "r"}}\n`)));
  assert.deepEqual(read.map(({ rollout: one, summary }) => one ?? summary), [rollout, { request_id: "r" }]);
  assert.deepEqual(await rolloutAt(blob(line), read[0].place), rollout);
  const stream = await collect(readJsonLines(blob(`{"position": 0, "sample": ${line}}`)));
  assert.deepEqual(stream[0].rollout, rollout);
  const answer = await collect(readJsonLines(blob(`{"request_id": "r", "samples": [${line}, ${line}]}`)));
  assert.deepEqual(answer.map(({ rollout: one, summary }) => one ?? summary), [rollout, rollout, { request_id: "r" }]);
  const torn = await collect(readJsonLines(blob(`${line}\n{"message_log": [`)));
  assert.match(torn[1].flaw, /^line 2 is no JSON: /);
});

test("what is no rollout is told by what it lacks", () => {
  assert.deepEqual([[], {}, { message_log: [] }, { message_log: [], status: "x" }].map(flaw), ["it is no JSON object", "it has no message_log", "it has no status", null]);
});

test("a row of Parquet is the rollout again: numbers, no nulls, further fields and JSON texts", () => {
  const row = { idx: 3n, total_reward: null, error: null, extra_env_info: '{"a": null}', further_fields: '{"input_row": 5}', message_log: [{ token_ids: Int32Array.of(1, 2), reward: null }] };
  assert.deepEqual(rolloutOf(row), { idx: 3, total_reward: null, extra_env_info: { a: null }, input_row: 5, message_log: [{ token_ids: [1, 2] }] });
  assert.deepEqual(plain([1n, null]), [1, null]);
});

test("groups are those of one sample; a generation index that comes again begins another one", () => {
  const numbers = new GroupNumbers();
  const of = (idx, generation_index, more = {}) => numbers.of({ task_name: "t", idx, generation_index, ...more });
  assert.deepEqual([of(0, 0), of(0, 1), of(1, 0), of(1, 1), of(0, 0), of(0, 1)], [0, 0, 1, 1, 2, 2]);
  assert.deepEqual([of(0, 0, { input_row: 9 }), of(5, 1, { input_row: 9 })], [3, 3]);
  numbers.close();
  assert.equal(of(0, 3), 4);
});

test("a row counts turns, tokens and versions of what was generated alone", () => {
  const spans = [{ version: "6", start: 0, end: 1 }, { version: "run-b/7", start: 1, end: 2 }];
  const message_log = [{ role: "user", content: "Q", token_ids: [1, 2, 3] }, { ...said("A", [4, 5]), weight_versions: spans }];
  const row = rowOf({ message_log, status: "completed", idx: 4, generation_index: 2, task_name: "t", total_reward: 1 }, 7, 3);
  assert.deepEqual(row, { n: 7, group: 3, name: "4", generation: 2, task: "t", status: "completed", reward: 1, turns: 1, clipped: 0, finish: "none", tokens: 2, logprob: -1, versions: ["6", "run-b/7"], snippet: "A" });
});

test("a row has the finish reason of its last response, and how many their length has cut", () => {
  const log = (...reasons) => reasons.map((finish_reason) => ({ ...said("A", [4]), finish_reason }));
  const shown = (...reasons) => rowOf({ message_log: [...log(...reasons), { role: "user", content: "", token_ids: [1] }], status: "completed" }, 0, 0);
  const rows = [shown("length", "stop"), shown("length"), shown(undefined), shown()];
  assert.deepEqual(rows.map(({ finish, clipped }) => [finish, clipped]), [["stop", 1], ["length", 1], ["none", 0], ["none", 0]]);
  assert.deepEqual(filtered(rows, { finish: "length" }), [rows[1]]);
  assert.deepEqual([clippedRatio(rows), clippedRatio([])], [0.5, 0]);
  assert.deepEqual([log("length"), log("length", "stop"), []].map((message_log) => isClipped({ message_log })), [true, false, false]);
});

const ROWS = [0, 1, null, 0.5].map((reward, n) => ({ n, reward, task: n % 2 ? "a" : "b", status: "completed", tokens: n, logprob: -n }));
const listed = (filters, matches) => filtered(ROWS, filters, matches).map(({ n }) => n);

test("a rollout without a reward is outside of every range, and last in each order", () => {
  assert.deepEqual(listed({}), [0, 1, 2, 3]);
  assert.deepEqual(listed({ min: "-1" }), [0, 1, 3]);
  assert.deepEqual(listed({ min: "0.5", max: "1", task: "a" }), [1, 3]);
  assert.deepEqual(listed({ order: "lowest" }), [0, 3, 1, 2]);
  assert.deepEqual(listed({ order: "highest" }), [1, 3, 0, 2]);
  assert.deepEqual(listed({}, Uint8Array.of(0, 1, 1, 0)), [1, 2]);
  assert.deepEqual(["", " ", "x", "-0.5", undefined].map(bound), [null, null, null, -0.5, null]);
});

test("few different rewards have a bar each, many are put into bins that cover all of them", () => {
  assert.deepEqual(binsOf([1, 0, 1]), [{ from: 0, to: 0, size: 1 }, { from: 1, to: 1, size: 2 }]);
  const bins = binsOf(Array.from({ length: 1000 }, (_, at) => at / 999));
  assert.deepEqual([bins.length, bins.reduce((sum, { size }) => sum + size, 0), bins[0].from], [24, 1000, 0]);
  assert.deepEqual(binsOf([]), []);
});

test("a reward is of the turn of the last generation before it", () => {
  const log = [{ reward: null }, { ...said("A", [1]), reward: 0.5 }, { role: "user" }, said("B", [1]), { role: "tool", reward: 0 }];
  assert.deepEqual(rewardsByTurn(log), [{ turn: 1, message: 1, reward: 0.5 }, { turn: 2, message: 4, reward: 0 }]);
});

test("the messages that a group shares are those before the first generation that are alike", () => {
  const prompt = { role: "user", content: "Q" };
  assert.equal(sharedMessages([[prompt, said("A", [1])], [prompt, said("A", [1])]]), 1);
  assert.equal(sharedMessages([[prompt, prompt], [prompt, { role: "user", content: "R" }]]), 1);
  assert.equal(sharedMessages([[prompt]]), 0);
});
