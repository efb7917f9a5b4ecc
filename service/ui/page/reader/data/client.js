// Asks the worker that holds the rollouts. Counterpart: worker.js.

const ADDRESS = new URL("./worker.js", import.meta.url).href;

/** The page's policy for trusted types names this one address, and no other. */
function workerAddress() {
  if (!globalThis.trustedTypes) return ADDRESS;
  return trustedTypes.createPolicy("rollout-worker", { createScriptURL: () => ADDRESS }).createScriptURL("");
}

export class RolloutData {
  #worker = new Worker(workerAddress(), { type: "module" });
  #calls = new Map();
  #next = 0;

  constructor() {
    this.#worker.addEventListener("message", ({ data }) => this.#receive(data));
    this.#worker.addEventListener("error", (event) => {
      for (const call of this.#calls.values()) call.reject(new Error(event.message || "the worker of the page failed"));
      this.#calls.clear();
    });
  }

  /** Opens a file as the source "file". `onRows` gets its rows in order, some at a time. */
  open(file, onRows) {
    return this.#ask({ task: "open", file }, ({ rows }) => onRows(rows));
  }

  /** Adds rollouts to the source "played"; `begins` says that they are of a new request. Returns their rows. */
  async add(rollouts, begins) {
    return (await this.#ask({ task: "add", rollouts, begins })).rows;
  }

  rollouts(source, numbers) {
    return this.#ask({ task: "rollouts", source, numbers });
  }

  /** One number a rollout: 1 where a text has `text`, which is in lower case. */
  search(source, text) {
    return this.#ask({ task: "search", source, text });
  }

  #ask(message, onProgress) {
    const id = (this.#next += 1);
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { resolve, reject, onProgress });
      this.#worker.postMessage({ id, ...message });
    });
  }

  #receive({ id, progress, result, error }) {
    const call = this.#calls.get(id);
    if (!call) return;
    if (progress) {
      call.onProgress?.(progress);
      return;
    }
    this.#calls.delete(id);
    if (error === undefined) call.resolve(result);
    else call.reject(new Error(error));
  }
}
