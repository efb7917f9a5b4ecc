// The parts of the live state, of the playground and of links that need no browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { format, parse } from "../../../../../service/ui/page/app/link.js";
import { ago } from "../../../../../service/ui/page/app/numbers.js";
import { byLabel, parseExposition, total } from "../../../../../service/ui/page/live/exposition.js";
import { COUNTERS, queue, replicas, tasks } from "../../../../../service/ui/page/live/figures.js";
import { Rates } from "../../../../../service/ui/page/live/rates.js";
import { firstFlaw } from "../../../../../service/ui/page/play/json_place.js";

test("a link says what it was made of, whatever text a filter has", () => {
  const values = { file: "a b&c.jsonl", rollout: "17", q: "100% #?=\n\\boxed{é}" };
  assert.deepEqual(parse(format("reader", values)), { view: "reader", values });
  assert.equal(format("reader", { q: "", task: null, rollout: undefined, mask: "1" }), "#reader?mask=1");
  assert.deepEqual(parse("#unknown?x=1").view, "live");
  assert.deepEqual(parse(""), { view: "live", values: {} });
});

test("metrics are read with their labels; buckets and comments are left out", () => {
  const metrics = parseExposition('# TYPE ray_a gauge\nray_a{x="1",y="a\\"b\\\\n"} 2.5\nray_a{x="2",y=""} 1 1700000000\nray_h_bucket{le="+Inf"} 3\nplain 4\nray_a{x="3"} +Inf\nnonsense\n');
  assert.deepEqual([...metrics.keys()], ["a", "plain"]);
  assert.deepEqual(metrics.get("a").slice(0, 2).map(({ labels, value }) => [labels, value]), [[{ x: "1", y: 'a"b\\n' }, 2.5], [{ x: "2", y: "" }, 1]]);
  assert.equal(total(metrics, "plain"), 4);
  assert.equal(total(metrics, "a", { x: "2" }), 1);
  assert.equal(total(metrics, "none"), null);
  assert.deepEqual([...byLabel(parseExposition('m{p="a",r="1"} 1\nm{p="a",r="2"} 2\nm{r="3"} 9'), "m", "p")], [["a", 3]]);
});

const counter = (...values) => parseExposition(values.map(([labels, value]) => `ray_c{${labels}} ${value}`).join("\n"));

test("a rate is the growth over the last 30 seconds, of all replicas", () => {
  const rates = new Rates();
  rates.look(counter(['r="1"', 100], ['r="2"', 50]), ["c"], 0);
  assert.equal(rates.rate("c"), null);
  rates.look(counter(['r="1"', 110], ['r="2"', 60]), ["c"], 10);
  assert.equal(rates.rate("c"), 2);
  assert.equal(rates.rate("c", ({ r }) => r === "1"), 1);
  for (const at of [20, 30, 40, 50]) rates.look(counter(['r="1"', 110], ['r="2"', 60]), ["c"], at);
  assert.equal(rates.rate("c"), 0);
  assert.deepEqual(rates.history("c"), [2, 1, 20 / 30, 0, 0]);
});

test("a counter that fell has started anew, and one that is new began at 0", () => {
  const rates = new Rates();
  rates.look(counter(['r="1"', 100]), ["c"], 0);
  rates.look(counter(['r="1"', 5], ['r="2"', 10]), ["c"], 10);
  assert.equal(rates.rate("c"), 1.5);
  rates.look(counter(), ["c"], 20);
  rates.look(counter(['r="1"', 5], ['r="2"', 10]), ["c"], 25);
  assert.equal(rates.rate("c"), 15 / 25);
});

test("the queue has the most urgent priority first, and is empty where the service does not say", () => {
  const shown = parseExposition('w{p="x"} 1\nray_rollout_waiting_by_priority{priority="batch"} 1\nray_rollout_waiting_by_priority{priority="other"} 2\nray_rollout_waiting_by_priority{priority="interactive"} 0');
  assert.deepEqual(queue(shown), [["interactive", 0], ["batch", 1], ["other", 2]]);
  assert.deepEqual(queue(new Map()), []);
});

