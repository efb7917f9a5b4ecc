"""Shadow judges beside the steps of a host: what they see, what they give, and that they can do no harm."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.environments.host import EnvironmentHost
from deployments.environments.shadows import ShadowJudge, ShadowSettings
from deployments.failures import RolloutFailure
from deployments.protocols.environments import ShadowedOutcome, StepRequest
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from rollout_env.loading import EnvironmentNotLoadable
from tests import virtual_time

LOG: list[ChatMessage] = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
INFO = {"ground_truth": "4", "rubric": "short"}
GOOD = StepOutcome({"role": "user", "content": ""}, {"correct": 1.0}, terminated=True, answer="4")


class Info(BaseModel):
    ground_truth: str
    rubric: str = ""


class Main(TaskEnvironment):
    description = "Sums."
    ExtraEnvInfo = Info

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    async def step(self, message_log: list[ChatMessage], extra_env_info: Info) -> StepOutcome:
        if self.fails:
            raise KeyError("board")
        await asyncio.sleep(0.01)
        # A judge that changes its messages changes no others.
        return replace(GOOD, answer=message_log[-1]["content"])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return []


class RubricInfo(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rubric: str = ""


CLOSED: list[str] = []


class Judge(TaskEnvironment):
    """Does what it is told; it takes no field but its own."""

    description = "Replies with a style."
    ExtraEnvInfo = RubricInfo

    def __init__(self, does: str = "judge") -> None:
        self.does = does

    async def step(self, message_log: list[ChatMessage], extra_env_info: RubricInfo) -> StepOutcome:
        message_log[-1]["content"] = "spoiled"
        match self.does:
            case "raise":
                raise ValueError("It knows nothing.")
            case "exit":
                raise SystemExit(2)
            case "cancel":
                raise asyncio.CancelledError
            case "wait":
                await asyncio.sleep(1000)
        rewards = {"short": float(extra_env_info.rubric == "short"), "polite": 0.5}
        return StepOutcome(None, rewards, terminated=True, metadata={"seen": True})

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        CLOSED.append(self.does)


class Starting(Judge):
    def start(self, message_log: list[ChatMessage], extra_env_info: RubricInfo) -> Any:
        raise NotImplementedError


def shadow(does: str = "judge", **fields: Any) -> ShadowSettings:
    return ShadowSettings(import_path=f"{__name__}:Judge", arguments={"does": does}, **fields)


HOSTS: list[EnvironmentHost] = []
"""Those of the test."""


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    """Closes every host, as Serve does."""
    HOSTS.clear()
    yield
    for host in HOSTS:
        asyncio.run(closed(host))


async def closed(host: EnvironmentHost) -> None:
    if (closing := host.__del__()) is not None:
        await closing


def host_with(step_timeout_s: float | None = None, fails: bool = False, **shadows: ShadowSettings) -> EnvironmentHost:
    host = EnvironmentHost("math", f"{__name__}:Main", {"fails": fails}, step_timeout_s, shadows=shadows)
    HOSTS.append(host)
    return host


async def answered(host: EnvironmentHost) -> StepOutcome | RolloutFailure:
    request = StepRequest([message.copy() for message in LOG], INFO)
    [(_, result)] = [result async for item in host.step([request]) for result in item.results]
    return result


def fields_of(outcome: Any) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in StepOutcome.__slots__}


def test_shadows_judge_beside_the_step_and_change_nothing_of_its_outcome() -> None:
    result = asyncio.run(answered(host_with(style=shadow(), strict=shadow(weight=-2.0))))
    assert isinstance(result, ShadowedOutcome)
    assert fields_of(result) == fields_of(GOOD)
    assert result.shadow_rewards == {"style": 1.5, "strict": -3.0}
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_task_without_shadows_gives_the_outcome_itself() -> None:
    assert type(asyncio.run(answered(host_with()))) is StepOutcome


@pytest.mark.parametrize("does", ["raise", "exit", "cancel"])
def test_a_shadow_that_fails_gives_no_verdict_and_fails_no_step(does: str, caplog: pytest.LogCaptureFixture) -> None:
    host = host_with(style=shadow(does), other=shadow())

    async def twice() -> list[StepOutcome | RolloutFailure]:
        return [await answered(host), await answered(host)]

    for result in asyncio.run(twice()):
        assert isinstance(result, ShadowedOutcome)
        assert fields_of(result) == fields_of(GOOD)
        assert result.shadow_rewards == {"style": None, "other": 1.5}
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    assert all(record.getMessage().startswith("The shadow style gave no verdict: ") for record in caplog.records)


@pytest.mark.parametrize(("step_timeout_s", "waited_s"), [(None, 7.0), (10.0, 5.0)])
@virtual_time.test
async def test_a_slow_shadow_is_waited_for_until_its_limit_or_half_of_the_steps(
    step_timeout_s: float | None, waited_s: float
) -> None:
    host = host_with(step_timeout_s, style=shadow("wait", timeout_s=7.0))
    began = asyncio.get_running_loop().time()
    result = await answered(host)
    assert isinstance(result, ShadowedOutcome)
    assert (result.shadow_rewards, asyncio.get_running_loop().time() - began) == ({"style": None}, waited_s)


@virtual_time.test
async def test_a_step_that_fails_does_not_wait_for_its_shadows() -> None:
    result = await answered(host_with(fails=True, style=shadow("wait")))
    assert str(result) == "The environment raised KeyError: 'board'"
    assert asyncio.get_running_loop().time() < 1


def test_shadows_are_closed_with_the_environment() -> None:
    CLOSED.clear()
    asyncio.run(closed(host_with(style=shadow(), other=shadow("raise"))))
    assert CLOSED == ["judge", "raise"]


def test_a_shadow_with_a_start_or_of_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(EnvironmentNotLoadable, match="Starting has a start or sessions, which a shadow cannot have"):
        ShadowJudge("style", ShadowSettings(import_path=f"{__name__}:Starting"), None)
    with pytest.raises(EnvironmentNotLoadable):
        ShadowJudge("style", ShadowSettings(import_path=f"{__name__}:Nobody"), None)
    with pytest.raises(ValidationError):
        ShadowSettings(import_path="a:B", parts_at=0.0)
