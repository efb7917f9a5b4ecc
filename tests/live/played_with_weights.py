"""What the running service plays, and whether the weights that it names made it."""

import time
from concurrent.futures import Future
from typing import Any

from benchmarks.reference_model import State
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, SampleResult, Sampling
from tests.live.forward_pass import float32_model_of, logprob_differences
from tests.live.running_service import ongoing_generations

LOGPROB_TOLERANCE = 0.02
SAME_WEIGHTS_TOLERANCE = 0.008
"""Of 32 samples or more. The same weights differ by 0.001 to 0.004, the nearest others (an adapter's) by 0.06 and
more."""
LONG_GAMES_TOLERANCE = 0.016
"""Of games of 600 tokens, whose rounding adds up: the same weights differ by 0.008 (by 0.007 from a model in
float32)."""
CHECKSUMS_WITHIN_S = 60.0
"""For `client.policy`: the checksums of the weights in the engines."""


def play(client: RolloutClient, count: int = 32, **options: Any) -> RolloutResponse:
    sampling = options.pop("sampling", Sampling(max_new_tokens=48, seed=5))
    return client.rollout(client.example_samples("math", count, seed=5), sampling=sampling, **options)


def wait_until_generating(playing: "Future[Any]", rollouts: int) -> None:
    """Returns when so many generations of the rollouts that are `playing` run at once."""
    while ongoing_generations() < rollouts:
        assert not playing.done(), "the rollouts had ended before all of them generated at once"
        time.sleep(0.02)


def versions_of(results: list[SampleResult]) -> set[str]:
    return {span.version for result in results for m in result.message_log for span in m.weight_versions or ()}


def generated(result: SampleResult) -> list[Any]:
    return [message for message in result.message_log if message.generation_logprobs is not None]


def tokens_of(result: SampleResult) -> list[tuple[str, str, list[int]]]:
    """A log without its log-probabilities, whose last digits depend on what else is in the engine's batch."""
    return [(message.role, message.content, message.token_ids) for message in result.message_log]


def assert_of_weights(
    results: list[SampleResult], version: int | str, state: State, before: State | None = None
) -> None:
    """Every token was made by `state`, under the name `version`, and not by the weights `before`."""
    assert versions_of(results) == {str(version)}
    differences = logprob_differences(results, {str(version): float32_model_of(state)})[str(version)]
    assert differences.mean().item() <= SAME_WEIGHTS_TOLERANCE
    if before is not None:
        others = logprob_differences(results, {str(version): float32_model_of(before)})[str(version)]
        assert others.mean().item() > 2 * SAME_WEIGHTS_TOLERANCE, "the samples do not tell the old weights from the new"
