// The rewards of a rollout, turn by turn. A click on a turn goes to its message.

import { h } from "../app/dom.js";
import { reward } from "../app/numbers.js";
import { isGenerated } from "./data/rollout_row.js";

/** `{turn, message, reward}` of each message that has a reward; the turn is that of the last generation. */
export function rewardsByTurn(messages) {
  const found = [];
  let turn = 0;
  messages.forEach((message, at) => {
    if (isGenerated(message)) turn += 1;
    if (message.reward !== null && message.reward !== undefined) found.push({ turn, message: at, reward: message.reward });
  });
  return found;
}

export function rewardsStrip(messages, onTurn) {
  const rewards = rewardsByTurn(messages);
  // A single reward stands at its message and at the top already.
  if (rewards.length < 2) return null;
  const largest = Math.max(...rewards.map((one) => Math.abs(one.reward)), Number.MIN_VALUE);
  return h(
    "ol",
    { class: "turns", "aria-label": "Rewards by turn" },
    ...rewards.map((one) => {
      const bar = h("span", { class: one.reward < 0 ? "turn-bar negative" : "turn-bar" });
      bar.style.height = `${Math.round((Math.abs(one.reward) / largest) * 22)}px`;
      const label = `Turn ${one.turn}: reward ${reward(one.reward)}`;
      return h(
        "li",
        {},
        h(
          "button",
          { type: "button", "aria-label": label, title: label, onclick: () => onTurn(one.message) },
          h("span", { class: "turn-room", "aria-hidden": "true" }, bar),
          h("span", { class: "turn-value" }, reward(one.reward)),
        ),
      );
    }),
  );
}
