"""Rollouts of a real engine, generated again by `POST /v1/replay`: equal, or found at the token that was changed.

The engine on processors computes a generation beside others with other rounding than alone. So rollouts that are to be
equal to the bit are played one after the other, as they are replayed.
"""

from pathlib import Path
from typing import Any

import pytest

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from tests.live.forward_pass import adapter_folder, perturbed, tiny_state

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
def test_a_replay_has_equal_tokens_and_log_probabilities(client: RolloutClient, sampling: Sampling) -> None:
    result = played(client, 1, sampling)
    again = client.replay(result)
    assert [each.message for each in again.generations] == [1, 3, 5]
    assert (again.verdict, again.rollout_id) == ("equal", result.rollout_id)
    assert again.tokens == sum(result.metrics.turn_gen_tokens)
    assert again.largest_difference == pytest.approx(0, abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_500_rollouts_are_equal_through_pushes_and_with_adapters(client: RolloutClient, tmp_path: Path) -> None:
    unequal: list[str] = []
    adapter_folder(tmp_path / "run-r", 5)
    for stage in range(5):
        client.push_weights(perturbed(stage) if stage else tiny_state())
        client.push_weights(tmp_path / "run-r", kind="adapter", name="run-r")
        for number in range(ROLLOUTS // 5):
            policy = {"name": "run-r"} if number % 4 == 3 else {}
            sampling = GREEDY if number % 2 else SEEDED.model_copy(update={"seed": number})
            result = played(client, number, sampling, policy=policy)
            again = client.replay(result)
            if again.verdict != "equal":
                unequal.append(f"{stage}.{number}: {again.model_dump_json(exclude_none=True)}")
    assert unequal == []
