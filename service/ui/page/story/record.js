// What a story shows, from the record of `GET /rollouts/{rollout_id}`. Pure functions.

import { isCompared, isGenerated } from "../reader/data/rollout_row.js";

/** The turn of each message of a log; null for those that were not generated. */
export function turnsOf(messages) {
  let turn = -1;
  return messages.map((message) => (isGenerated(message) ? (turn += 1) : null));
}

/** The versions of the weights that made tokens `[start, end)` of a message. */
function versionsBetween(message, start, end) {
  const spans = (message?.weight_versions ?? []).filter((span) => span.start < end && start < span.end);
  return [...new Set(spans.map(({ version }) => String(version)))];
}

/**
 * What happened, in order: generations, steps and retries.
 *
 * @returns of each `{kind: "generation" | "step" | "retry", turn, at, waited, took, made, versions, note}`: seconds, `at`
 *  since 1970, null where it is not known
 */
export function eventsOf(record) {
  const messages = record.rollout.message_log;
  const turns = turnsOf(messages);
  const events = (record.generations ?? []).map((made) => ({
    kind: "generation",
    turn: turns[made.message] ?? null,
    at: made.began_at ?? null,
    waited: made.waited_s ?? 0,
    took: made.took_s ?? 0,
    made,
    versions: versionsBetween(messages[made.message], made.start, made.end),
    note: "",
  }));
  for (const { turn, began_at: at, took_s: took } of record.steps ?? []) {
    const last = events.findLastIndex((event) => event.turn <= turn);
    events.splice(last + 1, 0, { kind: "step", turn, at, waited: 0, took, made: null, versions: [], note: "" });
  }
  for (const { at, kind, message } of record.retries ?? []) {
    const next = events.findIndex((event) => event.at !== null && event.at > at);
    const retry = { kind: "retry", turn: null, at, waited: 0, took: 0, made: null, versions: [], note: `${kind}: ${message}` };
    events.splice(next < 0 ? events.length : next, 0, retry);
  }
  return events;
}

/** How long a rollout took, and how much of that was in the queue, in engines and in steps; null where nothing says. */
export function timesOf(record) {
  const events = eventsOf(record);
  const sum = (kind, field) => events.filter((event) => event.kind === kind).reduce((total, event) => total + event[field], 0);
  const has = (kind) => events.some((event) => event.kind === kind);
  return {
    all: typeof record.began_at === "number" ? record.ended_at - record.began_at : null,
    queue: has("generation") ? sum("generation", "waited") : null,
    engine: has("generation") ? sum("generation", "took") : null,
    steps: has("step") ? sum("step", "took") : null,
  };
}

/** Where an event is between the beginning of its rollout and its end, as shares of 1; null where nothing says. */
export function placeOf(event, record) {
  const whole = record.ended_at - record.began_at;
  if (event.at === null || !(whole > 0)) return null;
  const within = (share) => Math.min(1, Math.max(0, share));
  const begin = within((event.at - record.began_at) / whole);
  const turn = within((event.at + event.waited - record.began_at) / whole);
  const end = within((event.at + event.waited + event.took - record.began_at) / whole);
  return { begin, waited: turn - begin, took: end - turn };
}

/**
 * The rollout, whose generated messages also have `made` (what made their tokens `[start, end)`) and, where a trainer's
 * report was compared with them, `trainer_logprobs`: undefined for a token that it has left out.
 */
export function explained({ rollout, generations = [], mismatch = null }) {
  let next = -(mismatch?.start ?? 0);
  const messages = rollout.message_log.map((message, at) => {
    if (!isGenerated(message)) return message;
    const made = generations.filter((one) => one.message === at);
    if (!mismatch || !isCompared(message)) return { ...message, made };
    return { ...message, made, trainer_logprobs: message.token_ids.map(() => mismatch.logprobs[next++]) };
  });
  return { ...rollout, message_log: messages };
}
