"""The environment host, on environments that behave and others that do not."""

import asyncio
from typing import Any

from pydantic import BaseModel, field_validator

from deployments.environments.host import EnvironmentHost
from deployments.failures import EnvironmentBroken, EnvironmentRejected
from deployments.protocols import StepRequest
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from tests.service.scripted import outcome

LOG: list[ChatMessage] = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


class Mode(BaseModel):
    mode: str

    @field_validator("mode")
    @classmethod
    def is_no_bug(cls, mode: str) -> str:
        if mode == "bug":
            raise KeyError(mode)
        return mode


class Moody(TaskEnvironment):
    """Does what its sample's mode says."""

    description = "Moody."
    ExtraEnvInfo = Mode

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        match extra_env_info.mode:
            case "raise":
                raise KeyError("board")
            case "reject":
                raise EnvironmentRejected("The board is no board.")
            case "cancel":
                raise asyncio.CancelledError
            case "nan":
                return outcome(reward=float("nan"))
        return outcome(message_log[-1]["content"], self._reward, terminated=True)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"task_name": "moody", "messages": LOG, "extra_env_info": {"mode": f"{seed}"}}] * count


def answers(host: EnvironmentHost, requests: list[StepRequest]) -> list[StepOutcome | Exception]:
    async def all_of_them() -> dict[int, StepOutcome | Exception]:
        return dict([answer async for batch in host.step(requests) for answer in batch])

    by_place = asyncio.run(all_of_them())
    return [by_place[place] for place in range(len(requests))]


def test_a_step_that_fails_is_answered_beside_its_siblings_outcomes() -> None:
    host = EnvironmentHost("moody", "tests.deployments.environments.test_host:Moody", {"reward": 0.5})
    modes: list[dict[str, Any]] = [{"mode": "good"}, {"mode": "raise"}, {"mode": "reject"}, {"mode": "nan"}, {}]
    good, raised, rejected, not_finite, invalid = answers(host, [StepRequest(LOG, mode) for mode in modes])
    assert good == outcome("A", 0.5, terminated=True)
    assert isinstance(raised, EnvironmentBroken)
    assert str(raised) == "The environment raised KeyError: 'board'"
    assert isinstance(rejected, EnvironmentRejected)
    assert str(rejected) == "The board is no board."
    assert isinstance(not_finite, EnvironmentBroken)
    assert "outcome.reward" in str(not_finite)
    assert "finite number" in str(not_finite)
    assert isinstance(invalid, EnvironmentRejected)
    assert str(invalid) == "The environment cannot take this sample: extra_env_info.mode: Field required."


def test_no_bug_of_an_environment_reaches_the_siblings() -> None:
    host = EnvironmentHost("moody", "tests.deployments.environments.test_host:Moody", {})
    modes = [{"mode": "bug"}, {"mode": "cancel"}, {"mode": "good"}]
    bug, cancelled, good = answers(host, [StepRequest(LOG, mode) for mode in modes])
    assert isinstance(bug, EnvironmentBroken)
    assert str(bug) == "The environment raised KeyError: 'bug'"
    assert isinstance(cancelled, EnvironmentBroken)
    assert good == outcome("A", 1.0, terminated=True)


def test_a_host_describes_its_task() -> None:
    host = EnvironmentHost("moody", "tests.deployments.environments.test_host:Moody", {})
    description = asyncio.run(host.describe())
    assert (description.task_name, description.description) == ("moody", "Moody.")
    assert description.fields["required"] == ["mode"]
    assert description.example["extra_env_info"] == {"mode": "0"}
