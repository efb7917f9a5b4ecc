"""Steps over a scripted Serve handle."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import EnvironmentLost
from deployments.protocols import StepRequest, TaskDescription
from service.remote.environment import RemoteEnvironment
from service.rollouts.loop import RolloutContext
from service.rollouts.schedule import LockstepSchedule
from tests import virtual_time
from tests.service.remote.scripted_handles import ScriptedEnvironmentHandle, ScriptedResponse
from tests.service.rollouts.playing import collect
from tests.service.scripted import EpisodeRecipe, ScriptedGenerator, outcome


def environment_over(handle: ScriptedEnvironmentHandle) -> RemoteEnvironment:
    unchecked: Any = handle
    return RemoteEnvironment("task", unchecked)


def request(name: str) -> StepRequest:
    return StepRequest([{"role": "assistant", "content": name}], {})


def test_steps_of_one_iteration_go_in_one_call() -> None:
    handle = ScriptedEnvironmentHandle([[(1, outcome("b"))], [(0, outcome("a"))]])
    environment = environment_over(handle)

    async def run() -> list[Any]:
        return await asyncio.gather(*(environment.step(request(name)) for name in "ab"))

    assert virtual_time.run(run()) == [outcome("a"), outcome("b")]
    assert handle.requests == [[request("a"), request("b")]]


def test_a_replica_that_dies_during_a_step_is_a_lost_environment_that_names_its_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = environment_over(ScriptedEnvironmentHandle([ActorDiedError()]))
    with pytest.raises(EnvironmentLost, match=r"^The replica of environment 'task' died during the call\.$"):
        virtual_time.run(environment.step(request("a")))
    assert [vars(record)["task_name"] for record in caplog.records] == ["task"]


def test_the_description_and_the_example_samples_are_those_of_a_replica() -> None:
    handle = ScriptedEnvironmentHandle()
    environment = environment_over(handle)

    async def run() -> None:
        assert await environment.describe() == TaskDescription("task", "A scripted task.", fields={})
        assert await environment.example_samples(2, 7) == [{"task_name": "task"}] * 2
        assert handle.examples_asked == [(2, 7)]

    virtual_time.run(run())


def test_a_replica_that_dies_before_it_answers_is_a_lost_environment() -> None:
    handle = ScriptedEnvironmentHandle()
    handle.describe.remote = lambda: ScriptedResponse(ActorDiedError())
    with pytest.raises(EnvironmentLost, match=r"^The replica of environment 'task' died during the call\.$"):
        virtual_time.run(environment_over(handle).describe())


def test_a_description_that_nobody_waits_for_is_cancelled() -> None:
    handle = ScriptedEnvironmentHandle()
    response = ScriptedResponse(None)
    handle.describe.remote = lambda: response
    with pytest.raises(TimeoutError):
        virtual_time.run(asyncio.wait_for(environment_over(handle).describe(), 0.5))
    assert response.cancelled


@pytest.mark.parametrize("samples", [1, 7])
def test_in_lockstep_an_environment_gets_one_call_per_turn(samples: int) -> None:
    handle = ScriptedEnvironmentHandle()
    episodes = [EpisodeRecipe(position=place, max_rollout_turns=3).make() for place in range(samples)]
    collect(episodes, RolloutContext(ScriptedGenerator(["A"]), {"task": environment_over(handle)}, LockstepSchedule()))
    assert [len(requests) for requests in handle.requests] == [samples] * 3
