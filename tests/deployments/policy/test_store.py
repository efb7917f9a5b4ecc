"""The policy store as a whole: what a store that starts in place of one that died knows, and transfers among pushes."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import TransferRefused, UpdateUnderWay, WeightsRefused
from deployments.policy.versions import Version, Versions
from rollout_client.contract.policy import PolicyUpdate, PushOptions, SwitchOptions
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import (
    INITIAL,
    NORM,
    World,
    adapter,
    changed,
    checksum_of,
    delta,
    digest_of,
    in_world,
    play,
    refused,
    taken,
    versions,
    weights,
)
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.virtual_time import now, settled, until


@in_world()
async def test_the_layout_is_that_of_the_model(world: World) -> None:
    layout = await world.store.layout()
    assert layout.tensors.keys() == INITIAL.keys()
    assert (layout.tensors[NORM].dtype, layout.tensors[NORM].shape) == ("BF16", [128])


@in_world()
async def test_a_store_over_the_same_folder_goes_on_with_what_was_current(world: World) -> None:
    old = await world.replica("r0")
    await world.push(7, weights(2.0))
    await world.restart()
    state = await world.store.state(0)
    assert (state.current, [info.version for info in state.versions]) == (7, [0, 7])
    assert (await world.store.wait_for(None, 7, 7, 0.0)).versions[""] == 7
    young = await world.ready("r1")
    assert (old.loaded, young.loaded) == (LoadedWeights(7), LoadedWeights(7))
    assert world.cluster.done("stage") == [("r0", 7), ("r1", 7)]
    async with taken(7, newest=7):
        await world.store.write_chunk(7, None, 0, b"")


@in_world()
async def test_an_upload_goes_on_where_the_store_died(world: World) -> None:
    content = weights(2.0)
    await world.chunk(1, 0, content[:1000])
    await world.restart()
    assert (await world.store.upload_state(1)).received_bytes == 1000
    await world.chunk(1, 1000, content[1000:])
    update = await world.complete(1, PushOptions(), False, digest_of(content))
    assert update.checksum == file_checksum(world.versions.weights(1))


@in_world()
async def test_a_version_that_was_not_current_when_the_store_died_is_removed(world: World) -> None:
    await world.push(1, weights(2.0))
    # As a store leaves it that dies during an update, before the version is current.
    await world.upload(2, weights(3.0))
    os.link(world.policy.uploads.path(2), world.versions.weights(2))
    await world.restart()
    state = await world.store.state(0)
    assert (state.current, [info.version for info in state.versions]) == (1, [0, 1])
    # Its upload is still there, and can be completed.
    await world.chunk(2, len(weights(3.0)), b"")
    assert (await world.complete(2, PushOptions(), digest=digest_of(weights(3.0)))).version == 2


async def transferring(world: World, *names: str) -> Sequence[ScriptedReplica]:
    replicas = [await world.ready(name) for name in names]
    await start_transfer(world, 1 + len(names))
    return replicas


async def start_transfer(world: World, world_size: int) -> None:
    init_info = {"master_address": "10.0.0.4", "master_port": 29500, "world_size": world_size}
    assert await world.store.init_transfer(init_info) == world_size
    await world.store.start_transfer(SwitchOptions())


@in_world()
async def test_a_transfer_that_is_finished_is_current_and_has_no_weights_here(world: World) -> None:
    replicas = await transferring(world, "r0", "r1")
    await world.store.update_transfer("tensors")
    first, second = await asyncio.gather(
        world.store.finish_transfer(None), world.store.finish_transfer(None), return_exceptions=True
    )
    assert isinstance(first, PolicyUpdate)
    assert isinstance(second, TransferRefused)
    assert (first.version, first.checksum, versions(world)) == (1, None, [1])
    assert [replica.loaded for replica in replicas] == [LoadedWeights(1)] * 2
    # A replica that registers now waits for a version whose weights the store has.
    late = await world.replica("late")
    await settled()
    assert not late.accepts_requests
    await world.push(2, weights(2.0))
    assert (late.accepts_requests, late.loaded) == (True, LoadedWeights(2))


@in_world()
async def test_during_a_transfer_other_updates_wait_or_are_refused(world: World) -> None:
    await transferring(world, "r0")
    message = "a trainer is sending weights to the replicas; wait for it, or say if_busy=wait"
    async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
        await world.push(5, weights(2.0), if_busy="refuse")
    async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
        await world.store.start_transfer(SwitchOptions(if_busy="refuse"))
    pushing = world.pushing(5, weights(2.0))
    await world.until_one_waits()
    await world.store.finish_transfer(3)
    assert (await pushing).version == 5


@in_world(transfer_idle_s=30)
async def test_a_push_goes_on_when_the_transfer_before_it_is_abandoned(world: World) -> None:
    await transferring(world, "r0")
    began = now()
    pushing = world.pushing(1, weights(2.0))
    assert [(replica.replica_id, replica.status) for replica in (await pushing).replicas] == [("r0", "swapped")]
    assert now() - began == 30.0
    assert (world.cluster.done("swap"), world.cluster.killed) == ([("r0", 0), ("r0", 1)], [])
    with pytest.raises(TransferRefused, match="none is under way"):
        await world.store.finish_transfer(None)


def test_a_transferred_version_that_cannot_be_made_current_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_versions: Versions, version: Version) -> None:
        raise OSError(f"no space left for {version.version}")

    async def story(world: World) -> None:
        await transferring(world, "r0")
        monkeypatch.setattr(Versions, "make_current", fail)
        with pytest.raises(OSError, match="no space left for 1"):
            await world.store.finish_transfer(None)
        state = await world.store.state(0)
        assert (state.current, [info.version for info in state.versions]) == (0, [0])

    play(story, tmp_path)


@in_world()
async def test_a_replica_with_transferred_weights_goes_on_when_the_store_restarts(world: World) -> None:
    [replica] = await transferring(world, "r0")
    await world.store.finish_transfer(7)
    await world.restart()
    replica.accepts_requests = False
    await until(lambda: replica.accepts_requests)
    assert (replica.loaded, world.cluster.done("stage"), world.cluster.killed) == (LoadedWeights(7), [], [])
    assert (await world.store.wait_for(None, 7, 7, 0.0)).versions[""] == 7


@pytest.mark.parametrize("has_adapter", [False, True])
@in_world()
async def test_after_a_transfer_that_breaks_off_a_replica_has_the_current_weights_and_adapter(
    world: World, has_adapter: bool
) -> None:
    [replica] = await transferring(world, "r0")
    await until(lambda: not world.store.registry.update_lock._lock.locked())
    await world.push(1, weights(2.0))
    await world.push(2, delta(), kind="delta", base=1, checksum=checksum_of(changed(weights(2.0))))
    if has_adapter:
        await world.push(3, adapter(), kind="adapter")
    await start_transfer(world, 2)
    replica.files.clear()
    world.cluster.events.clear()
    await until(lambda: not world.store.registry.update_lock._lock.locked())
    assert replica.files[2] == changed(weights(2.0)), "as a whole: what it holds is the base of no delta"
    swapped = [("r0", 2), ("r0", 3)] if has_adapter else [("r0", 2)]
    assert (world.cluster.done("swap"), world.cluster.killed) == (swapped, [])
    assert replica.loaded == LoadedWeights(2, 3 if has_adapter else None)
    assert not replica.is_on_trial


@in_world()
async def test_a_transferred_version_cannot_be_the_base_of_a_delta(world: World) -> None:
    await transferring(world, "r0")
    await world.store.finish_transfer(1)
    async with refused(WeightsRefused, "base", "the version has no full weights here", 1):
        await world.push(2, delta(), kind="delta", base=1)
