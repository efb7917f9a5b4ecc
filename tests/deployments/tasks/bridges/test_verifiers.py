"""The bridge to verifiers, over the real package in a Python environment of its own."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.tasks.bridges.hosted import HostedEnvironment, HostedEnvironmentError, HostSettings
from rollout_env import SampleRejected, check, play
from rollout_env.steps import validated_extra_env_info
from tests.paths import BRIDGED

TASKSETS = str(BRIDGED / "verifiers_tasksets")


def made(taskset: str) -> HostedEnvironment:
    return HostedEnvironment(
        HostSettings(
            python=str(Path(os.environ["ROLLOUT_BRIDGES"]) / "verifiers" / "bin" / "python"),
            import_path="deployments.tasks.bridges.verifiers:VerifiersEnvironment",
            arguments={"taskset": {"id": taskset}},
            folders=[TASKSETS],
        )
    )


@contextmanager
def hosted(taskset: str) -> Iterator[HostedEnvironment]:
    environment = made(taskset)
    try:
        yield environment
    finally:
        asyncio.run(environment.close())


@pytest.fixture(scope="module")
def sums() -> Iterator[HostedEnvironment]:
    with hosted("sums_taskset") as environment:
        yield environment


@pytest.fixture(scope="module")
def guesses() -> Iterator[HostedEnvironment]:
    with hosted("guess_taskset") as environment:
        yield environment


def sample(index: int) -> dict[str, Any]:
    return {"extra_env_info": {"index": index}}


@pytest.mark.parametrize(
    ("reply", "rewards"), [("4", {"right": 2.0, "short": 1.0}), ("not four", {"right": 0, "short": 0})]
)
def test_an_environment_of_one_turn_gives_its_weighted_rewards_by_name(
    sums: HostedEnvironment, reply: str, rewards: dict[str, float]
) -> None:
    played = play(sums, [reply], sample(3))
    assert played.message_log[:2] == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "What is 3 + 1?"},
    ]
    assert (played.rewards, played.terminated) == ({**rewards, "fragile": 0.0}, True)
    assert played.message_log[2:] == [{"role": "assistant", "content": reply}], "no observation ends it"


def test_an_environment_of_several_turns_is_played_by_steps(guesses: HostedEnvironment) -> None:
    played = play(guesses, ["9", "5", "7"], sample(7))
    assert [message["content"] for message in played.message_log] == [
        "Guess my number.",
        "9",
        "Lower.",
        "5",
        "Higher.",
        "7",
        "",
    ]
    assert (played.rewards, played.terminated) == ({"found": pytest.approx(1 / 3), "reward": 0.0}, True)


def test_episodes_that_are_played_at_once_do_not_mix() -> None:
    check(made("guess_taskset"), replies=["9", "5", "7"], samples=[sample(7), sample(5)], max_block_s=30)


def test_a_verifier_that_raises_fails_its_own_sample(sums: HostedEnvironment) -> None:
    with pytest.raises(HostedEnvironmentError, match=r"the episode failed: .*the verifier broke"):
        play(sums, ["break"], sample(0))
    assert play(sums, ["1"], sample(0)).rewards["right"] == 2.0


def test_a_task_that_is_not_there_is_rejected(sums: HostedEnvironment) -> None:
    with pytest.raises(SampleRejected, match="the taskset has 5 tasks, from 0"):
        play(sums, [], sample(5))
    assert sums.example_samples(4, seed=3) == [sample(3), sample(4), sample(0), sample(1)]


def test_a_taskset_without_end_is_not_loaded_for_ever(guesses: HostedEnvironment) -> None:
    with pytest.raises(SampleRejected, match=r"index.*1048576"):
        validated_extra_env_info(guesses, {"index": 2**40})
    assert guesses.example_samples(2, seed=2**62 + 3) == [sample(3), sample(4)]


def test_a_rollout_that_is_cut_off_ends_its_episode(guesses: HostedEnvironment) -> None:
    for _ in range(3):
        assert not play(guesses, ["1"], sample(50)).terminated
    assert play(guesses, ["50"], sample(50)).rewards["found"] == 1.0
