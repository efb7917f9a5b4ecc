"""Several environments that judge one reply."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from deployments.tasks.multi_reward import MultiRewardEnvironment
from rollout_env import ChatMessage, SampleRejected, StartOutcome, StepOutcome, TaskEnvironment, check, play
from rollout_env.loading import EnvironmentNotLoadable, load_environment
from rollout_env.steps import validated_step
from tests.virtual_time import runs

HERE = __name__


class Count(BaseModel):
    model_config = ConfigDict(extra="forbid")

    turns: int


class CountingEnvironment(TaskEnvironment):
    """Gives `reward` a turn, for as many turns as its sample says."""

    description = "Counts."
    ExtraEnvInfo = Count
    closed = 0

    def __init__(self, reward: float = 1.0, named: bool = False, limit: int | None = None) -> None:
        self.reward: float | dict[str, float] = {"good": reward, "bad": 0.5} if named else reward
        self.max_concurrent_steps = limit

    def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        if message_log[-1]["content"] == "bad":
            raise SampleRejected("It is bad.")
        left = extra_env_info.turns - 1
        return StepOutcome(
            {"role": "user", "content": f"{left} left"}, self.reward, left == 0, {"turns": left}, answer=f"{left}"
        )

    def close(self) -> Awaitable[None] | None:
        CountingEnvironment.closed += 1
        return None

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"messages": [{"role": "user", "content": f"Go {n}."}], "extra_env_info": {"turns": 1 + n}}
            for n in range(seed, seed + count)
        ]


class StartingEnvironment(CountingEnvironment):
    def start(self, message_log: list[ChatMessage], extra_env_info: Count) -> StartOutcome:
        return StartOutcome()


class WaitingEnvironment(CountingEnvironment):
    """Its steps never end."""

    running = 0

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:  # type: ignore[override]
        WaitingEnvironment.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            WaitingEnvironment.running -= 1
        raise AssertionError


def part(name: str = "CountingEnvironment", weight: float = 1.0, **arguments: Any) -> dict[str, Any]:
    return {"import_path": f"{HERE}:{name}", "weight": weight, "arguments": arguments}


def made(**parts: Any) -> TaskEnvironment:
    return load_environment("deployments.tasks.multi_reward:MultiRewardEnvironment", {"parts": parts})


def sample(**turns: int) -> dict[str, Any]:
    infos = {name: {"turns": count} for name, count in turns.items()}
    return {"messages": [{"role": "user", "content": "Go."}], "extra_env_info": infos}


def test_rewards_are_weighted_and_named_after_their_parts() -> None:
    environment = made(one=part(weight=2.0, reward=3.0), two=part(weight=-1.0, named=True))
    played = play(environment, ["a", "b"], sample(one=2, two=2))
    assert played.rewards == {"one": 12.0, "two/good": -2.0, "two/bad": -1.0}


def test_a_part_outside_of_the_reward_gives_metrics() -> None:
    shadow = {**part(weight=2.0, named=True), "in_reward": False}
    played = play(
        made(one=part(), two=shadow, three={**part(), "in_reward": False}), ["a", "b"], sample(one=2, two=2, three=1)
    )
    assert (played.rewards, played.total_reward) == ({"one": 2.0}, 2.0)
    assert played.metrics == {"two/good": 4.0, "two/bad": 2.0, "three": 1.0}


def test_the_first_part_leads_and_a_part_that_has_ended_judges_no_longer() -> None:
    played = play(made(one=part(), two=part(), three=part()), ["a", "b", "c"], sample(one=2, two=1, three=3))
    assert (played.rewards, played.terminated) == ({"one": 2.0, "two": 1.0, "three": 2.0}, True)
    assert [message["content"] for message in played.message_log] == ["Go.", "a", "1 left", "b", "0 left"]
    assert played.answers == ["1", "0"]
    assert played.extra_env_info["three"] == {"turns": 1}


def test_the_fields_of_a_sample_are_those_of_each_part() -> None:
    fields = made(one=part(), two=part()).ExtraEnvInfo.model_json_schema()
    assert (fields["required"], list(fields["properties"])) == (["one", "two"], ["ended", "one", "two"])


@runs
async def test_a_part_that_fails_ends_the_steps_of_the_others() -> None:
    environment = made(one=part("WaitingEnvironment"), two=part())

    with pytest.raises(SampleRejected, match=r"^It is bad\.$") as failure:
        await validated_step(
            environment, [{"role": "assistant", "content": "bad"}], sample(one=1, two=1)["extra_env_info"]
        )
    assert WaitingEnvironment.running == 0
    assert failure.value.__context__ is None


@pytest.mark.parametrize("ended", ["one", "three"])
def test_neither_the_leader_nor_an_unknown_part_can_have_ended(ended: str) -> None:
    given = sample(one=1, two=1)
    given["extra_env_info"]["ended"] = [ended]
    with pytest.raises(SampleRejected, match=r"extra_env_info\.ended\.0: Input should be 'two'"):
        play(made(one=part(), two=part()), ["a"], given)
    del given["extra_env_info"]["two"]
    with pytest.raises(SampleRejected, match=r"extra_env_info\.ended: List should have at most 0 items"):
        play(made(one=part()), ["a"], given)


def test_as_many_steps_run_at_once_as_the_part_with_the_lowest_limit_takes() -> None:
    assert made(one=part(limit=4), two=part(limit=2), three=part()).max_concurrent_steps == 2
    assert made(one=part()).max_concurrent_steps is None


def test_its_end_closes_every_part() -> None:
    closed_before = CountingEnvironment.closed
    closing = made(one=part(), two=part()).close()
    assert closing is not None
    asyncio.run(closing)  # type: ignore[arg-type]
    assert CountingEnvironment.closed == closed_before + 2


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "parts: Dictionary should have at least 1 item"),
        ({"one": {"import_path": "no.such:Thing"}}, "no.such:Thing cannot be imported: there is no module no."),
        ({"one": part(colour=1)}, "got an unexpected keyword argument 'colour'"),
        ({"one": part(), "ended": part()}, "parts: a part cannot be named 'ended', which is a field of extra"),
        ({"one": part("StartingEnvironment")}, "StartingEnvironment has a start or sessions, which a part cannot have"),
    ],
)
def test_parts_that_cannot_be_made_are_named(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvironmentNotLoadable) as refused:
        made(**parts)
    assert says in str(refused.value)


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: made(one=part(), two=part(named=True)))
    assert MultiRewardEnvironment.description


@pytest.mark.parametrize(
    ("finish_reason", "judges_cut_replies", "reward"),
    [("length", True, 2.0), ("length", False, 0.0), ("stop", False, 2.0)],
)
def test_a_part_judges_cut_replies_unless_it_says_otherwise(
    finish_reason: Literal["stop", "length"], judges_cut_replies: bool, reward: float
) -> None:
    # Without the field, a part judges them.
    field = {} if judges_cut_replies else {"judges_cut_replies": False}
    reply: ChatMessage = {"role": "assistant", "content": "4", "finish_reason": finish_reason}
    played = play(made(one={**part(weight=2.0), **field}), [reply], sample(one=1))
    assert (played.rewards, played.terminated) == ({"one": reward}, True)
