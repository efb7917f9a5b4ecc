// What the page shows of the service, from the answers of its routes. Pure functions: answers in, figures out.

import { byLabel, total } from "./exposition.js";

export const COUNTERS = [
  "rollout_rollouts_total",
  "rollout_turns_total",
  "rollout_clipped_turns_total",
  "rollout_tokens_total",
  "rollout_reward_sums_total",
  "rollout_recomputed_tokens_total",
  "vllm_generation_tokens_total",
];
const isGenerated = (labels) => labels.kind === "generated";

/** The tokens of the engines as they come; where there are no engines' metrics, those of rollouts that have ended. */
function tokenSource(metrics) {
  return metrics.has("vllm_generation_tokens_total")
    ? { name: "vllm_generation_tokens_total", accepts: undefined }
    : { name: "rollout_tokens_total", accepts: isGenerated };
}

export function headline(metrics, rates) {
  const tokens = tokenSource(metrics);
  return {
    rollouts: { rate: rates.rate("rollout_rollouts_total"), history: rates.history("rollout_rollouts_total") },
    tokens: { rate: rates.rate(tokens.name, tokens.accepts), history: rates.history(tokens.name, tokens.accepts) },
    turns: rates.rate("rollout_turns_total"),
    inFlight: total(metrics, "rollout_in_flight"),
    waiting: total(metrics, "rollout_waiting_generations"),
    running: total(metrics, "vllm_num_requests_running"),
    inEngines: total(metrics, "vllm_num_requests_waiting"),
    age: policyAge(metrics),
  };
}

function policyAge(metrics) {
  const ages = (metrics.get("rollout_policy_age_seconds") ?? []).filter(({ labels }) => !labels.policy).map(({ value }) => value);
  return ages.length ? Math.max(...ages) : null;
}

/** Waiting generations by priority, the most urgent first; empty where the service does not say. */
export function queue(metrics) {
  const order = ["interactive", "train", "batch"];
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  return [...byLabel(metrics, "rollout_waiting_by_priority", "priority")].sort((a, b) => place(a[0]) - place(b[0]));
}

/** One record a generator replica: its weights by `/policy`, its load by its engine's metrics. */
export function replicas(policy, metrics, rates) {
  const of = (name) => byLabel(metrics, name, "ReplicaId");
  const [running, waiting, cache] = [of("vllm_num_requests_running"), of("vllm_num_requests_waiting"), of("vllm_kv_cache_usage_perc")];
  const [kept, parked] = ["rollout_kept_programs", "rollout_parked_programs"].map((name) => byLabel(metrics, name, "generator"));
  const listed = policy?.replicas ?? [];
  return listed.map((replica) => {
    const id = replica.replica_id;
    return {
      id,
      version: replica.version,
      accepts: replica.accepts_requests !== false,
      isBehind: replica.version !== policy.current,
      running: running.get(id) ?? null,
      waiting: waiting.get(id) ?? null,
      cache: cache.get(id) ?? null,
      kept: kept.get(id) ?? null,
      parked: parked.get(id) ?? null,
      recomputed: metrics.has("rollout_kept_programs") ? rates.rate("rollout_recomputed_tokens_total", (labels) => labels.generator === id) : null,
      tokens: metrics.has("vllm_generation_tokens_total") ? rates.rate("vllm_generation_tokens_total", (labels) => labels.ReplicaId === id) : null,
    };
  });
}

/** One record a task: what ended in the last seconds, and how. */
export function tasks(names, rates) {
  const known = new Set([...names, ...rates.values("rollout_rollouts_total", "task_name")]);
  return [...known].sort().map((name) => {
    const ofTask = (labels) => labels.task_name === name;
    const ended = rates.rate("rollout_rollouts_total", ofTask);
    const failed = rates.rate("rollout_rollouts_total", (labels) => ofTask(labels) && labels.status === "error");
    const positive = rates.rate("rollout_reward_sums_total", (labels) => ofTask(labels) && labels.sign === "positive");
    const negative = rates.rate("rollout_reward_sums_total", (labels) => ofTask(labels) && labels.sign === "negative");
    // A failed rollout has no reward: the mean is of the others.
    const rewarded = (ended ?? 0) - (failed ?? 0);
    const turns = rates.rate("rollout_turns_total", ofTask);
    return {
      name,
      rollouts: ended,
      failed: ended ? failed / ended : null,
      // There is no counter of clipped responses until there was one.
      clipped: turns ? (rates.rate("rollout_clipped_turns_total", ofTask) ?? 0) / turns : null,
      reward: rewarded > 0 ? (positive - negative) / rewarded : null,
      tokens: rates.rate("rollout_tokens_total", (labels) => ofTask(labels) && labels.kind === "generated"),
    };
  });
}
