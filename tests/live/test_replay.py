"""Rollouts of a real engine, generated again by `POST /v1/replay`: equal, or found at the token that was changed.

The engine on processors computes a generation beside others with other rounding than alone. So rollouts that are to be
equal to the bit are played one after the other, as they are replayed.
"""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from rollout_client.errors import RequestRejected
from tests.live.forward_pass import adapter_folder, perturbed, tiny_state

logger = logging.getLogger(__name__)
ROLLOUTS = 500
TURNS = 3
GREEDY = Sampling(greedy=True, max_new_tokens=12)
SEEDED = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=12, seed=11)


def played(client: RolloutClient, seed: int, sampling: Sampling = SEEDED, **options: Any) -> SampleResult:
    """One game of several turns, alone in the engine."""
    samples = client.example_samples("sliding_puzzle", 1, seed=seed)
    [result] = client.rollout(samples, sampling=sampling, max_rollout_turns=TURNS, **options).samples
    return result


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_rollout_is_generated_again_with_equal_tokens_and_log_probabilities(
    client: RolloutClient, sampling: Sampling
) -> None:
    result = played(client, 1, sampling)
    again = client.replay(result)
    assert [each.message for each in again.generations] == [1, 3, 5]
    assert (again.verdict, again.rollout_id) == ("equal", result.rollout_id)
    assert again.tokens == sum(result.metrics.turn_gen_tokens)
    assert again.largest_difference == pytest.approx(0, abs=1e-6)


def with_other_token(result: SampleResult) -> None:
    ids = result.message_log[3].token_ids
    ids[4] = ids[4] + 1 if ids[4] < 200 else ids[4] - 1


def with_other_logprob(result: SampleResult) -> None:
    logprobs = result.message_log[3].generation_logprobs
    assert logprobs is not None
    logprobs[4] -= 0.001


def with_other_seed(result: SampleResult) -> None:
    assert result.replay is not None
    result.replay.seed = 12


def with_other_temperature(result: SampleResult) -> None:
    assert result.replay is not None
    result.replay.temperature = 0.9


def with_stop_string(result: SampleResult) -> None:
    """The last character of the second response: a generation with it ends no later."""
    assert result.replay is not None
    result.replay.generations[1].stop_strings = [result.message_log[3].content[3:5]]


CHANGES: list[tuple[Callable[[SampleResult], None], int, int | None]] = [
    (with_other_token, 3, 4),
    (with_other_logprob, 3, 4),
    (with_other_seed, 1, None),
    (with_other_temperature, 1, None),
    (with_stop_string, 3, None),
]


@pytest.mark.long
@pytest.mark.parametrize(("change", "message", "token"), CHANGES)
def test_a_change_is_found_at_its_token(
    client: RolloutClient, change: Callable[[SampleResult], None], message: int, token: int | None
) -> None:
    result = played(client, 2)
    change(result)
    again = client.replay(result)
    found = next(each.difference for each in again.generations if each.difference is not None)
    assert again.verdict in ("parts", "equal_ids")
    assert found.message == message
    assert token is None or found.token == token


@pytest.mark.long
def test_a_generation_that_a_deadline_has_cut_and_the_one_that_went_on_are_equal(client: RolloutClient) -> None:
    samples = client.example_samples("sliding_puzzle", 1, seed=6)
    sampling = SEEDED.model_copy(update={"max_new_tokens": 1500, "ignore_eos": True})
    options: dict[str, Any] = {"sampling": sampling, "max_rollout_turns": 1}
    [cut] = client.rollout(samples, deadline_s=1.0, **options).samples
    assert cut.status == "deadline"
    assert client.replay(cut).verdict == "equal"
    again = {"task_name": cut.task_name, "message_log": cut.message_log, "extra_env_info": cut.extra_env_info}
    [whole] = client.rollout([again], **options).samples
    assert whole.replay is not None
    [origin] = whole.replay.generations
    assert (origin.start, origin.end) == (len(cut.message_log[-1].token_ids), 1500)
    assert client.replay(whole).verdict == "equal"


@pytest.mark.long
def test_what_ran_beside_others_differs_by_rounding_alone_until_it_parts(client: RolloutClient) -> None:
    """The share that is equal is a figure of docs/records.md."""
    samples = client.example_samples("sliding_puzzle", 64, seed=7)
    together = client.rollout(samples, sampling=SEEDED, max_rollout_turns=TURNS).samples
    replays = [client.replay(result) for result in together]
    parts = [each for again in replays for each in again.generations]
    verdicts = Counter(again.verdict for again in replays)
    largest = max(again.largest_difference or 0.0 for again in replays)
    same = sum(each.verdict != "parts" for each in parts)
    logger.info("%s; %s of %s generations with equal ids; largest %s", dict(verdicts), same, len(parts), largest)
    assert verdicts.keys() <= {"equal", "equal_ids", "parts"}
    assert largest < 0.5


@pytest.mark.long
def test_a_version_that_is_gone_is_refused_until_its_weights_are_current_again(client: RolloutClient) -> None:
    before = client.policy().current
    result = played(client, 3)
    client.push_weights(perturbed(7))
    with pytest.raises(RequestRejected, match=f"rollout policy rollback {before}") as rejected:
        client.replay(result)
    assert rejected.value.problem.status == 409
    client.rollback(before)
    assert client.replay(result).verdict == "equal"


@pytest.mark.long
def test_other_weights_under_the_number_of_the_record_are_found(client: RolloutClient) -> None:
    result = played(client, 4)
    client.push_weights(perturbed(8))
    for message in result.message_log:
        for span in message.weight_versions or ():
            span.version = str(client.policy().current)
    again = client.replay(result)
    assert again.verdict == "parts"
    first = again.generations[0]
    assert first.difference is not None
    assert first.difference.message == 1
    client.push_weights(tiny_state())


@pytest.mark.long
def test_a_rollout_without_a_seed_cannot_be_drawn_again(client: RolloutClient) -> None:
    again = client.replay(played(client, 5, Sampling(max_new_tokens=12)))
    assert again.verdict == "not_compared"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_five_hundred_rollouts_are_equal_through_pushes_and_with_adapters(
    client: RolloutClient, tmp_path: Path
) -> None:
    verdicts: Counter[str] = Counter()
    largest = 0.0
    tokens = 0
    adapter_folder(tmp_path / "run-r", 5)
    for stage in range(5):
        client.push_weights(perturbed(stage) if stage else tiny_state())
        client.push_weights(tmp_path / "run-r", kind="adapter", name="run-r")
        for number in range(ROLLOUTS // 5):
            policy = {"name": "run-r"} if number % 4 == 3 else {}
            sampling = GREEDY if number % 2 else SEEDED.model_copy(update={"seed": number})
            result = played(client, number, sampling, policy=policy)
            again = client.replay(result)
            verdicts[again.verdict] += 1
            largest = max(largest, again.largest_difference or 0.0)
            tokens += again.tokens
            if again.verdict != "equal":
                logger.error("%s.%s: %s", stage, number, again.model_dump_json(exclude_none=True))
    logger.info("%s, %s tokens, largest difference %s", dict(verdicts), tokens, largest)
    assert verdicts == {"equal": ROLLOUTS}
