"""Steps of rollouts that have a session at one replica, over a scripted Serve handle."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import EnvironmentLost
from deployments.protocols.environments import StepRequest, TaskDescription
from deployments.rpc.handle_calls import record_live_replicas
from service.remote.environment import RemoteEnvironment
from tests import virtual_time
from tests.fakes.serve_handle import ScriptedEnvironmentHandle, ScriptedResponse

DESCRIPTION = TaskDescription("task", "Holds sessions.", fields={}, has_sessions=True)


def told(
    handle: ScriptedEnvironmentHandle, *replicas: str, story: Callable[[RemoteEnvironment], Awaitable[None]]
) -> None:
    """Runs the story with an environment that has described itself, as it has when its samples are checked."""
    handle.describe = SimpleNamespace(remote=lambda: ScriptedResponse(DESCRIPTION))
    record_live_replicas(handle.deployment_id, replicas)
    unchecked: Any = handle

    async def run() -> None:
        environment = RemoteEnvironment("task", unchecked)
        await environment.known_description()
        await story(environment)
        await virtual_time.settled()

    virtual_time.run(run())


def request(rollout: str, turn: int = 0, lockstep_id: str = "") -> StepRequest:
    log: Any = [{"role": "assistant", "content": "A"}]
    step_id = f"{rollout}-{turn}"
    return StepRequest(log, {}, step_id=step_id, session_id=rollout, turn=turn, lockstep_id=lockstep_id)


def replicas_by_rollout(handle: ScriptedEnvironmentHandle) -> dict[str, set[str]]:
    where: dict[str, set[str]] = {}
    for replica, step_ids in handle.stepped:
        for step_id in step_ids:
            where.setdefault(step_id.partition("-")[0], set()).add(replica)
    return where


@pytest.mark.parametrize("lockstep_id", ["", "request"])
def test_all_steps_of_a_rollout_go_to_one_replica_and_rollouts_are_spread(lockstep_id: str) -> None:
    handle = ScriptedEnvironmentHandle()

    async def story(environment: RemoteEnvironment) -> None:
        for turn in range(3):
            await asyncio.gather(*(environment.step(request(f"{name}", turn, lockstep_id)) for name in range(30)))

    told(handle, "one", "two", "three", story=story)
    where = replicas_by_rollout(handle)
    assert {len(replicas) for replicas in where.values()} == {1}
    assert Counter(replica for [replica] in where.values()) == {"one": 10, "two": 10, "three": 10}


def test_a_session_counts_as_load_until_it_is_released() -> None:
    handle = ScriptedEnvironmentHandle()

    async def story(environment: RemoteEnvironment) -> None:
        await asyncio.gather(*(environment.step(request(f"{name}")) for name in range(4)))
        where = replicas_by_rollout(handle)
        on_one = [name for name, replicas in where.items() if replicas == {"one"}]
        assert len(on_one) == 2
        for name in on_one:
            environment.release(name)
        handle.stepped.clear()
        await asyncio.gather(*(environment.step(request(f"late{name}")) for name in range(2)))
        assert {replica for replica, _ in handle.stepped} == {"one"}

    told(handle, "one", "two", story=story)


def test_sessions_of_one_iteration_are_released_in_one_call() -> None:
    handle = ScriptedEnvironmentHandle()

    async def story(environment: RemoteEnvironment) -> None:
        await asyncio.gather(*(environment.step(request(name)) for name in "ab"))
        for name in "abax":
            environment.release(name)

    told(handle, "one", story=story)
    assert handle.released == [("one", ["a", "b"])]


def test_a_rollout_whose_replica_is_gone_goes_to_another_one() -> None:
    handle = ScriptedEnvironmentHandle()

    async def story(environment: RemoteEnvironment) -> None:
        await environment.step(request("a"))
        record_live_replicas(handle.deployment_id, ["two"])
        await environment.step(request("a", 1))
        environment.release("a")

    told(handle, "one", story=story)
    assert [replica for replica, _ in handle.stepped] == ["one", "two"]
    assert handle.released == [("two", ["a"])]


def test_a_step_that_was_lost_releases_its_session() -> None:
    handle = ScriptedEnvironmentHandle([ActorDiedError()])

    async def story(environment: RemoteEnvironment) -> None:
        with pytest.raises(EnvironmentLost):
            await environment.step(request("a"))
        await environment.step(request("a"))

    told(handle, "one", "two", story=story)
    first, second = (replica for replica, _ in handle.stepped)
    assert {first, second} == {"one", "two"}
    assert handle.released == [(first, ["a"])]


def test_starts_are_spread_without_a_session() -> None:
    handle = ScriptedEnvironmentHandle()

    async def story(environment: RemoteEnvironment) -> None:
        await asyncio.gather(*(environment.start(request("")) for _ in range(4)))

    told(handle, "one", "two", story=story)
    assert Counter(replica for replica, step_ids in handle.stepped for _ in step_ids) == {"one": 2, "two": 2}
