// What the two views of records share: links to stories, and what to do where there is no answer.

import { h } from "../app/dom.js";
import { format } from "../app/link.js";

const NOT_CONFIGURED = 501;

export function storyLink(rolloutId) {
  return h("a", { class: "id story-link", href: format("rollouts", { rollout: rolloutId }), title: rolloutId }, rolloutId);
}

/** Why nothing is shown, as an element; what to configure where the service keeps no records. */
export function refusal(problem) {
  if (problem.status !== NOT_CONFIGURED) return h("p", { class: "notice bad" }, problem.message);
  return h(
    "div",
    { class: "notice" },
    h("p", {}, "This service keeps no records of rollouts. Add this to the arguments of the application in its config, and start it anew:"),
    h("pre", { class: "config" }, "rollout_records: {}"),
  );
}

export function panel(title, ...content) {
  return h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), ...content);
}
