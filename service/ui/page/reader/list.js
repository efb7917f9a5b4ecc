// A list of any length: only the rows in sight are elements. They are used again when the list is scrolled.
// A listbox for screen readers: the list has the focus, and names the selected option with its place among all.

import { h } from "../app/dom.js";

const BEYOND = 6;

export class VirtualList {
  #rows = [];
  #selected = -1;
  #pool = [];
  #wanted = 0;
  #first = -1;
  #last = -1;
  #scrollTop = 0;
  #height = 0;

  /**
   * @param rowHeight of each row, in pixels
   * @param make returns an object with `element` and `show(row)`
   * @param onSelect gets the row that was chosen
   */
  constructor({ label, rowHeight, make, onSelect }) {
    this.rowHeight = rowHeight;
    this.make = make;
    this.onSelect = onSelect;
    this.inner = h("div", { class: "list-inner", role: "presentation" });
    this.element = h("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": label }, this.inner);
    this.element.addEventListener("scroll", () => this.#plan(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) this.select(Number(option.dataset.at), { tell: true });
    });
    new ResizeObserver(() => {
      this.#height = this.element.clientHeight;
      this.#draw(true);
    }).observe(this.element);
  }

  get rows() {
    return this.#rows;
  }

  get selected() {
    return this.#rows[this.#selected] ?? null;
  }

  /** Shows `rows`, and keeps `n` selected if it is among them. Does not scroll. */
  show(rows, n = null) {
    this.#rows = rows;
    this.#selected = n === null ? -1 : rows.findIndex((row) => row.n === n);
    this.inner.style.height = `${rows.length * this.rowHeight}px`;
    this.#draw(true);
  }

  /** Selects the row at a place of the list, and scrolls to it. */
  select(at, { tell = false } = {}) {
    if (!this.#rows.length) return;
    this.#selected = Math.max(0, Math.min(this.#rows.length - 1, at));
    this.#reveal();
    this.#draw(true);
    if (tell) this.onSelect(this.#rows[this.#selected]);
  }

  move(steps) {
    this.select(this.#selected < 0 ? 0 : this.#selected + steps, { tell: true });
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.#height / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (steps === undefined) return;
    event.preventDefault();
    if (Number.isFinite(steps)) this.move(steps);
    else this.select(steps < 0 ? 0 : this.#rows.length - 1, { tell: true });
  }

  #reveal() {
    const top = this.#selected * this.rowHeight;
    const { scrollTop } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + this.#height) this.element.scrollTop = top + this.rowHeight - this.#height;
  }

  #plan() {
    this.#wanted ||= requestAnimationFrame(() => {
      this.#wanted = 0;
      this.#draw(false);
    });
  }

  /** Args: `all` says that rows have changed; else only those are drawn that have come into sight. */
  #draw(all) {
    this.#scrollTop = this.element.scrollTop;
    const first = Math.max(0, Math.floor(this.#scrollTop / this.rowHeight) - BEYOND);
    const last = Math.min(this.#rows.length, Math.ceil((this.#scrollTop + this.#height) / this.rowHeight) + BEYOND);
    if (!all && first === this.#first && last === this.#last) return;
    [this.#first, this.#last] = [first, last];
    while (this.#pool.length < last - first) this.#pool.push(this.#option());
    // Each place has its own element as long as it is in sight: scrolling changes only those that come in.
    const size = this.#pool.length;
    for (let slot = 0; slot < size; slot += 1) {
      const at = first + ((((slot - first) % size) + size) % size);
      this.#place(this.#pool[slot], at < last ? at : -1, all);
    }
    const active = this.#selected >= first && this.#selected < last ? this.#pool[this.#selected % size] : null;
    if (active) this.element.setAttribute("aria-activedescendant", active.element.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #place(option, at, all) {
    if (option.at === at && !all) return;
    option.at = at;
    const { element } = option;
    element.hidden = at < 0;
    if (at < 0) return;
    element.style.transform = `translateY(${at * this.rowHeight}px)`;
    element.dataset.at = at;
    element.setAttribute("aria-posinset", at + 1);
    element.setAttribute("aria-setsize", this.#rows.length);
    element.setAttribute("aria-selected", at === this.#selected);
    option.show(this.#rows[at], this.#rows[at - 1]);
  }

  #option() {
    const option = this.make();
    option.at = -2;
    option.element.setAttribute("role", "option");
    option.element.id = `option-${this.#pool.length}`;
    option.element.style.height = `${this.rowHeight}px`;
    this.inner.append(option.element);
    return option;
  }
}
