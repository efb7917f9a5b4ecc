"""The metrics of a request, to the exact number."""

from rollout_client.contract import Message, PolicyVersions, SampleMetrics, SampleResult, WeightVersionSpan
from service.metrics import policy_versions, request_metrics


def result(
    turn_gen_tokens: list[int], env_tokens: int, total_reward: float, *, status: str = "completed", versions: str = ""
) -> SampleResult:
    assistant_tokens = sum(turn_gen_tokens)
    flags = {
        "terminated": status == "completed",
        "truncated": status == "truncated",
        "max_turns_reached": status == "max_turns",
    }
    spans = [WeightVersionSpan(version=version, start=0, end=1) for version in versions.split()]
    return SampleResult.model_construct(
        status=status,
        message_log=[Message(role="assistant", content="", token_ids=[], weight_versions=spans)],
        metrics=SampleMetrics(
            turn_count=len(turn_gen_tokens),
            total_tokens=assistant_tokens + env_tokens,
            assistant_tokens=assistant_tokens,
            env_tokens=env_tokens,
            total_reward=total_reward,
            turn_gen_tokens=turn_gen_tokens,
            **flags,
        ),
    )


def test_metrics_carry_the_fields_names_and_exact_values() -> None:
    samples = [
        result([3, 5], env_tokens=4, total_reward=1.0),
        result([10], env_tokens=0, total_reward=-0.5, status="truncated"),
        result([1, 1, 1], env_tokens=6, total_reward=0.0, status="max_turns"),
        result([2, 2], env_tokens=2, total_reward=2.5),
    ]
    assert request_metrics(samples) == {
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
        "mean_generation_length": 3.125,
        "total_generated_tokens": 25,
    }


def test_a_failed_sample_is_in_no_average() -> None:
    good = result([4], env_tokens=2, total_reward=1.0)
    failed = result([400], env_tokens=200, total_reward=0.0, status="error")
    assert request_metrics([good, failed]) == request_metrics([good])


def test_nothing_but_failures_has_no_metrics() -> None:
    assert request_metrics([result([4], env_tokens=2, total_reward=0.0, status="error")]) == {}


def test_policy_names_the_oldest_and_newest_weights_by_number() -> None:
    samples = [result([1], 0, 0.0, versions="9 10"), result([1], 0, 0.0, versions="11")]
    assert policy_versions(samples) == PolicyVersions(oldest="9", newest="11")
    assert policy_versions([result([], 0, 0.0)]) == PolicyVersions(oldest=None, newest=None)
