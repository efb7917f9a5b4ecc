// What the list shows of a rollout, and what filters look at: a small record, whose rollout stays in the worker.

const LONGEST_SNIPPET = 160;
export const STATUSES = ["completed", "truncated", "max_turns", "deadline", "cancelled", "stale", "error"];

/** Why `rollout` is none; null if it is one. */
export function flaw(rollout) {
  if (rollout === null || typeof rollout !== "object" || Array.isArray(rollout)) return "it is no JSON object";
  if (!Array.isArray(rollout.message_log)) return "it has no message_log";
  if (typeof rollout.status !== "string") return "it has no status";
  return null;
}

export function isGenerated(message) {
  return Array.isArray(message.generation_logprobs);
}

/** Whether its tokens may be in a loss, as `may_be_trained` of the client's `contract/messages.py` says. */
export function isTrained(message) {
  return isGenerated(message) && !message.constrained && message.sampled_with?.temperature !== 0;
}

/** Whether a trainer's report is compared with it, as `may_be_compared` says there. */
export function isCompared(message) {
  return isTrained(message) && (message.sampled_with ?? null) === null;
}

/** Args: `group` as `GroupNumbers` counts. */
export function rowOf(rollout, n, group) {
  const log = rollout.message_log;
  const versions = new Set();
  let tokens = 0;
  let logprobs = 0;
  let turns = 0;
  let clipped = 0;
  let finish = "none";
  let snippet = "";
  for (const message of log) {
    if (!isGenerated(message)) continue;
    turns += 1;
    finish = message.finish_reason ?? "none";
    if (finish === "length") clipped += 1;
    tokens += message.generation_logprobs.length;
    for (const logprob of message.generation_logprobs) logprobs += logprob;
    for (const span of message.weight_versions ?? []) versions.add(String(span.version));
    snippet = message.content;
  }
  return {
    n,
    group,
    name: String(rollout.id ?? rollout.idx ?? n),
    generation: rollout.generation_index ?? 0,
    task: rollout.task_name ?? "",
    status: rollout.status,
    reward: rollout.total_reward ?? null,
    turns,
    clipped,
    finish,
    tokens,
    logprob: tokens ? logprobs / tokens : null,
    versions: [...versions],
    snippet: (rollout.error ? `${rollout.error.kind}: ${rollout.error.message}` : snippet).slice(0, LONGEST_SNIPPET),
  };
}

/** In which a text filter looks: all that was said, ids and errors, in lower case. */
export function textOf(rollout) {
  const parts = rollout.message_log.map((message) => message.content ?? "");
  if (rollout.id !== null && rollout.id !== undefined) parts.push(String(rollout.id));
  if (rollout.error) parts.push(rollout.error.kind, rollout.error.message);
  for (const branch of rollout.branches ?? []) parts.push(...branch.message_log.map((message) => message.content ?? ""));
  return parts.join("\n").toLowerCase();
}

/**
 * Numbers the groups. Rollouts are of one group if they have the same `input_row` (files of `rollout run`), else the
 * same task, `id` and `idx`. Where such a rollout comes again with a generation index that the group has, as in the next
 * step of a training, another group begins.
 */
export class GroupNumbers {
  #open = new Map();
  #count = 0;

  of(rollout) {
    const key = JSON.stringify(
      rollout.input_row === undefined
        ? [rollout.task_name, rollout.id ?? null, rollout.idx ?? null]
        : ["row", rollout.input_row],
    );
    const generation = rollout.generation_index ?? 0;
    let group = this.#open.get(key);
    if (group === undefined || group.generations.has(generation)) {
      group = { number: this.#count, generations: new Set() };
      this.#count += 1;
      this.#open.set(key, group);
    }
    group.generations.add(generation);
    return group.number;
  }

  /** What is played from now on is of other groups. */
  close() {
    this.#open.clear();
  }
}
