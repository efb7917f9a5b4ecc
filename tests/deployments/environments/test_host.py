"""The environment host, on an environment that does what its sample says."""

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, field_validator

from deployments.environments import host as host_module
from deployments.environments.host import EnvironmentHost, _TooManyThreads
from deployments.failures import (
    EnvironmentBroken,
    EnvironmentLost,
    EnvironmentRejected,
    EnvironmentShuttingDown,
    RolloutFailure,
)
from deployments.protocols.environments import RefusedField, StepRequest
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment
from rollout_env.loading import EnvironmentNotLoadable
from rollout_env.steps import abandoned_threads, call
from tests import virtual_time
from tests.service.scripted import outcome
from tests.virtual_time import runs

LOG: list[ChatMessage] = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
GOOD = outcome("A", 1.0, terminated=True)


class ForeignFailure(RolloutFailure):
    """Not importable where the service runs."""


class Mode(BaseModel):
    mode: str

    @field_validator("mode")
    @classmethod
    def is_no_bug(cls, mode: str) -> str:
        if mode == "bug":
            raise KeyError(mode)
        return mode


class ObedientEnvironment(TaskEnvironment):
    """Raises or returns what `mode` names."""

    description = "Obedient."
    ExtraEnvInfo = Mode
    raised: ClassVar[dict[str, BaseException]] = {
        "raise": KeyError("board"),
        "exit": SystemExit(2),
        "cancel": asyncio.CancelledError(),
        "reject": SampleRejected("The board is no board."),
        "lose": EnvironmentLost("The judge died."),
        "foreign": ForeignFailure("The judge is gone."),
    }

    async def step(self, message_log: list[ChatMessage], extra_env_info: Mode) -> StepOutcome:
        if error := self.raised.get(extra_env_info.mode):
            raise error
        if extra_env_info.mode == "wait":
            await asyncio.Event().wait()
        if extra_env_info.mode == "silent":
            return StepOutcome(None, 1.0, terminated=True)
        if extra_env_info.mode == "nan":
            return outcome(reward=float("nan"))
        return outcome(message_log[-1]["content"], 1.0, terminated=True)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        if count > 10:
            raise ValueError("There are only 10 examples.")
        return [{"messages": LOG, "extra_env_info": {"mode": f"{seed}"}}] * count


def obedient_host(name: str = "ObedientEnvironment") -> EnvironmentHost:
    return EnvironmentHost("obedient", f"{__name__}:{name}", {}, step_timeout_s=None)


@runs
async def results_of(*modes: dict[str, Any]) -> list[StepOutcome | RolloutFailure]:
    """What the host answers to steps of one call, in their order."""
    requests = [StepRequest(LOG, mode, "request", f"request-{place}-0", place) for place, mode in enumerate(modes)]
    by_place = dict([result async for item in obedient_host().step(requests) for result in item])
    return [by_place[place] for place in range(len(modes))]


