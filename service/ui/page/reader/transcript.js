// One rollout, or the rollouts of a group side by side: what was said, and the figures of each.

import { h } from "../app/dom.js";
import { count, plural, reward } from "../app/numbers.js";
import { isGenerated } from "./data/rollout_row.js";
import { piecesOf } from "./alignment.js";
import { messageElement } from "./message.js";
import { rewardsStrip } from "./rewards.js";
import { maskBar } from "./tokens.js";

export const STATUS_CLASSES = { completed: "good", error: "bad" };

/** How many messages all of these logs begin with: the prompt that the rollouts of a group share. */
export function sharedMessages(logs) {
  if (logs.length < 2) return 0;
  const [first] = logs;
  let shared = 0;
  while (
    logs.every((log) => {
      const message = log[shared];
      return message && !isGenerated(message) && message.role === first[shared].role && message.content === first[shared].content;
    })
  ) {
    shared += 1;
  }
  return shared;
}

/** Returns `{element, messages}`; `messages` gives for an element's `data-rollout` what its tokens are of. */
export function rolloutElement(rollout, vocabulary, look, { number = 0, skip = 0, isColumn = false } = {}) {
  const messages = rollout.message_log;
  const ofMessages = { ...look, brief: isColumn };
  const shown = { messages, pieces: needsPieces(look) && vocabulary ? piecesOf(messages, vocabulary) : null };
  const list = h("ol", { class: "messages", "data-rollout": number });
  messages.forEach((message, at) => {
    if (at >= skip) list.append(messageElement(message, at, shown.pieces?.[at] ?? null, ofMessages));
  });
  const goTo = (at) => list.querySelector(`[data-message="${at}"]`)?.scrollIntoView({ block: "center" });
  const element = h(
    "article",
    { class: "rollout", "aria-label": `Rollout ${nameOf(rollout)}` },
    headOf(rollout, isColumn),
    rewardsStrip(messages, goTo),
    look.mask ? maskBar(messages) : null,
    unknownTokens(look, shown.pieces, vocabulary, messages),
    list,
    rollout.error ? h("p", { class: "failure" }, h("strong", {}, rollout.error.kind), ` ${rollout.error.message}`) : null,
    ...branchesOf(rollout, vocabulary, look),
    rawOf(rollout),
  );
  return { element, shown };
}

function needsPieces(look) {
  return look.mask || look.colour !== "none";
}

/** Whether its length has cut the last response. */
export function isClipped({ message_log: log }) {
  return log.findLast(isGenerated)?.finish_reason === "length";
}

export function nameOf(rollout) {
  return `${rollout.id ?? rollout.idx ?? ""} · generation ${rollout.generation_index ?? 0}`;
}

/** A column of a group says what differs within it. */
function headOf(rollout, isColumn) {
  const { metrics = {} } = rollout;
  const versions = [...new Set(rollout.message_log.flatMap((message) => (message.weight_versions ?? []).map((span) => String(span.version))))];
  const figures = [
    plural(rollout.message_log.filter(isGenerated).length, "turn"),
    metrics.assistant_tokens === undefined ? null : `${count(metrics.assistant_tokens)} tokens generated`,
    metrics.env_tokens ? `${count(metrics.env_tokens)} of the environment` : null,
    versions.length ? `weights ${versions.join(", ")}` : null,
    rollout.answer !== null && rollout.answer !== undefined ? `answer ${rollout.answer}` : null,
  ];
  const named = Object.entries(rollout.rewards ?? {}).filter(([name]) => name !== "reward");
  const environment = Object.entries(metrics.environment ?? {});
  return h(
    "header",
    { class: "rollout-head" },
    h(
      "div",
      {},
      isColumn ? h("h3", {}, `generation ${rollout.generation_index ?? 0}`) : h("h2", {}, nameOf(rollout)),
      h("p", { class: "small quiet" }, (isColumn ? figures.slice(0, 2) : [rollout.task_name, ...figures]).filter(Boolean).join(" · ")),
    ),
    h(
      "p",
      { class: "outcome" },
      h("span", { class: `status ${STATUS_CLASSES[rollout.status] ?? "warn"}` }, rollout.status),
      isClipped(rollout) ? h("span", { class: "status warn", title: "Its length has cut the last response" }, "clipped") : null,
      h("span", { class: "total", title: "Total reward" }, rollout.total_reward === null || rollout.total_reward === undefined ? "no reward" : reward(rollout.total_reward)),
    ),
    named.length + environment.length
      ? h("p", { class: "small quiet figures" }, [...named.map(([name, value]) => `${name} ${reward(value)}`), ...environment.map(([name, value]) => `${name} ${reward(value)}`)].join(" · "))
      : null,
  );
}

function unknownTokens(look, pieces, vocabulary, messages) {
  if (!needsPieces(look) || pieces || !messages.some((message) => message.token_ids.length)) return null;
  const why = vocabulary
    ? "The service's vocabulary does not fit this text: the rollout is of another model."
    : "No vocabulary is known here.";
  return h("p", { class: "small quiet" }, `${why} Tokens are shown by their ids. Drop the model's tokenizer.json on the page to see their texts.`);
}

function branchesOf(rollout, vocabulary, look) {
  return (rollout.branches ?? []).map((branch, at) => {
    const list = h("ol", { class: "messages" });
    const pieces = needsPieces(look) && vocabulary ? piecesOf(branch.message_log, vocabulary) : null;
    branch.message_log.forEach((message, place) => list.append(messageElement(message, place, pieces?.[place] ?? null, look)));
    return h("details", { class: "branch" }, h("summary", {}, `Branch ${at + 1}: ${plural(branch.message_log.length, "message")}`), list);
  });
}

/** All fields of the rollout, made when they are asked for. */
function rawOf(rollout) {
  const text = h("pre", { tabindex: "0", "aria-label": "JSON of the rollout" });
  const details = h("details", { class: "raw" }, h("summary", {}, "JSON"), text);
  details.addEventListener("toggle", () => {
    if (details.open && !text.textContent) text.textContent = JSON.stringify(rollout, null, 1);
  });
  return details;
}
