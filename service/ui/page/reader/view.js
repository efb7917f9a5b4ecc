// The reader: a source of rollouts, the filters, the list, and the transcript of what is selected. Its state is the
// address of the page: `values` below, by name.

import { announce } from "../app/announce.js";
import { h } from "../app/dom.js";
import * as link from "../app/link.js";
import { count, percent, plural } from "../app/numbers.js";
import { FilterForm } from "./filter_form.js";
import { clippedRatio, filtered } from "./filters.js";
import { Histogram } from "./histogram.js";
import { VirtualList } from "./list.js";
import { ROW_HEIGHT, rowOption } from "./row_option.js";
import { Toolbar } from "./toolbar.js";
import { TranscriptPane } from "./transcript_pane.js";

const FILE = "file";
const PLAYED = "played";
const EMPTY = `Drop a file of rollouts on the page, or open one: JSON lines (rollout run, response.save) or Parquet (response.save).
 It is read in this browser and sent nowhere. Rollouts of the playground are here too.`;

export class Reader {
  #sources = { [FILE]: { name: "", rows: [], note: "" }, [PLAYED]: { name: "Played here", rows: [], note: "" } };
  #source = FILE;
  #rollout = null;
  #expected = null;
  #matches = null;
  #searched = "";
  #refreshing = 0;
  #loading = false;
  #shownKey = null;
  #wasEntered = false;
  isShown = false;

