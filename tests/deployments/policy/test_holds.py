"""Pauses that trainers ask for: what ends them, what waits for what, and what a failing replica leaves."""

import asyncio
from typing import Any

from deployments.policy.commands import Hold, Release, SetAdapters, Stage, Swap
from deployments.policy.failures import PauseRefused
from tests.deployments.policy.policy_world import World, adapter, fleet, in_world, refused, weights
from tests.virtual_time import settled

HOLD = Hold("keep", 20.0)


@in_world()
async def test_a_hold_reaches_every_replica_and_lasts_until_it_is_released(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    await world.store.hold("keep", 20.0)
    assert [replica.received[-1].command for replica in replicas] == [HOLD, HOLD]
    assert await world.store.is_paused()
    await world.store.release()
    assert [replica.kinds[-1] for replica in replicas] == [Release, Release]
    assert not await world.store.is_paused()


@in_world()
async def test_a_hold_that_nobody_ends_is_none_after_its_lease(world: World) -> None:
    await fleet(world, "r0")
    await world.store.hold("keep", 20.0)
    await asyncio.sleep(19.0)
    assert await world.store.is_paused()
    await asyncio.sleep(1.0)
    assert not await world.store.is_paused()


@in_world()
async def test_new_weights_and_new_adapters_end_a_hold(world: World) -> None:
    [replica] = await fleet(world, "r0")
    of_b: dict[str, Any] = {"kind": "adapter", "name": "run-b"}
    for version, content, named, last in ((2, weights(3.0), {}, Swap), (1, adapter(), of_b, SetAdapters)):
        await world.store.hold("keep", 20.0)
        await world.push(version, content, **named)
        assert last in replica.kinds[replica.kinds.index(Hold) :]
        assert not await world.store.is_paused()


@in_world()
async def test_a_hold_waits_for_an_update_and_one_that_was_released_meanwhile_is_not_made(world: World) -> None:
    [replica] = await fleet(world, "r0")
    replica.holds = {Stage}
    pushing = await world.updating(2, weights(3.0))
    holding = asyncio.create_task(world.store.hold("keep", 20.0))
    await settled()
    releasing = asyncio.create_task(world.store.release())
    await settled()
    replica.go_on.set()
    await asyncio.gather(pushing, releasing)
    async with refused(PauseRefused, "mode", "it was released, or another pause has taken its place", "keep"):
        await holding
    assert Hold not in replica.kinds
    assert not await world.store.is_paused()


@in_world()
async def test_the_time_for_which_a_hold_waits_is_part_of_it(world: World) -> None:
    [replica] = await fleet(world, "r0")
    replica.holds = {Stage}
    pushing = await world.updating(2, weights(3.0))
    short, long = (asyncio.create_task(world.store.hold("keep", 15.0 + more)) for more in (-10.0, 5.0))
    await asyncio.sleep(15.0)
    replica.go_on.set()
    await pushing
    async with refused(PauseRefused, "mode", "it was released, or another pause has taken its place", "keep"):
        await short
    await long
    assert replica.received[-1].command == Hold("keep", 5.0)


@in_world()
async def test_a_release_ends_a_hold_that_is_being_made(world: World) -> None:
    [replica] = await fleet(world, "r0")
    replica.holds = {Hold}
    holding = asyncio.create_task(world.store.hold("wait", 20.0))
    await settled()
    releasing = asyncio.create_task(world.store.release())
    await settled()
    replica.go_on.set()
    await asyncio.gather(holding, releasing)
    assert replica.kinds[-2:] == [Hold, Release]
    assert not await world.store.is_paused()


@in_world()
async def test_a_replica_that_cannot_pause_lets_all_go_on_and_is_named(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    replicas[1].at = {Hold: "error"}
    message = "a replica could not pause: OSError: r1 has no room; wait less, or let trainers.pause_s be longer"
    async with refused(PauseRefused, "mode", message, "keep"):
        await world.store.hold("keep", 20.0)
    assert [replica.kinds[-1] for replica in replicas] == [Release, Release]
    assert not await world.store.is_paused()


@in_world()
async def test_a_replica_that_cannot_go_on_is_named_and_one_that_died_is_not(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    replicas[0].at = {Hold: "die"}
    await world.store.hold("keep", 20.0)
    replicas[1].at = {Release: "error"}
    async with refused(PauseRefused, "resume", "a replica could not go on: OSError: r1 has no room"):
        await world.store.release()


@in_world()
async def test_a_store_that_has_restarted_releases_what_its_predecessor_held(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await world.store.hold("keep", 20.0)
    await world.restart()
    await settled()
    assert await world.store.is_paused()
    await world.store.release()
    assert Release in replica.kinds
    assert not await world.store.is_paused()
