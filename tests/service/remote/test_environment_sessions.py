"""Steps of rollouts that have a session at one replica, over a scripted Serve handle."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import EnvironmentLost
from deployments.protocols.environments import StepRequest, TaskDescription
from deployments.rpc.handle_calls import record_live_replicas
from service.remote.environment import RemoteEnvironment
from tests import virtual_time
from tests.fakes.serve_handle import ScriptedEnvironmentHandle, ScriptedResponse
from tests.service.remote.test_environment import environment_over

DESCRIPTION = TaskDescription("task", "Holds sessions.", fields={}, has_sessions=True)


async def described(*replicas: str, script: Sequence[Any] = ()) -> tuple[ScriptedEnvironmentHandle, RemoteEnvironment]:
    """An environment that has described itself, as it has when its samples are checked, and its handle."""
    handle, environment = environment_over(*replicas, script=script)
    handle.describe.remote = lambda: ScriptedResponse(DESCRIPTION)
    await environment.known_description()
    return handle, environment


def request(rollout: str, turn: int = 0, lockstep_id: str = "") -> StepRequest:
    log: Any = [{"role": "assistant", "content": "A"}]
    return StepRequest(log, {}, step_id=f"{rollout}-{turn}", session_id=rollout, turn=turn, lockstep_id=lockstep_id)


def replicas_by_rollout(handle: ScriptedEnvironmentHandle) -> dict[str, set[str]]:
    where: dict[str, set[str]] = {}
    for replica, step_ids in handle.stepped:
        for step_id in step_ids:
            where.setdefault(step_id.partition("-")[0], set()).add(replica)
    return where


@pytest.mark.parametrize("lockstep_id", ["", "request"])
async def test_all_steps_of_a_rollout_go_to_one_replica_and_rollouts_are_spread(lockstep_id: str) -> None:
    handle, environment = await described("one", "two", "three")
    for turn in range(3):
        await asyncio.gather(*(environment.step(request(f"{name}", turn, lockstep_id)) for name in range(30)))
    where = replicas_by_rollout(handle)
    assert {len(replicas) for replicas in where.values()} == {1}
    assert Counter(replica for [replica] in where.values()) == {"one": 10, "two": 10, "three": 10}


async def test_a_session_counts_as_load_until_it_is_released() -> None:
    handle, environment = await described("one", "two")
    await asyncio.gather(*(environment.step(request(f"{name}")) for name in range(4)))
    on_one = [name for name, replicas in replicas_by_rollout(handle).items() if replicas == {"one"}]
    assert len(on_one) == 2
    for name in on_one:
        environment.release(name)
    handle.stepped.clear()
    await asyncio.gather(*(environment.step(request(f"late{name}")) for name in range(2)))
    assert {replica for replica, _ in handle.stepped} == {"one"}


async def test_sessions_of_one_iteration_are_released_in_one_call() -> None:
    handle, environment = await described("one")
    await asyncio.gather(*(environment.step(request(name)) for name in "ab"))
    for name in "abax":
        environment.release(name)
    await virtual_time.settled()
    assert handle.released == [("one", ["a", "b"])]


async def test_a_rollout_whose_replica_is_gone_goes_to_another_one() -> None:
    handle, environment = await described("one")
    await environment.step(request("a"))
    record_live_replicas(handle.deployment_id, ["two"])
    await environment.step(request("a", 1))
    environment.release("a")
    await virtual_time.settled()
    assert [replica for replica, _ in handle.stepped] == ["one", "two"]
    assert handle.released == [("two", ["a"])]


async def test_a_step_that_was_lost_releases_its_session() -> None:
    handle, environment = await described("one", "two", script=[[ActorDiedError()]])
    with pytest.raises(EnvironmentLost):
        await environment.step(request("a"))
    await environment.step(request("a"))
    await virtual_time.settled()
    first, second = (replica for replica, _ in handle.stepped)
    assert {first, second} == {"one", "two"}
    assert handle.released == [(first, ["a"])]


async def test_starts_are_spread_without_a_session() -> None:
    handle, environment = await described("one", "two")
    await asyncio.gather(*(environment.start(request("")) for _ in range(4)))
    assert Counter(replica for replica, step_ids in handle.stepped for _ in step_ids) == {"one": 2, "two": 2}
