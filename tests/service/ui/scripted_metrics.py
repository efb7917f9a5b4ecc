"""Metrics as a service with two engines shows them. Their counters grow with the time."""

from time import monotonic

BEGAN = monotonic()
LINES = """\
# TYPE ray_rollout_rollouts_total counter
ray_rollout_rollouts_total{task_name="math",status="completed",replica="i1"} {rollouts}
ray_rollout_rollouts_total{task_name="steps",status="error",replica="i1"} {errors}
ray_rollout_turns_total{task_name="math",replica="i1"} {rollouts}
ray_rollout_tokens_total{task_name="math",kind="generated",replica="i1"} {tokens}
ray_rollout_tokens_total{task_name="math",kind="environment",replica="i1"} {rollouts}
# TYPE ray_rollout_reward_sums_total counter
ray_rollout_reward_sums_total{task_name="math",sign="positive",replica="i1"} {rewards}
# TYPE ray_rollout_in_flight gauge
ray_rollout_in_flight{replica="i1"} 12.0
ray_rollout_in_flight{replica="i2"} 4.0
# TYPE ray_rollout_waiting_generations gauge
ray_rollout_waiting_generations{replica="i1"} 5.0
# TYPE ray_rollout_waiting_by_priority gauge
ray_rollout_waiting_by_priority{priority="train",replica="i1"} 4.0
ray_rollout_waiting_by_priority{priority="interactive",replica="i1"} 1.0
# TYPE ray_rollout_policy_age_seconds gauge
ray_rollout_policy_age_seconds{policy="",replica="i1"} {seconds}
# TYPE ray_vllm_num_requests_running gauge
ray_vllm_num_requests_running{ReplicaId="g1"} 8.0
ray_vllm_num_requests_running{ReplicaId="g2"} 3.0
# TYPE ray_vllm_num_requests_waiting gauge
ray_vllm_num_requests_waiting{ReplicaId="g1"} 1.0
# TYPE ray_vllm_kv_cache_usage_perc gauge
ray_vllm_kv_cache_usage_perc{ReplicaId="g1"} 0.62
ray_vllm_kv_cache_usage_perc{ReplicaId="g2"} 0.31
# TYPE ray_vllm_generation_tokens_total counter
ray_vllm_generation_tokens_total{ReplicaId="g1"} {tokens}
ray_vllm_generation_tokens_total{ReplicaId="g2"} {tokens}
"""


async def scripted_metrics() -> str:
    """20 rollouts and 4,000 tokens a second, of which one in ten fails."""
    seconds = monotonic() - BEGAN
    values = {"seconds": seconds, "rollouts": 18 * seconds, "errors": 2 * seconds, "tokens": 4000 * seconds}
    text = LINES
    for name, value in {**values, "rewards": 12 * seconds}.items():
        text = text.replace(f"{{{name}}}", f"{value:.3f}")
    return text
