// What happened to a rollout, a row each: waiting, generating and stepping as bars over the time that it took.

import { h } from "../app/dom.js";
import { count, duration } from "../app/numbers.js";
import { table } from "../app/table.js";
import { eventsOf, placeOf } from "./record.js";

const COLUMNS = [["turn", true], ["what"], ["timeline"], ["waited", true], ["took", true], ["tokens", true], ["replica"], ["cached", true], ["batch", true], ["weights"], ["note"]];

export function timeline(record) {
  const rows = eventsOf(record).map((event) => rowOf(event, record));
  return table("Timeline", COLUMNS, rows, "Nothing is known of its generations.", { scrolls: true });
}

function rowOf(event, record) {
  const { made, kind } = event;
  const known = (value, write) => (made ? write(value) : "");
  return [
    event.turn === null ? "" : count(event.turn + 1),
    h("span", { class: kind === "retry" ? "warn" : null }, kind),
    bar(placeOf(event, record), kind),
    known(event.waited, duration),
    kind === "retry" ? "" : duration(event.took),
    known(made?.end - made?.start, count),
    made ? h("code", { class: "id", title: made.replica }, made.replica || "unknown") : "",
    known(made?.cached_tokens, (value) => count(value ?? 0)),
    known(made?.batch_size, (value) => (value ? count(value) : "–")),
    event.versions.join(", "),
    h("span", { class: kind === "retry" || event.note ? "warn" : null }, event.note),
  ];
}

function bar(place, kind) {
  if (!place) return h("span", { class: "time-room", "aria-hidden": "true" });
  const [waited, took] = [h("span", { class: "time waited" }), h("span", { class: `time ${kind}` })];
  waited.style.marginLeft = `${place.begin * 100}%`;
  waited.style.width = `${place.waited * 100}%`;
  took.style.width = `${place.took * 100}%`;
  return h("span", { class: "time-room", "aria-hidden": "true" }, waited, took);
}

export function timelineLegend() {
  const parts = [["waited", "in the queue"], ["generation", "in an engine"], ["step", "a step of the environment"], ["retry", "a call that was made again"]];
  return h("ul", { class: "legend", "aria-label": "Bars" }, ...parts.map(([kind, label]) => h("li", {}, h("span", { class: `time ${kind}`, "aria-hidden": "true" }), ` ${label}`)));
}
