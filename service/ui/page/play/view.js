// The playground: one sample, the options, and its rollouts as they end. The service streams whole rollouts, each when
// it has ended; there is no route that streams single turns.

import { announce } from "../app/announce.js";
import { h } from "../app/dom.js";
import * as link from "../app/link.js";
import { count, percent, plural, rate, reward } from "../app/numbers.js";
import { play } from "../service/ndjson.js";
import { Arrivals } from "./arrivals.js";
import { OptionsForm } from "./options_form.js";
import { SampleEditor } from "./sample_editor.js";

export class Playground {
  #running = null;
  #loaded = false;
  #isValid = false;

  /** Args: `reader` gets all that is played. */
  constructor(section, reader) {
    this.reader = reader;
    this.editor = new SampleEditor({
      onTask: (task) => link.replace("play", { task }),
      onValid: (isValid) => {
        this.#isValid = isValid;
        this.#showButtons();
      },
    });
    this.optionsForm = new OptionsForm();
    this.arrivals = new Arrivals();
    this.runButton = h("button", { type: "submit", class: "main" }, "Play");
    this.cancelButton = h("button", { type: "button", hidden: true, onclick: () => this.#running?.abort() }, "Cancel");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.progress = h("p", { class: "small quiet", role: "status" });
    this.bar = h("progress", { value: 0, max: 1, hidden: true, "aria-label": "Rollouts that have ended" });
    this.summary = h("p", { class: "small quiet" }, "Each rollout is shown here when it has ended, with all of its turns.");
    this.readAll = h("button", { type: "button", hidden: true, onclick: () => link.go("reader", { source: "played" }) }, "All in the reader");
    this.sent = h("pre", { tabindex: "0", "aria-label": "The request as JSON" });
    section.append(this.#layout());
  }

  #layout() {
    const form = h(
      "form",
      { class: "panel play-form", "aria-label": "What is played", novalidate: true, onsubmit: (event) => this.#submitted(event) },
      h("h2", {}, "Sample"),
      this.editor.element,
      this.optionsForm.element,
      h("div", { class: "row" }, this.runButton, this.cancelButton),
      this.problem,
      h("details", {}, h("summary", {}, "Request"), this.sent),
    );
    const results = h(
      "section",
      { class: "panel results", "aria-label": "Results" },
      h("div", { class: "row results-head" }, h("h2", {}, "Rollouts"), this.progress, this.readAll),
      this.bar,
      this.summary,
      this.arrivals.element,
    );
    return h("div", { class: "page play" }, form, results);
  }

  async enter({ task }) {
    if (this.#loaded) {
      // What was edited stays, unless a link names another task.
      if (task && task !== this.editor.task) await this.editor.choose(task);
      return;
    }
    try {
      await this.editor.load(task);
      this.#loaded = true;
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = `The tasks cannot be listed: ${error.message}`;
    }
  }

  #showButtons() {
    this.runButton.disabled = !this.#isValid || this.#running !== null;
    this.cancelButton.hidden = this.#running === null;
  }

  #submitted(event) {
    event.preventDefault();
    const { sample } = this.editor;
    const { options, problem, control } = this.optionsForm.read();
    this.problem.textContent = problem ?? "";
    control?.focus();
    if (sample && options && !this.#running) this.#run({ samples: [sample], ...options });
  }

  async #run(body) {
    const { num_generations: wanted } = body;
    this.#running = new AbortController();
    this.sent.textContent = JSON.stringify(body, null, 1);
    this.arrivals.clear();
    this.summary.textContent = "";
    this.readAll.hidden = true;
    this.#showButtons();
    this.#showProgress(0, wanted);
    const began = performance.now();
    let ended = 0;
    try {
      for await (const { sample, summary } of play(body, this.#running.signal)) {
        if (summary) this.#showSummary(summary, (performance.now() - began) / 1000);
        if (!sample) continue;
        const [row] = await this.reader.addPlayed([sample], ended === 0);
        this.arrivals.add(sample, () => link.go("reader", { source: "played", rollout: row.n }));
        ended += 1;
        this.readAll.hidden = false;
        this.#showProgress(ended, wanted);
      }
      announce(`${plural(ended, "rollout")} played`);
    } catch (error) {
      this.#showFailure(error, ended);
    } finally {
      this.#running = null;
      this.bar.hidden = true;
      this.#showButtons();
    }
  }

  #showProgress(ended, wanted) {
    this.bar.hidden = false;
    this.bar.max = wanted;
    this.bar.value = ended;
    this.progress.textContent = `${count(ended)} of ${count(wanted)} have ended`;
  }

  #showSummary({ metrics, policy }, seconds) {
    const tokens = (metrics.mean_gen_tokens_per_sample ?? 0) * this.bar.max;
    const parts = [
      metrics.mean_total_reward === undefined ? null : `mean reward ${reward(metrics.mean_total_reward)}`,
      metrics.total_turns === undefined ? null : plural(metrics.total_turns, "turn"),
      metrics.clipped_ratio ? `${percent(metrics.clipped_ratio)} of the responses clipped` : null,
      `${rate(tokens / seconds)} tokens/s`,
      `${rate(seconds)} s`,
      policy?.newest ? `weights ${policy.oldest === policy.newest ? policy.newest : `${policy.oldest} to ${policy.newest}`}` : null,
    ];
    this.summary.textContent = parts.filter(Boolean).join(" · ");
  }

  #showFailure(error, ended) {
    if (error.name === "AbortError") {
      this.progress.textContent = `Cancelled after ${plural(ended, "rollout")}`;
      return;
    }
    this.problem.textContent = error.message;
    const ofSample = (error.errors ?? []).filter(({ field }) => field.startsWith("samples[0]"));
    if (ofSample.length) this.editor.say(ofSample.map(({ field, message }) => `${field.replace("samples[0].", "")}: ${message}`).join("; "));
  }
}