@pytest.mark.parametrize(
    ("extra_env_info", "kind", "message"),
    [
        ({"mode": "raise"}, EnvironmentBroken, "The environment raised KeyError: 'board'"),
        ({"mode": "bug"}, EnvironmentBroken, "The environment raised KeyError: 'bug'"),
        ({"mode": "exit"}, EnvironmentBroken, "The environment raised SystemExit: 2"),
        ({"mode": "cancel"}, EnvironmentBroken, "The environment cancelled its own step."),
        ({"mode": "reject"}, EnvironmentRejected, "The board is no board."),
        ({"mode": "lose"}, EnvironmentLost, "The judge died."),
        ({"mode": "foreign"}, EnvironmentBroken, "The environment raised ForeignFailure: The judge is gone."),
        (
            {"mode": "nan"},
            EnvironmentBroken,
            "The environment's outcome is not valid: outcome.reward.float: Input should be a finite number; "
            "outcome.reward.dict[str,float]: Input should be a valid dictionary.",
        ),
        ({}, EnvironmentRejected, "The environment cannot take this sample: extra_env_info.mode: Field required."),
    ],
)
def test_a_step_that_fails_is_logged_and_leaves_its_siblings_alone(
    extra_env_info: dict[str, Any], kind: type[RolloutFailure], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, failed, after = results_of({"mode": "good"}, extra_env_info, {"mode": "silent"})
    assert (before, after) == (GOOD, StepOutcome(None, 1.0, terminated=True))
    assert type(failed) is kind
    assert str(failed) == message
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", f"A step of task obedient failed: {message}")
    assert bool(record.exc_info and record.exc_info[2]) is (kind is not EnvironmentRejected)
    context = {name: getattr(record, name) for name in ("request_id", "rollout_id", "task_name", "sample")}
    assert context == {"request_id": "request", "rollout_id": "request-1-0", "task_name": "obedient", "sample": 1}


async def test_a_host_sends_a_heartbeat_while_a_step_takes_long() -> None:
    answers = obedient_host().step([StepRequest(LOG, {"mode": "wait"})], "caller")
    assert await anext(answers) == []
    assert virtual_time.now() == 1
    await answers.aclose()


async def test_an_aborted_step_ends_and_the_others_of_its_call_go_on(caplog: pytest.LogCaptureFixture) -> None:
    host = obedient_host()
    answers = host.step([StepRequest(LOG, {"mode": "wait"}, step_id=step_id) for step_id in ("one", "two")])
    first = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await host.abort(["two", "unknown"])
    [(place, failure)] = await first
    assert (await host.record_autoscaling_stats())["in_progress"] == 1.0
    await answers.aclose()
    assert (place, type(failure)) == (1, EnvironmentBroken)
    assert caplog.records == []


async def test_a_host_that_is_shut_down_gives_up_steps_after_their_time() -> None:
    host = obedient_host()
    host.drain(4.5)
    answers = [
        (virtual_time.now(), type(result))
        async for item in host.step([StepRequest(LOG, {"mode": mode}, step_id=mode) for mode in ("good", "wait")])
        for _, result in item
    ]
    assert answers == [(0.0, StepOutcome), (4.5, EnvironmentShuttingDown)]


def test_a_host_describes_its_task_and_names_the_fields_that_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    description = asyncio.run(obedient_host().describe())
    assert (description.task_name, description.description) == ("obedient", "Obedient.")
    assert description.fields["required"] == ["mode"]
    assert description.example == {"task_name": "obedient", "messages": LOG, "extra_env_info": {"mode": "0"}}
    refused = asyncio.run(obedient_host().refused_fields([{"mode": "good"}, {}, {"mode": "bug"}]))
    assert refused == [RefusedField(1, ("mode",), "Field required")]
    [record] = caplog.records
    assert (record.getMessage(), bool(record.exc_info)) == ("The fields of a sample could not be checked.", True)


@runs
async def test_a_replica_in_which_too_many_plain_steps_hang_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_MOST_ABANDONED_THREADS", 3)
    host, goes_on = obedient_host(), threading.Event()
    said = [await health(host)]
    for count in (2, 1):
        steps = [asyncio.create_task(call(goes_on.wait)) for _ in range(count)]
        await asyncio.sleep(0)
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)
        said.append(await health(host))
    goes_on.set()
    while abandoned_threads():
        await asyncio.sleep(0.01)
    assert [*said, await health(host)] == [None, None, "3 steps of task obedient hang in their threads.", None]


async def health(host: EnvironmentHost) -> str | None:
    """Why the host is not healthy."""
    try:
        await host.check_health()
    except _TooManyThreads as refusal:
        return str(refusal)
    return None


class Closing(ObedientEnvironment):
    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        self.closed.append("closed")
        raise OSError("The file is closed.")


class ClosingAsync(Closing):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


@pytest.mark.parametrize("name", ["Closing", "ClosingAsync"])
def test_a_host_closes_once_and_logs_a_close_that_raises(name: str, caplog: pytest.LogCaptureFixture) -> None:
    Closing.closed.clear()
    host = obedient_host(name)
    closing = host.__del__()
    if name == "ClosingAsync":
        virtual_time.run(closing)  # type: ignore[arg-type]
    assert host.__del__() is None
    assert Closing.closed == ["closed"]
    [record] = caplog.records
    assert record.getMessage() == "The environment of task obedient was not closed."
    assert str((record.exc_info or ("", ""))[1]) == "The file is closed."


def test_a_host_of_what_is_no_environment_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvironmentNotLoadable, match=r"^deployments\.failures:RolloutFailure is not a TaskEnvironment"):
        EnvironmentHost("obedient", "deployments.failures:RolloutFailure", {}, step_timeout_s=None)
    gc.collect()
    assert caplog.records == []


@pytest.mark.slow
def test_an_environment_without_models_needs_neither_httpx_nor_redis() -> None:
    program = "import sys, deployments.environments.host; print({'httpx', 'redis'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
