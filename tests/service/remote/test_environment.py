"""Steps over a scripted Serve handle: where they go, in how many calls, how they end, and which samples are checked."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import EnvironmentLost
from deployments.protocols.environments import RefusedField, StepRequest
from deployments.rpc.batching import MOST_BYTES_PER_MESSAGE
from deployments.rpc.handle_calls import record_live_replicas
from service.remote.environment import RemoteEnvironment
from service.rollouts.loop import RolloutContext
from service.rollouts.pacing import LockstepSchedule
from tests import virtual_time
from tests.fakes.serve_handle import TASK, ScriptedEnvironmentHandle, ScriptedResponse
from tests.service.rollouts.playing import collect
from tests.service.scripted import EpisodeRecipe, ScriptedGenerator, outcome


def environment_over(*replicas: str, script: Sequence[Any] = ()) -> tuple[ScriptedEnvironmentHandle, RemoteEnvironment]:
    handle: Any = ScriptedEnvironmentHandle(*script)
    record_live_replicas(handle.deployment_id, replicas)
    return handle, RemoteEnvironment("task", handle)


def request(name: str, lockstep_id: str = "") -> StepRequest:
    return StepRequest([{"role": "assistant", "content": name}], {}, step_id=name, lockstep_id=lockstep_id)


async def test_a_step_whose_replica_dies_is_lost_and_retried_at_another_one(caplog: pytest.LogCaptureFixture) -> None:
    handle, environment = environment_over("one", "two", script=[[ActorDiedError()]])

    with pytest.raises(EnvironmentLost, match=r"^The replica of environment 'task' died during the call\.$"):
        await environment.step(request("a"))
    for _ in range(8):
        assert await environment.step(request("a")) == outcome()
    (lost, _), *retried = handle.stepped
    assert {replica for replica, _ in retried} == {"one", "two"} - {lost}
    [record] = caplog.records
    assert (vars(record)["task_name"], vars(record)["replica_id"]) == ("task", lost)


async def test_an_abandoned_step_is_aborted_on_its_own_replica() -> None:
    handle, environment = environment_over("one", script=[[[], [(0, outcome("a"))]]])

    steps = {name: asyncio.create_task(environment.step(request(name))) for name in "ab"}
    await asyncio.sleep(0.5)
    steps["b"].cancel()
    assert await steps["a"] == outcome("a")
    assert handle.aborted == [("one", ["b"])]


async def test_the_first_steps_ask_which_replicas_there_are_until_told() -> None:
    handle, environment = environment_over()
    answers: list[Any] = [TASK, ActorDiedError()]

    def describe() -> ScriptedResponse:
        """Once it is answered, it is not asked again."""
        answer = answers.pop()
        if not answers:
            record_live_replicas(handle.deployment_id, ["one", "two"])
        return ScriptedResponse(answer)

    handle.describe.remote = describe

    with pytest.raises(EnvironmentLost):
        await environment.step(request("lost"))
    assert handle.stepped == []
    await asyncio.gather(*(environment.step(request(f"{number}")) for number in range(8)))
    assert Counter(replica for replica, step_ids in handle.stepped for _ in step_ids) == {"one": 4, "two": 4}


async def test_the_description_and_the_example_samples_are_those_of_a_replica() -> None:
    handle, environment = environment_over()

    assert await environment.describe() == TASK
    assert await environment.example_samples(2, 7) == [{"task_name": "task"}] * 2
    assert handle.examples_asked == [(2, 7)]


COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}


async def test_an_environment_is_asked_about_every_sample_and_has_the_last_word() -> None:
    handle, environment = environment_over("one")
    handle.refuses = lambda info: info["count"] == "x"

    samples: list[Any] = [{"count": 1}, {"count": "3"}, {"count": 2}, {"count": "x"}]
    assert await environment.refused_fields(samples) == [RefusedField(3, ("count",), "wrong")]
    assert handle.checked == [[{"count": 1}, {"count": "3"}, {"count": 2}, {"count": "x"}]]


async def test_an_updated_environment_describes_itself_again() -> None:
    handle, environment = environment_over("old")
    descriptions = [replace(TASK, fields=COUNT), TASK]
    handle.describe.remote = lambda: ScriptedResponse(descriptions.pop())

    assert (await environment.known_description()).fields == {}
    record_live_replicas(handle.deployment_id, ["new"])
    for _ in range(2):
        assert (await environment.known_description()).fields == COUNT


def test_many_samples_are_checked_until_one_is_refused() -> None:
    handle, environment = environment_over("one")
    handle.refuses = lambda info: info["number"] == 600
    refused = virtual_time.run(environment.refused_fields([{"number": number} for number in range(2000)]))
    assert [field.place for field in refused] == [600]
    assert [len(checked) for checked in handle.checked] == [512, 512]


@pytest.mark.parametrize("samples", [1, 7, 600])
def test_in_lockstep_an_environment_gets_one_call_per_turn(samples: int) -> None:
    handle, environment = environment_over("one", "two")
    episodes = [EpisodeRecipe(position=place, max_rollout_turns=3).make() for place in range(samples)]
    collect(episodes, RolloutContext(ScriptedGenerator(["A"]), {"task": environment}, LockstepSchedule()))
    assert [len(requests) for requests in handle.requests] == [samples] * 3


async def test_large_steps_in_lockstep_go_to_one_replica_in_several_messages() -> None:
    handle, environment = environment_over("one", "two")
    half = "x" * (MOST_BYTES_PER_MESSAGE // 2)

    await asyncio.gather(*(environment.step(request(half, "lockstep")) for _ in range(3)))
    assert len(handle.stepped) == 3
    assert len({replica for replica, _ in handle.stepped}) == 1
