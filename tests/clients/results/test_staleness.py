"""How far behind the trainer the weights of a rollout were, token by token."""

import pytest

from rollout_client import RolloutResponse, SampleResult, Staleness, staleness
from tests.clients.scripted_service import SUMMARY, Json, result


def generated(*spans: tuple[int | str, int], tokens: int | None = None) -> Json:
    """A message of spans (version, tokens)."""
    end, weight_versions = 0, []
    for version, count in spans:
        weight_versions.append({"version": str(version), "start": end, "end": end + count})
        end += count
    count = end if tokens is None else tokens
    message = {"role": "assistant", "content": "", "token_ids": [1] * count, "generation_logprobs": [-1.0] * count}
    return message | ({"weight_versions": weight_versions} if spans else {})


def sample(*messages: Json) -> SampleResult:
    observation = {"role": "environment", "content": "", "token_ids": [5] * 100}
    return SampleResult.model_validate(result(message_log=[observation, *messages]))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([generated((7, 4))], Staleness(4, 0, oldest=7, newest=7, mean_lag=0.0, max_lag=0)),
        ([generated((5, 1), (7, 3))], Staleness(4, 0, oldest=5, newest=7, mean_lag=0.5, max_lag=2)),
        ([generated((4, 2)), generated((6, 6))], Staleness(8, 0, oldest=4, newest=6, mean_lag=1.5, max_lag=3)),
        ([generated((9, 2))], Staleness(2, 0, oldest=9, newest=9, mean_lag=-2.0, max_lag=-2)),
        ([generated(tokens=3), generated((6, 1))], Staleness(1, 3, oldest=6, newest=6, mean_lag=1.0, max_lag=1)),
        ([generated((6, 0))], Staleness(0, 0)),
        ([], Staleness(0, 0)),
    ],
)
def test_each_generated_token_weighs_the_same(messages: list[Json], expected: Staleness) -> None:
    assert staleness(sample(*messages), trainer_version=7) == expected


def test_only_the_tokens_of_the_named_policy_count() -> None:
    message = generated((3, 1), ("run-a/4", 2), ("run-b/6", 4))
    assert staleness(sample(message), 7) == Staleness(1, 6, oldest=3, newest=3, mean_lag=4.0, max_lag=4)
    of_run_b = Staleness(4, 3, oldest=6, newest=6, mean_lag=1.0, max_lag=1)
    assert staleness(sample(message), 7, "run-b") == of_run_b
    assert staleness(sample(message), 7, "run-c") == Staleness(0, 7)


def test_a_response_is_all_of_its_samples_together() -> None:
    samples = [sample(generated((7, 9))), sample(generated((4, 1)))]
    response = RolloutResponse.model_validate({**SUMMARY, "samples": samples})
    assert staleness(response, 7) == Staleness(10, 0, oldest=4, newest=7, mean_lag=0.3, max_lag=3)
