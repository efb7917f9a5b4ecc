// The tables and figures of the live view, as elements.

import { h } from "../app/dom.js";
import { ago, count, percent, plural, rate, reward, seconds } from "../app/numbers.js";
import { table } from "../app/table.js";
import { sparkline } from "./sparkline.js";

const orDash = (value) => (value === null ? "–" : count(value));

export function tile(label, value, { note = "", history = null } = {}) {
  return h(
    "div",
    { class: "tile" },
    h("dt", {}, label),
    h("dd", {}, h("span", { class: "tile-value" }, value), note ? h("span", { class: "small quiet" }, note) : null, history ? sparkline(history) : null),
  );
}

export function tiles(figures) {
  return h(
    "dl",
    { class: "tiles" },
    tile("rollouts/s", rate(figures.rollouts.rate), { note: figures.turns === null ? "" : `${rate(figures.turns)} turns/s`, history: figures.rollouts.history }),
    tile("tokens/s", rate(figures.tokens.rate), { history: figures.tokens.history }),
    tile("rollouts in flight", orDash(figures.inFlight)),
    tile("generations waiting", orDash(figures.waiting), { note: "for a place in an engine" }),
    tile("in the engines", orDash(figures.running), { note: figures.inEngines ? `${count(figures.inEngines)} more wait there` : "" }),
  );
}

export function replicaTable(records) {
  const columns = [["replica"], ["weights", true], ["tokens/s", true], ["running", true], ["waiting", true], ["KV cache", true]];
  columns.push(["programs kept", true], ["parked", true], ["recomputed/s", true]);
  const rows = records.map((one) => [
    h("code", { class: "id", title: one.id }, one.id),
    h("span", { class: one.accepts ? (one.isBehind ? "warn" : null) : "bad" }, one.accepts ? String(one.version) : `${one.version}, takes no requests`),
    rate(one.tokens),
    orDash(one.running),
    orDash(one.waiting),
    percent(one.cache),
    orDash(one.kept),
    orDash(one.parked),
    h("span", { title: "Prompt tokens that an earlier turn had computed" }, rate(one.recomputed)),
  ]);
  return table("Generator replicas", columns, rows, "No replicas are listed.");
}

export function taskTable(records) {
  const columns = [["task"], ["rollouts/s", true], ["tokens/s", true], ["mean reward", true], ["clipped", true], ["failed", true]];
  const rows = records.map((one) => [
    h("a", { href: `#play?task=${encodeURIComponent(one.name)}` }, one.name),
    rate(one.rollouts),
    rate(one.tokens),
    one.reward === null ? "–" : reward(one.reward),
    h("span", { title: "Responses that their length has cut" }, percent(one.clipped)),
    h("span", { class: one.failed > 0 ? "bad" : null }, percent(one.failed)),
  ]);
  return table("Tasks", columns, rows, "No tasks are listed.");
}

/** Args: `waiting` is the sum, null where the service does not say. */
export function queueTable(records, waiting) {
  if (!records.length) {
    return h("p", { class: "small quiet" }, waiting === null ? "The service shows no queue." : `${plural(waiting, "generation")} waiting.`);
  }
  const most = Math.max(1, ...records.map(([, size]) => size));
  const rows = records.map(([name, size]) => {
    const bar = h("span", { class: "queue-bar" });
    bar.style.width = `${(size / most) * 100}%`;
    return [name, count(size), h("span", { class: "queue-room", "aria-hidden": "true" }, bar)];
  });
  return table("Waiting generations by priority", [["priority"], ["waiting", true], [h("span", { class: "unseen" }, "share")]], rows, "");
}

const RECENT = 6;

export function policyElement(policy, age, now) {
  const newest = [...policy.versions].reverse().slice(0, RECENT);
  const rows = newest.map((one) => [
    h("span", { class: one.version === policy.current ? "current" : null }, String(one.version)),
    [one.kind, one.rollback_of === null || one.rollback_of === undefined ? "" : ` of ${one.rollback_of}`].join(""),
    one.size_bytes ? `${(one.size_bytes / 1e6).toFixed(1)} MB` : "–",
    ago(one.created_at, now),
  ]);
  const named = (policy.named ?? []).filter((one) => one.current !== null && one.current !== undefined);
  return h(
    "div",
    {},
    h(
      "p",
      { class: "current-version" },
      h("strong", {}, `Version ${policy.current}`),
      h("span", { class: "quiet" }, age === null ? "" : ` current for ${seconds(age)}`),
      policy.updating_to === null || policy.updating_to === undefined ? null : h("span", { class: "warn" }, ` · loading ${policy.updating_to}`),
    ),
    table("Versions of the policy", [["version"], ["kind"], ["size", true], ["arrived", true]], rows, "No versions are known."),
    named.length ? h("p", { class: "small quiet" }, `Named policies: ${named.map((one) => `${one.name} ${one.current}`).join(", ")}`) : null,
    (policy.uploads ?? []).length ? h("p", { class: "small quiet" }, `Uploads: ${policy.uploads.map((one) => `version ${one.version}, ${(one.received_bytes / 1e6).toFixed(1)} MB arrived`).join("; ")}`) : null,
  );
}

export function readinessElement(ready) {
  if (ready.problem) return h("p", { class: "readiness" }, h("strong", { class: "bad" }, "Not ready"), ` ${ready.problem}`);
  if (!ready.degraded.length) return h("p", { class: "readiness" }, h("strong", { class: "good" }, "Ready"), h("span", { class: "quiet" }, " Every deployment answers."));
  return h(
    "div",
    { class: "readiness" },
    h("p", {}, h("strong", { class: "warn" }, "Degraded"), " Rollouts are played without what does not answer:"),
    h("ul", {}, ...ready.degraded.map((one) => h("li", {}, [one.part, one.task_name, one.replica_id].filter(Boolean).join(" "), `: ${one.reason}`))),
  );
}
