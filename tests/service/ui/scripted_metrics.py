"""Metrics as a service with two engines shows them. Their counters grow with the time."""

from time import monotonic

BEGAN = monotonic()
LINES = """\
# TYPE ray_rollout_rollouts_total counter
ray_rollout_rollouts_total{task_name="math",status="completed",replica="i1"} {rollouts}
ray_rollout_rollouts_total{task_name="steps",status="completed",replica="i1"} {steps}
ray_rollout_rollouts_total{task_name="steps",status="error",replica="i1"} {errors}
ray_rollout_turns_total{task_name="math",replica="i1"} {rollouts}
ray_rollout_tokens_total{task_name="math",kind="generated",replica="i1"} {tokens}
ray_rollout_tokens_total{task_name="steps",kind="generated",replica="i1"} {tokens}
ray_rollout_tokens_total{task_name="math",kind="environment",replica="i1"} {rollouts}
# TYPE ray_rollout_reward_sums_total counter
ray_rollout_reward_sums_total{task_name="math",sign="positive",replica="i1"} {rewards}
ray_rollout_reward_sums_total{task_name="steps",sign="positive",replica="i1"} {steps}
ray_rollout_reward_sums_total{task_name="steps",sign="negative",replica="i1"} {errors}
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
    """20 rollouts a second, and 4,000 tokens of each engine, of which one fails."""
    seconds = monotonic() - BEGAN
    a_second = {"seconds": 1, "rollouts": 16, "steps": 3, "errors": 1, "rewards": 12, "tokens": 4000}
    text = LINES
    for name, growth in a_second.items():
        text = text.replace(f"{{{name}}}", f"{growth * seconds:.3f}")
    return text