test("a replica has its weights by the policy and its load by its engine; what is not known is null", () => {
  const policy = { current: 7, replicas: [{ replica_id: "a", version: 7 }, { replica_id: "b", version: 6, accepts_requests: false }] };
  const programs = 'ray_rollout_kept_programs{generator="a"} 5\nray_rollout_parked_programs{generator="a"} 2';
  const metrics = parseExposition(`ray_vllm_num_requests_running{ReplicaId="a"} 3\n${programs}`);
  const [a, b] = replicas(policy, metrics, new Rates());
  assert.deepEqual([a.version, a.isBehind, a.accepts, a.running, a.cache, a.tokens], [7, false, true, 3, null, null]);
  assert.deepEqual([a.kept, a.parked, b.kept, b.parked], [5, 2, null, null]);
  assert.deepEqual([b.version, b.isBehind, b.accepts, b.running], [6, true, false, null]);
  assert.deepEqual(replicas(undefined, metrics, new Rates()), []);
});

test("the mean reward of a task is that of the rollouts that have one", () => {
  const of = (completed, failed, positive, negative) =>
    parseExposition(
      `ray_rollout_rollouts_total{task_name="t",status="completed"} ${completed}\nray_rollout_rollouts_total{task_name="t",status="error"} ${failed}\n` +
        `ray_rollout_reward_sums_total{task_name="t",sign="positive"} ${positive}\nray_rollout_reward_sums_total{task_name="t",sign="negative"} ${negative}`,
    );
  const rates = new Rates();
  const names = ["rollout_rollouts_total", "rollout_reward_sums_total"];
  rates.look(of(0, 0, 0, 0), names, 0);
  rates.look(of(5, 5, 5, 0), names, 10);
  const [known, other] = tasks(["t", "z"], rates);
  assert.deepEqual([known.rollouts, known.failed, known.reward], [1, 0.5, 1]);
  assert.deepEqual([other.rollouts, other.failed, other.reward], [0, null, null]);
});

test("a task has the share of its responses that their length has cut, 0 before there was one", () => {
  const of = (turns, clipped) => parseExposition(`ray_rollout_turns_total{task_name="t"} ${turns}${clipped ? `\nray_rollout_clipped_turns_total{task_name="t"} ${clipped}` : ""}`);
  const rates = new Rates();
  rates.look(of(0), COUNTERS, 0);
  assert.deepEqual(tasks(["t"], rates)[0].clipped, null);
  rates.look(of(8), COUNTERS, 10);
  assert.deepEqual(tasks(["t"], rates)[0].clipped, 0);
  rates.look(of(16, 4), COUNTERS, 20);
  assert.deepEqual(tasks(["t"], rates)[0].clipped, 0.25);
});

for (const [text, line, column, wanted] of [
  ['{"a": }', 1, 7, "a value"],
  ['{\n  "a": 1\n  "b": 2\n}', 3, 3, "a comma or }"],
  ["[1, 2", 1, 6, "a comma or ]"],
  ['{"a": 1,}', 1, 9, 'a name in " "'],
  ['{"a" 1}', 1, 6, "a colon"],
  ['{"a": "b\n"}', 1, 7, "a text that ends"],
  ["{} {}", 1, 4, "the end"],
  ["", 1, 1, "a value"],
  ["[01]", 1, 3, "a comma or ]"],
]) {
  test(`the first place that is no JSON is found: ${JSON.stringify(text)}`, () => {
    assert.throws(() => JSON.parse(text));
    assert.deepEqual(firstFlaw(text), { line, column, wanted });
  });
}

test("a time that nobody knows was not long ago", () => {
  const now = Date.parse("2026-11-28T00:01:00Z");
  assert.equal(ago("2026-11-28T00:00:20Z", now), "40 s ago");
  assert.equal(ago("2026-11-28T00:02:00Z", now), "0 s ago");
  assert.deepEqual([ago(null, now), ago(undefined, now)], ["–", "–"]);
});
