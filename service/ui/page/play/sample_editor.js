// The task, its example samples, and the sample as JSON, which is checked while it is written.

import { field, h, options } from "../app/dom.js";
import { get } from "../service/api.js";
import { readSample } from "./sample_check.js";

const SAMPLES = 8;

export class SampleEditor {
  #tasks = [];
  #samples = [];
  #task = h("select");
  #sample = h("select");
  #about = h("p", { class: "small quiet about" });
  #fields = h("div", { class: "fields" });
  #problem = h("p", { class: "small problem", id: "sample-problem", "aria-live": "polite" });
  #text = h("textarea", { rows: "14", spellcheck: "false", "aria-describedby": "sample-problem" });

  /** Args: `onTask` is told the name of the task that is chosen, `onValid` whether the text is a sample. */
  constructor({ onTask, onValid }) {
    this.onTask = onTask;
    this.onValid = onValid;
    this.#task.addEventListener("change", () => {
      this.choose(this.#task.value);
      onTask(this.#task.value);
    });
    this.#sample.addEventListener("change", () => this.#put(this.#samples[Number(this.#sample.value)]));
    this.#text.addEventListener("input", () => this.check());
    this.element = h(
      "div",
      { class: "editor" },
      h("div", { class: "row pickers" }, field("Task", this.#task), field("Example", this.#sample)),
      this.#about,
      field("Sample", this.#text),
      this.#problem,
      this.#fields,
    );
  }

  async load(taskName) {
    ({ tasks: this.#tasks } = await get("tasks"));
    options(this.#task, this.#tasks.map((task) => [task.task_name, task.task_name]), taskName);
    if (!this.#tasks.length) throw new Error("The service has no tasks.");
    this.choose(this.#tasks.some((task) => task.task_name === taskName) ? taskName : this.#tasks[0].task_name);
  }

  /** Shows a task with its first example at once; the others come when the service has made them. */
  async choose(name) {
    const task = this.#tasks.find((one) => one.task_name === name);
    if (!task) return;
    this.#task.value = name;
    this.#about.textContent = task.description;
    this.#showFields(task.fields);
    this.#offer([task.example]);
    this.#put(task.example);
    try {
      const { samples } = await get(`tasks/${encodeURIComponent(name)}/samples?count=${SAMPLES}`);
      if (this.#task.value === name) this.#offer([task.example, ...samples]);
    } catch {
      // The key may be for reading alone, or the environment makes no samples: the example is there.
    }
  }

  get task() {
    return this.#task.value;
  }

  get sample() {
    return readSample(this.#text.value, this.#tasks).sample ?? null;
  }

  check() {
    const { problem } = readSample(this.#text.value, this.#tasks);
    this.say(problem ?? "");
    this.onValid(!problem);
  }

  /** Shows what is wrong with the sample, also what the service has said. */
  say(problem) {
    this.#problem.textContent = problem;
    this.#text.setAttribute("aria-invalid", problem !== "");
  }

  #offer(samples) {
    this.#samples = samples;
    const label = (sample, at) => `${at ? `sample ${at}` : "example"}: ${firstText(sample)}`.slice(0, 70);
    options(this.#sample, samples.map((sample, at) => [String(at), label(sample, at)]), "0");
  }

  #put(sample) {
    // Fields of the contract that are null say nothing; what is null within a field may mean something.
    const given = Object.entries(sample).filter(([, value]) => value !== null);
    this.#text.value = JSON.stringify(Object.fromEntries(given), null, 2);
    this.check();
  }

  #showFields({ properties = {}, required = [] } = {}) {
    const rows = Object.entries(properties).map(([name, schema]) =>
      h(
        "tr",
        {},
        h("td", {}, h("code", {}, name)),
        h("td", { class: "quiet" }, [schema.type ?? "", required.includes(name) ? "required" : ""].filter(Boolean).join(", ")),
        h("td", {}, schema.description ?? ""),
      ),
    );
    this.#fields.replaceChildren(
      rows.length ? h("details", {}, h("summary", {}, "Fields of extra_env_info"), h("table", { class: "small" }, h("tbody", {}, ...rows))) : "",
    );
  }
}

function firstText(sample) {
  const messages = sample.messages ?? sample.message_log ?? [];
  const { content = "" } = messages.findLast((message) => message.role === "user") ?? messages[0] ?? {};
  const text = typeof content === "string" ? content : content.map((part) => part.text).join(" ");
  return text.replaceAll(/\s+/g, " ");
}
