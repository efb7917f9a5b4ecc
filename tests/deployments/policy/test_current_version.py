"""Waiting for a version to become current."""

import asyncio
from typing import Any

from deployments.policy.failures import PolicyNotCurrent
from tests.deployments.policy.policy_world import World, in_world, refused, weights
from tests.virtual_time import now, settled


def not_current(field: str, how: str, current: int, value: int) -> Any:
    return refused(PolicyNotCurrent, field, f"{how}; version {current} is current", value)


async def waited(world: World, min_version: int, version: int | None, wait_s: float | None) -> int:
    """The current version of the policy without a name once it is as demanded."""
    return (await world.store.wait_for(None, min_version, version, wait_s)).versions[""]


@in_world()
async def test_what_is_current_already_is_not_waited_for(world: World) -> None:
    assert await waited(world, 0, None, 0.0) == 0
    assert await waited(world, 0, 0, None) == 0
    await world.push(3, weights(2.0))
    began = now()
    assert await waited(world, 2, None, None) == 3
    assert await waited(world, 3, 3, 10.0) == 3
    assert now() == began


@in_world()
async def test_a_version_that_comes_in_time_is_waited_for(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    waits = [
        asyncio.create_task(waited(world, min_version, version, 50.0))
        for min_version, version in ((1, None), (2, None), (0, 2))
    ]
    for version in (1, 2):
        await world.push(version, weights(version + 1.0))
    assert await asyncio.gather(*waits) == [1, 2, 2]


@in_world(wait_s=7)
async def test_waiting_ends_with_what_is_current(world: World) -> None:
    await world.push(3, weights(2.0))
    began = now()
    async with not_current("policy.min_version", "it is not there after 2.5 s", 3, 4):
        await waited(world, 4, None, 2.5)
    assert now() - began == 2.5
    async with not_current("policy.version", "it is not there after 0 s", 3, 5):
        await waited(world, 0, 5, 0.0)
    # No longer than the service allows.
    for wait_s in (None, 1000.0):
        began = now()
        async with not_current("policy.min_version", "it is not there after 7 s", 3, 4):
            await waited(world, 4, None, wait_s)
        assert now() - began == 7.0


@in_world()
async def test_a_version_that_was_passed_by_is_refused_at_once(world: World) -> None:
    await world.push(3, weights(2.0))
    began = now()
    for version in (0, 2):
        async with not_current("policy.version", "a newer one has taken its place", 3, version):
            await waited(world, 0, version, 60.0)
    assert now() == began
    waiting = asyncio.create_task(waited(world, 0, 4, 60.0))
    await settled()
    await world.push(5, weights(3.0))
    async with not_current("policy.version", "a newer one has taken its place", 5, 4):
        await waiting


@in_world()
async def test_whoever_watches_hears_of_a_new_version_or_of_none_after_a_while(world: World) -> None:
    seen = await world.store.watch(None)
    assert (seen.versions, now()) == ({"": 0}, 0.0)
    assert (await world.store.watch(seen), now()) == (seen, 5.0)
    watching = asyncio.create_task(world.store.watch(seen))
    await world.push(1, weights(2.0))
    assert (await watching).versions == {"": 1}
