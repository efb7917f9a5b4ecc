// One message of a transcript: who speaks, what was said, how it ended, and its reward.

import { h } from "../app/dom.js";
import { reward } from "../app/numbers.js";
import { isGenerated, isTrained } from "./data/rollout_row.js";
import { picturesOf } from "./pictures.js";
import { tokensOf } from "./tokens.js";

/** Args: `look` as for `tokensOf`, `brief` for a narrow column; `at` is the place of the message in its log. */
export function messageElement(message, at, pieces, look) {
  const generated = isGenerated(message);
  const element = h(
    "li",
    { class: `message ${generated ? "generated" : "given"} ${message.role}`, "data-message": at },
    h(
      "div",
      { class: "message-head" },
      h("h3", {}, message.name ? `${message.role} · ${message.name}` : message.role),
      h("span", { class: "small quiet" }, (look.brief ? notes(message).slice(0, 1) : notes(message)).join(" · ")),
      message.reward !== null && message.reward !== undefined
        ? h("span", { class: `reward-note ${message.reward < 0 ? "bad" : message.reward > 0 ? "good" : "quiet"}` }, `reward ${reward(message.reward)}`)
        : null,
    ),
  );
  element.append(...picturesOf(message));
  const asTokens = message.token_ids.length > 0 && (look.mask || (generated && look.colour !== "none"));
  if (!asTokens || !pieces) element.append(h("div", { class: "content" }, message.content ?? ""));
  if (asTokens) element.append(tokensOf(message, pieces, look));
  if (!generated && message.reasoning_content) element.append(labelled("reasoning", message.reasoning_content));
  for (const call of message.tool_calls ?? []) element.append(labelled(`calls ${call.function?.name ?? ""}`, argumentsOf(call)));
  if (message.parse_error) element.append(h("p", { class: "small bad" }, `Not understood: ${message.parse_error}`));
  return element;
}

function notes(message) {
  const parts = [];
  if (isGenerated(message)) {
    parts.push(`${message.token_ids.length} tokens`);
    if (message.finish_reason) parts.push(message.finish_reason);
    else parts.push("interrupted");
    const { generation_logprobs: logprobs } = message;
    if (logprobs.length) {
      const mean = logprobs.reduce((sum, one) => sum + one, 0) / logprobs.length;
      parts.push(`mean logprob ${mean.toFixed(3)}`);
    }
    if (!isTrained(message)) parts.push("not in the loss");
  } else if (message.token_ids.length) {
    parts.push(`${message.token_ids.length} tokens`, "not in the loss");
  }
  return parts;
}

function argumentsOf(call) {
  const given = call.function?.arguments ?? call;
  return typeof given === "string" ? given : JSON.stringify(given);
}

function labelled(label, text) {
  return h("div", { class: "aside" }, h("span", { class: "small quiet" }, label), h("div", { class: "content" }, text));
}
