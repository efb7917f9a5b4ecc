"""Which turns of games were done twice, as their environment writes them down."""

import asyncio
from pathlib import Path

from tests.endurance.chaos.counted_puzzle import CountedPuzzleEnvironment, StepLog, turns_done_again


def test_each_step_is_written_with_its_game_and_its_turn(tmp_path: Path) -> None:
    environment = CountedPuzzleEnvironment(str(tmp_path / "steps"))
    [_, sample] = environment.example_samples(2, seed=1)
    state = environment.ExtraEnvInfo.model_validate(sample["extra_env_info"])
    log = [*sample["messages"], {"role": "assistant", "content": "<action>view</action>"}]
    outcome = asyncio.run(environment.step(log, state))
    assert outcome.metadata is not None
    assert outcome.metadata["game"] == 1

    log += [outcome.observation, {"role": "assistant", "content": "<action>view</action>"}]
    later = environment.ExtraEnvInfo.model_validate(outcome.metadata)
    asyncio.run(environment.step(log, later))
    asyncio.run(environment.step(log, later))
    assert StepLog(tmp_path / "steps").since(0) == {(1, 1): 1, (1, 2): 2}


def test_a_round_counts_its_own_steps(tmp_path: Path) -> None:
    steps = StepLog(tmp_path / "steps")
    assert steps.end() == 0
    steps.add((3, 1))
    place = steps.end()
    steps.add((3, 1))
    steps.add((4, 2))
    assert steps.since(place) == {(3, 1): 1, (4, 2): 1}


def test_turns_that_were_done_again_are_counted_by_game() -> None:
    assert turns_done_again({(1, 1): 1, (1, 2): 1, (2, 1): 2, (2, 2): 3, (3, 1): 1}) == {2: 3}
