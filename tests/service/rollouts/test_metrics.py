"""The metrics of a request, to the exact number."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_client.contract.messages import Message, WeightVersionSpan
from rollout_client.contract.rollouts import RequestMetrics, SampleMetrics, SampleResult
from service.rollouts.metrics import FREED_IN_ONE_STEP, RequestMetricsAccumulator


def result(
    turn_gen_tokens: Sequence[int] = (1,),
    env_tokens: int = 0,
    total_reward: float = 0.0,
    *,
    status: str = "completed",
    versions: str = "",
    rewards: dict[str, float] | None = None,
    **counted: Any,
) -> SampleResult:
    spans = [WeightVersionSpan(version=version, start=0, end=1) for version in versions.split()]
    return SampleResult.model_construct(
        status=status,
        rewards={"reward": total_reward} if rewards is None else rewards,
        message_log=[Message(role="assistant", content="", token_ids=[], weight_versions=spans)],
        metrics=SampleMetrics(
            turn_count=len(turn_gen_tokens),
            total_tokens=sum(turn_gen_tokens) + env_tokens,
            assistant_tokens=sum(turn_gen_tokens),
            env_tokens=env_tokens,
            total_reward=total_reward,
            turn_gen_tokens=list(turn_gen_tokens),
            turn_input_tokens=[100 + turn for turn in range(len(turn_gen_tokens))],
            terminated=status == "completed",
            truncated=status == "truncated",
            max_turns_reached=status == "max_turns",
            **counted,
        ),
    )


def accumulated(*results: SampleResult, policy: str | None = None) -> RequestMetricsAccumulator:
    metrics_accumulator = RequestMetricsAccumulator(policy)
    for each in results:
        metrics_accumulator.add(each)
    return metrics_accumulator


def metrics_of(*results: SampleResult) -> RequestMetrics:
    return accumulated(*results).metrics()


SAMPLES = [
    result([3, 5], 4, 1.0, clipped_turns=2),
    result([10], 0, -0.5, status="truncated", parse_errors=1),
    result([1, 1, 1], 6, 0.0, status="max_turns", parse_errors=2),
    result([2, 2], 2, 2.5),
]


def test_metrics_of_the_environments_own_have_their_spread() -> None:
    of_rollouts: list[dict[str, float]] = [{"calls": 2}, {"calls": 5, "seconds": 0.5}, {}]
    metrics = metrics_of(*(result(environment=named) for named in of_rollouts))
    assert (metrics["environment/calls/mean"], metrics["environment/calls/max"]) == (3.5, 5)
    assert metrics["environment/seconds/min"] == 0.5


def test_metrics_carry_the_fields_names_and_exact_values() -> None:
    by_field = ("turns_per_sample", "total_tokens_per_sample", "gen_tokens_per_sample", "env_tokens_per_sample")
    plain = {
        name: value for name, value in metrics_of(*SAMPLES).items() if not name.startswith((*by_field, "total_reward/"))
    }
    assert plain == {
        "total_turns": 8,
        "avg_turns_per_sample": 2.0,
        "max_turns_per_sample": 3,
        "natural_termination_rate": 0.5,
        "truncation_rate": 0.25,
        "max_turns_reached_rate": 0.25,
        "mean_total_tokens_per_sample": 9.25,
        "mean_gen_tokens_per_sample": 6.25,
        "mean_env_tokens_per_sample": 3.0,
        "mean_total_reward": 0.75,
        "max_total_reward": 2.5,
        "min_total_reward": -0.5,
        "total_parse_errors": 3,
        "mean_generation_length": 3.125,
        "total_generated_tokens": 25,
        "clipped_ratio": 0.25,
        "max_gen_tokens_per_sample": 10,
        "max_gen_tokens_per_turn/max": 10,
        "max_gen_tokens_per_turn/mean": 4.5,
        "max_gen_tokens_per_turn/p95": pytest.approx(9.25),
        "histogram/gen_tokens_length": [3, 5, 10, 1, 1, 1, 2, 2],
        "histogram/input_tokens_length": [100, 101, 100, 100, 101, 102, 100, 101],
        "histogram/total_tokens_length": [103, 106, 110, 101, 102, 103, 102, 103],
        "histogram/staleness": [],
        "stale_rate": 0.0,
    }


def test_generated_tokens_are_counted_by_the_replica_that_generated_them() -> None:
    accumulator = RequestMetricsAccumulator()
    accumulator.add(SAMPLES[0], tokens_by_replica={"a": 3, "b": 5})
    accumulator.add(SAMPLES[1], tokens_by_replica={"b": 10})
    accumulator.add(result([7], status="error"), tokens_by_replica={"c": 7})
    metrics = accumulator.metrics()
    assert metrics["per_worker_token_counts"] == {"a": 3, "b": 15}
    assert metrics["total_generated_tokens"] == 18


def test_each_field_has_its_spread() -> None:
    metrics, names = metrics_of(*SAMPLES), ("mean", "max", "min", "median", "stddev")
    spreads = {field: [metrics[f"{field}/{name}"] for name in names] for field in ("turns_per_sample", "total_reward")}
    assert spreads["turns_per_sample"] == pytest.approx([2.0, 3, 1, 2.0, 0.816497], abs=1e-6)
    assert spreads["total_reward"] == pytest.approx([0.75, 2.5, -0.5, 0.5, 1.322876], abs=1e-6)
    for field, mean in (("total_tokens", 9.25), ("gen_tokens", 6.25), ("env_tokens", 3.0)):
        assert metrics[f"{field}_per_sample/mean"] == mean


def test_each_reward_with_a_name_has_its_spread() -> None:
    samples = [
        result(rewards={"right": 3.0, "format": 0.5}),
        result(rewards={"right": 1.0}),
        result(),
        result(rewards={"right": 9.0}, status="cancelled"),
    ]
    assert {name: value for name, value in metrics_of(*samples).items() if name.startswith("rewards/")} == {
        "rewards/right/mean": 2.0,
        "rewards/right/max": 3.0,
        "rewards/right/min": 1.0,
        "rewards/right/median": 2.0,
        "rewards/right/stddev": pytest.approx(2**0.5),
        **{f"rewards/format/{name}": 0.5 for name in ("mean", "max", "min", "median")},
        "rewards/format/stddev": 0.0,
    }


def test_percentiles_of_the_turns_interpolate() -> None:
    metrics = metrics_of(*(result([1] * turns) for turns in range(1, 102)))
    assert (metrics["turns_per_sample/p95"], metrics["turns_per_sample/p99"]) == (96.0, 100.0)


@pytest.mark.parametrize(
    ("policy", "versions", "current", "said"),
    [
        (None, ["9 10", "11"], 12, ("9", "11", "12")),
        (None, ["9 10", "11"], None, ("9", "11", None)),
        (None, [""], 0, (None, None, "0")),
        (None, [], None, (None, None, None)),
        ("run-b", ["3 run-a/1 run-b/9 run-b/10"], 11, ("run-b/9", "run-b/10", "run-b/11")),
        ("run-b", [], None, (None, None, None)),
    ],
)
def test_the_policy_is_that_of_all_tokens_and_the_current_one(
    policy: str | None, versions: list[str], current: int | None, said: tuple[str | None, ...]
) -> None:
    samples = [result(versions=labels, status="error" if labels == "11" else "completed") for labels in versions]
    told = accumulated(*samples, policy=policy).policy(current)
    assert (told.oldest, told.newest, told.current) == said


@pytest.mark.parametrize("status", ["error", "deadline", "cancelled"])
def test_a_sample_without_its_final_reward_is_in_no_average(status: str) -> None:
    good, unfinished = result([4], 2, 1.0), result([400], 200, 0.0, status=status)
    assert metrics_of(good, unfinished) == metrics_of(good)
    assert metrics_of(unfinished) == {}


def test_of_samples_that_were_freed_the_weight_versions_stay() -> None:
    accumulator = RequestMetricsAccumulator()
    results = [result(versions="7") for _ in range(2 * FREED_IN_ONE_STEP + 1)]
    held = [weakref.ref(each.metrics) for each in results]
    while results:
        accumulator.add(results.pop())
    assert all(reference() is not None for reference in held)
    accumulator.free_samples()
    assert [reference() for reference in held] == [None] * len(held)
    assert (accumulator.metrics(), accumulator.policy().newest) == ({}, "7")


def test_stale_samples_are_in_no_average_and_their_share_is_reported() -> None:
    good, other = result([4], 0, 1.0), result([6], 0, 1.0)
    stale, cancelled = result([400], 200, 9.0, status="stale"), result([400], 200, 9.0, status="cancelled")
    metrics_accumulator = accumulated()
    for each, staleness in ((good, 0), (stale, 3), (other, 2), (cancelled, 1), (good, None)):
        metrics_accumulator.add(each, staleness)
    averages = metrics_of(good, other, good)
    assert metrics_accumulator.metrics() == averages | {"histogram/staleness": [0, 2], "stale_rate": 0.25}
    assert metrics_of(stale) == {"histogram/staleness": [], "stale_rate": 1.0}


def test_samples_that_generated_nothing_have_metrics_too() -> None:
    metrics = metrics_of(result([], status="truncated"))
    assert metrics["clipped_ratio"] == 0.0
    assert (metrics["mean_generation_length"], metrics["max_gen_tokens_per_turn/max"]) == (0.0, 0)
    assert metrics["turns_per_sample/stddev"] == 0.0
