// The tokens of one message as elements, coloured, with the loss mask.

import { h } from "../app/dom.js";
import { isGenerated, isTrained } from "./data/rollout_row.js";
import { ratio } from "../app/numbers.js";
import { ratioOf, stepOf, stepOfRatio, versionsOf } from "./colours.js";

/**
 * @param pieces of `piecesOf`, null to show ids
 * @param look `{colour: "none" | "logprob" | "version" | "ratio", mask, versions}`; a ratio needs `trainer_logprobs` of
 *  the message, which `story/record.js` adds
 */
export function tokensOf(message, pieces, look) {
  const generated = isGenerated(message);
  const versions = look.colour === "version" ? versionsOf(message) : null;
  const parts = document.createElement("div");
  parts.className = pieces ? "tokens" : "tokens ids";
  message.token_ids.forEach((id, at) => {
    const part = document.createElement("span");
    const piece = pieces?.[at];
    let classes = "t";
    if (piece?.special) classes += " special";
    if (piece && !piece.special && piece.text.includes("\n")) classes += " newline";
    if (piece && piece.text === "") classes += " within";
    if (generated && look.colour === "logprob") classes += ` p${stepOf(message.generation_logprobs[at])}`;
    if (generated && look.colour === "ratio" && message.trainer_logprobs?.[at] !== undefined) {
      classes += ` p${stepOfRatio(ratioOf(message.generation_logprobs[at], message.trainer_logprobs[at]))}`;
    }
    if (generated && versions && versions[at] !== null) classes += ` v${look.versions.of(versions[at])}`;
    if (look.mask) classes += isTrained(message) ? " trained" : " masked";
    part.className = classes;
    part.dataset.at = at;
    part.textContent = piece ? (piece.special ? piece.text.replaceAll("\n", "↵") : piece.text) : String(id);
    parts.append(part, pieces ? "" : " ");
  });
  return parts;
}

/** One token in words. */
export function described(message, pieces, at) {
  const logprob = message.generation_logprobs?.[at];
  const parts = [`token ${at + 1} of ${message.token_ids.length}`];
  if (pieces) parts.push(pieces[at].text === "" ? "part of a character" : JSON.stringify(pieces[at].text));
  parts.push(`id ${message.token_ids[at]}`);
  if (logprob === undefined) {
    parts.push("not in the loss");
  } else {
    parts.push(`log-probability ${logprob.toFixed(4)} (${(Math.exp(logprob) * 100).toFixed(1)}%)`);
    const version = versionsOf(message)[at];
    if (version !== null) parts.push(`weight version ${version}`);
    const replica = message.made?.find(({ start, end }) => start <= at && at < end)?.replica;
    if (replica) parts.push(`replica ${replica}`);
    const trained = message.trainer_logprobs?.[at];
    if (trained !== undefined) parts.push(`the trainer's ${trained.toFixed(4)}`, `ratio ${ratio(ratioOf(logprob, trained))}`);
    parts.push(isTrained(message) ? "in the loss" : "not in the loss");
  }
  return parts.join(" · ");
}

/** What of a rollout is trained, as a bar from its first token to its last. */
export function maskBar(messages) {
  const total = messages.reduce((sum, message) => sum + message.token_ids.length, 0);
  const trained = messages.reduce((sum, message) => sum + (isTrained(message) ? message.token_ids.length : 0), 0);
  const label = `Loss mask: ${trained} of ${total} tokens are in the loss`;
  const bar = h("div", { class: "mask-bar", role: "img", "aria-label": label, title: label });
  for (const message of messages) {
    if (!message.token_ids.length) continue;
    const part = h("span", { class: isTrained(message) ? "trained" : "masked" });
    part.style.flexGrow = message.token_ids.length;
    bar.append(part);
  }
  return bar;
}
