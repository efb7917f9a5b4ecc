// The token that is looked at: under the pointer, or where the arrow keys have gone. Its figures are in one line.

import { announce } from "../app/announce.js";
import { h } from "../app/dom.js";
import { described } from "./tokens.js";

const NOTHING = "Point at a token, or press → to walk through them.";

export class TokenCursor {
  #tokens = [];
  #at = -1;
  #shownOf;
  element = h("p", { class: "inspector small" }, NOTHING);

  /**
   * @param pane the element that holds the transcripts
   * @param shownOf gives `{messages, pieces}` by the `data-rollout` of a transcript
   */
  constructor(pane, shownOf) {
    this.pane = pane;
    this.#shownOf = shownOf;
    pane.addEventListener("pointerover", (event) => {
      const token = event.target.closest?.(".t");
      if (token) this.element.textContent = this.#describe(token);
    });
    pane.addEventListener("click", (event) => {
      const token = event.target.closest?.(".t");
      if (token) this.#mark(this.#tokens.indexOf(token));
    });
  }

  /** Forgets the place: other tokens are shown. */
  reset() {
    this.#tokens = [...this.pane.querySelectorAll(".messages[data-rollout] .t")];
    this.#at = -1;
    this.element.textContent = NOTHING;
    this.element.hidden = !this.#tokens.length;
  }

  move(steps) {
    if (!this.#tokens.length) return;
    this.#mark(Math.max(0, Math.min(this.#tokens.length - 1, this.#at < 0 ? 0 : this.#at + steps)));
    this.#tokens[this.#at].scrollIntoView({ block: "nearest", inline: "nearest" });
    announce(this.element.textContent);
  }

  #mark(at) {
    this.#tokens[this.#at]?.classList.remove("at");
    this.#at = at;
    const token = this.#tokens[at];
    if (!token) return;
    token.classList.add("at");
    this.element.textContent = this.#describe(token);
  }

  #describe(token) {
    const shown = this.#shownOf(token.closest("[data-rollout]")?.dataset.rollout);
    const place = Number(token.closest("[data-message]")?.dataset.message);
    if (!shown || Number.isNaN(place)) return NOTHING;
    return described(shown.messages[place], shown.pieces?.[place] ?? null, Number(token.dataset.at));
  }
}
