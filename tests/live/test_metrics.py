"""`GET /metrics`: what rollouts add to the metrics of a running service."""

import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import Sampling
from rollout_client.tensors import to_tensors

SHOWN_WITHIN_S = 60.0
POLL_S = 1.0
SETTLED_S = 2.5
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By the name of the metric without Ray's prefix: labels and value."""


def metrics_of(url: str) -> Samples:
    deadline = time.monotonic() + SHOWN_WITHIN_S
    # Ray's exporter shares the machine with everything else, and may be late.
    while (answer := httpx.get(f"{url}/metrics", timeout=60)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    answer.raise_for_status()
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("ray_"), []).append((sample.labels, sample.value))
    return found


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over all replicas."""
    return sum(value for of_sample, value in found.get(name, ()) if labels.items() <= of_sample.items())


def settled_metrics_of(url: str) -> Samples:
    """When those of the requests before have all been exported."""
    names = ("rollout_rollouts_total", "rollout_work_seconds_count", "rollout_stage_seconds_count")
    found, unchanged = metrics_of(url), 0
    # A busy process may export once in a while only.
    while unchanged < 2:
        time.sleep(SETTLED_S)
        before, found = found, metrics_of(url)
        is_same = all(total(before, name) == total(found, name) for name in names)
        unchanged = unchanged + 1 if is_same else 0
    return found


def test_a_request_is_counted_by_task_stage_and_route(service_url: str, client: RolloutClient) -> None:
    before = settled_metrics_of(service_url)
    samples = [*client.example_samples("math", 3, seed=5), *client.example_samples("sliding_puzzle", 2, seed=5)]
    # Two tokens are no whole answer.
    response = client.rollout(samples, num_generations=2, sampling=Sampling(max_new_tokens=2), max_rollout_turns=2)
    assert {result.error for result in response.samples} == {None}
    assert {result.metrics.clipped_turns == result.metrics.turn_count for result in response.samples} == {True}
    assert to_tensors(response, pad_token_id=0).clipped_mask.tolist() == [1] * 10
    puzzles = response.samples[6:]
    turns = sum(result.metrics.turn_count for result in puzzles)
    of_puzzles = {"task_name": "sliding_puzzle"}
    expected: list[tuple[str, dict[str, str], float]] = [
        ("rollout_rollouts_total", {"task_name": "math"}, 6),
        ("rollout_rollouts_total", of_puzzles, 4),
        ("rollout_turns_total", of_puzzles, turns),
        ("rollout_clipped_turns_total", of_puzzles, turns),
        ("rollout_tokens_total", of_puzzles | {"kind": "generated"}, 2 * turns),
        ("rollout_stage_seconds_count", of_puzzles | {"stage": "step"}, turns),
        ("rollout_reward_count", {"task_name": "math"}, 6),
        ("rollout_http_requests_total", {"route": "/rollout", "status": "200"}, 1),
        ("rollout_work_seconds_count", {"work": "encode"}, 10),
        ("rollout_work_seconds_count", {"work": "tokenize"}, 1),
    ]

    def increases() -> list[tuple[str, dict[str, str], float]]:
        now = metrics_of(service_url)
        return [
            (name, labels, total(now, name, **labels) - total(before, name, **labels)) for name, labels, _ in expected
        ]

    ends_at = time.monotonic() + SHOWN_WITHIN_S
    while (found := increases()) != expected and time.monotonic() < ends_at:
        time.sleep(POLL_S)
    assert found == expected
    generated = sum(result.metrics.assistant_tokens for result in response.samples)
    while total(now := metrics_of(service_url), "vllm_generation_tokens_total") < generated:
        assert time.monotonic() < ends_at
        time.sleep(POLL_S)
    assert "rollout_event_loop_gap_seconds_count" in now


def test_the_gauges_of_the_ingress_and_of_the_engine_are_shown(service_url: str, client: RolloutClient) -> None:
    gauges = {"rollout_in_flight", "rollout_policy_version", "vllm_kv_cache_usage_perc"}
    shown: Samples = {}
    ends_at = time.monotonic() + SHOWN_WITHIN_S
    while not gauges <= shown.keys() and time.monotonic() < ends_at:
        # An engine sets its gauges while it generates, and Ray forgets those that are not set for a while.
        client.rollout(client.example_samples("math", 1), sampling=Sampling(max_new_tokens=16))
        shown |= metrics_of(service_url)
    assert gauges <= shown.keys()
    [(_, version)] = shown["rollout_policy_version"]
    assert version == client.policy.state().current