  constructor(section, data, vocabulary) {
    this.data = data;
    this.vocabulary = vocabulary;
    this.filters = new FilterForm(() => this.#filtersChanged());
    this.histogram = new Histogram((from, to) => {
      this.filters.values = { ...this.filters.values, min: String(from), max: String(to) };
      this.#filtersChanged();
    });
    this.list = new VirtualList({ label: "Rollouts", rowHeight: ROW_HEIGHT, make: rowOption, onSelect: (row) => this.#select(row) });
    this.pane = new TranscriptPane(data, vocabulary);
    this.toolbar = new Toolbar({ onChange: () => this.#lookChanged(), onBack: () => this.back(), onCopy: (button) => copyLink(button) });
    this.fileInput = h("input", { type: "file", accept: ".jsonl,.ndjson,.json,.parquet", hidden: true, onchange: () => this.#chosen() });
    this.title = h("h2");
    this.total = h("p", { class: "small quiet", role: "status" });
    this.note = h("p", { class: "small warn" });
    this.playedButton = h("button", { type: "button", hidden: true, onclick: () => this.#showSource(this.#source === FILE ? PLAYED : FILE) });
    this.saveButton = h("button", { type: "button", hidden: true, onclick: () => this.#save() }, "Save");
    section.append(this.#layout());
    this.root = section.firstElementChild;
    this.#refresh();
  }

  #layout() {
    const source = h(
      "div",
      { class: "source" },
      h("div", { class: "source-name" }, this.title, this.total),
      this.saveButton,
      this.playedButton,
      h("button", { type: "button", onclick: () => this.openFile() }, "Open a file"),
      this.fileInput,
    );
    return h(
      "div",
      { class: "reader" },
      h("div", { class: "side" }, source, this.note, this.filters.element, this.histogram.element, this.list.element),
      h("div", { class: "main-pane" }, this.toolbar.element, this.pane.element, this.pane.cursor.element),
    );
  }

  // What the address says

  /** Shows what a link says; a file that it names has to be given by the user. A link that says nothing changes nothing. */
  enter(values) {
    this.isShown = true;
    if (this.#wasEntered && !Object.keys(values).length) {
      this.#refresh({ reveal: true });
      return;
    }
    this.#wasEntered = true;
    const wanted = values.source === PLAYED ? PLAYED : FILE;
    this.#source = wanted;
    this.toolbar.values = values;
    this.filters.values = values;
    this.#rollout = values.rollout === undefined ? null : Number(values.rollout);
    this.#expected = wanted === FILE && values.file && values.file !== this.#sources[FILE].name ? values.file : null;
    this.root.classList.toggle("reading", this.#rollout !== null);
    this.#refresh({ reveal: true });
  }

  /** Another view is shown: the address is that one's. */
  leave() {
    this.isShown = false;
  }

  #remember() {
    if (!this.isShown) return;
    const source = this.#source === PLAYED ? { source: PLAYED } : { file: this.#sources[FILE].name || this.#expected || "" };
    link.replace("reader", { ...source, rollout: this.#rollout, ...this.filters.values, ...this.toolbar.values });
  }

  // Sources

  openFile() {
    this.fileInput.click();
  }

  #chosen() {
    const [file] = this.fileInput.files;
    if (file) this.open(file);
    this.fileInput.value = "";
  }

  /** Opens a file of rollouts, or takes the vocabulary of a `tokenizer.json`. */
  async open(file) {
    if (/tokenizer.*\.json$/i.test(file.name)) return this.#openTokenizer(file);
    const opened = (this.#sources[FILE] = { name: file.name, rows: [], note: "" });
    if (this.#expected !== file.name) {
      this.filters.values = {};
      this.#rollout = null;
    }
    this.#expected = null;
    this.#source = FILE;
    this.#loading = true;
    this.#clear();
    this.#refresh();
    try {
      const { flaws, firstFlaw } = await this.data.open(file, (rows) => {
        for (const row of rows) opened.rows.push(row);
        if (this.#sources[FILE] === opened) this.#plan();
      });
      if (flaws) opened.note = `${plural(flaws, "line")} left out: ${firstFlaw}.`;
      announce(`${file.name}: ${plural(opened.rows.length, "rollout")}`);
    } catch (error) {
      opened.note = `${file.name} cannot be read: ${error.message}.`;
      announce(opened.note);
    }
    if (this.#sources[FILE] !== opened) return undefined;
    this.#loading = false;
    this.#searched = null;
    return this.#refresh({ reveal: true });
  }

  async #openTokenizer(file) {
    try {
      this.vocabulary.take(JSON.parse(await file.text()));
      announce(`Tokens are named by ${file.name}`);
    } catch (error) {
      this.#sources[this.#source].note = `${file.name} is no tokenizer: ${error.message}.`;
    }
    this.#refresh();
  }

  /** Takes in rollouts of the playground; `begins` as in `RolloutData.add`. Returns their rows. */
  async addPlayed(rollouts, begins) {
    const rows = await this.data.add(rollouts, begins);
    this.#sources[PLAYED].rows.push(...rows);
    if (this.isShown && this.#source === PLAYED) this.#plan();
    else this.#showButtons();
    return rows;
  }

  #showSource(name) {
    this.#source = name;
    this.#rollout = null;
    this.filters.values = {};
    this.#refresh();
  }

  async #save() {
    const { rows } = this.#sources[PLAYED];
    const rollouts = await this.data.rollouts(PLAYED, rows.map(({ n }) => n));
    const blob = new Blob(rollouts.map((rollout) => `${JSON.stringify(rollout)}\n`), { type: "application/jsonl" });
    const address = URL.createObjectURL(blob);
    h("a", { href: address, download: "played.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  // What is shown

  /** Shows rows that have come, at most once a frame. */
  #plan() {
    this.#refreshing ||= requestAnimationFrame(() => {
      this.#refreshing = 0;
      this.#refresh();
    });
  }

  #filtersChanged() {
    this.#refresh({ reveal: true });
  }

  async #refresh({ reveal = false } = {}) {
    const source = this.#sources[this.#source];
    const { q } = this.filters.values;
    if (await this.#search(q.toLowerCase(), source)) return;
    const rows = filtered(source.rows, this.filters.values, q ? this.#matches : null);
    this.filters.offer(source.rows);
    this.histogram.show(rows);
    const reads = source.rows.length > 0;
    const narrowed = rows.length < source.rows.length ? `${count(rows.length)} of ` : "";
    this.title.textContent = source.name || this.#expected || "No file";
    const ratio = clippedRatio(rows);
    const clipped = ratio ? `, ${percent(ratio)} of the responses clipped` : "";
    this.total.textContent = reads ? `${narrowed}${plural(source.rows.length, "rollout")}${this.#loading ? ", reading" : clipped}` : "";
    this.note.textContent = source.note;
    this.note.hidden = !source.note;
    this.root.classList.toggle("empty", !reads);
    this.#showButtons();
    if (this.#rollout === null && rows.length && !isNarrow()) this.#rollout = rows[0].n;
    this.list.show(rows, this.#rollout);
    if (reveal && this.list.selected) this.list.select(rows.indexOf(this.list.selected));
    this.#remember();
    if (!reads) this.#clear(this.#emptyText(source));
    else await this.#showTranscript();
  }

  /** Looks for the text of the filter in the worker. Returns true if another refresh has taken over. */
  async #search(text, source) {
    const searched = `${this.#source} ${source.rows.length} ${text}`;
    if (!text || searched === this.#searched) return false;
    this.#searched = searched;
    const found = await this.data.search(this.#source, text);
    if (this.#searched !== searched) return true;
    this.#matches = found;
    return false;
  }

  #emptyText(source) {
    if (this.#loading || source.note) return "";
    if (this.#source === PLAYED) return "Nothing was played in this page. What the playground plays is kept here until the page is left.";
    return this.#expected ? `This link is of the file ${this.#expected}. Drop it on the page: the same view opens.` : EMPTY;
  }

  #showButtons() {
    const other = this.#source === FILE ? this.#sources[PLAYED] : this.#sources[FILE];
    this.playedButton.hidden = !other.rows.length;
    this.playedButton.textContent = this.#source === FILE ? `Played here (${count(other.rows.length)})` : other.name;
    this.saveButton.hidden = this.#source !== PLAYED || !this.#sources[PLAYED].rows.length;
  }

  #select(row) {
    this.#rollout = row.n;
    this.root.classList.add("reading");
    this.#remember();
    this.#showTranscript();
  }

  #lookChanged() {
    this.#remember();
    this.#showTranscript();
  }

  async #showTranscript() {
    const { rows } = this.#sources[this.#source];
    const row = this.#rollout === null ? null : rows[this.#rollout];
    if (!row) return this.#clear(this.#rollout === null || this.#loading ? "" : `The file has no rollout ${this.#rollout}.`);
    const { colour, mask, group } = this.toolbar.values;
    const ofGroup = group ? rows.filter((one) => one.group === row.group) : null;
    const look = { colour: colour || "none", mask: mask === "1" };
    // Filters change while somebody reads: what stays is left where it is scrolled to.
    const key = JSON.stringify([this.#source, this.#sources[this.#source].name, row.n, ofGroup?.length, look, this.vocabulary.taken]);
    if (key === this.#shownKey) return undefined;
    this.#shownKey = key;
    try {
      await this.pane.show(this.#source, row, ofGroup, look);
    } catch (error) {
      return this.#clear(`The rollout cannot be shown: ${error.message}`);
    }
    return this.toolbar.explain(this.pane.versions);
  }

  #clear(text) {
    this.#shownKey = null;
    this.pane.clear(text);
    return this.toolbar.explain(this.pane.versions);
  }

  // Keys

  get cursor() {
    return this.pane.cursor;
  }

  move(steps) {
    this.list.move(steps);
    const row = this.list.selected;
    if (row) announce(`${row.name}, generation ${row.generation}, ${row.status}`);
  }

  /** To the first rollout of the next or the previous group of those that are listed. */
  moveGroup(steps) {
    const { rows, selected } = this.list;
    if (!selected) return this.move(0);
    let at = rows.indexOf(selected);
    while (rows[at + steps] && rows[at].group === selected.group) at += steps;
    const { group } = rows[at];
    while (steps < 0 && rows[at - 1]?.group === group) at -= 1;
    return this.list.select(at, { tell: true });
  }

  nextColour() {
    announce(`Colours: ${this.toolbar.nextColour()}`);
    this.#lookChanged();
  }

  back() {
    if (!this.root.classList.contains("reading")) return;
    this.root.classList.remove("reading");
    if (isNarrow()) this.#rollout = null;
    this.#remember();
    this.list.element.focus();
  }
}

/** Where the list and the transcript take turns. The same width is in styles/reader.css. */
function isNarrow() {
  return matchMedia("(max-width: 860px)").matches;
}

/** Copies the address; shows it to be copied by hand where the browser does not let a page do that. */
async function copyLink(button) {
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
    announce("The link is copied.");
  } catch {
    prompt("The address of this view:", location.href);
  }
  setTimeout(() => (button.textContent = "Copy link"), 2000);
}

