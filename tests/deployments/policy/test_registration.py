"""Replicas that register: nothing is ever served under a number that means other weights in the store."""

import logging
import shutil
from pathlib import Path

import pytest

from deployments.policy.commands import LoadedWeights
from tests.deployments.policy.policy_world import World, adapter, in_world, play, taken, versions, weights
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.virtual_time import until


async def fleet_at(world: World, version: int, *names: str) -> list[ScriptedReplica]:
    replicas = [await world.ready(name) for name in names]
    await world.push(version, weights(version))
    assert [replica.loaded for replica in replicas] == [LoadedWeights(version)] * len(replicas)
    return replicas


async def admitted(world: World) -> None:
    await until(lambda: not any(replica.is_starting for replica in world.store.registry.replicas))


@in_world()
async def test_replicas_with_the_current_version_go_on_when_the_store_restarts(world: World) -> None:
    replicas = await fleet_at(world, 7, "r0", "r1")
    await world.push(8, adapter(), kind="adapter")
    world.cluster.events.clear()
    await world.restart()
    await until(lambda: len(world.cluster.events) == 2)
    assert [what for _, what, _ in world.cluster.events] == ["accept requests"] * 2
    assert (world.cluster.killed, [replica.loaded for replica in replicas]) == ([], [LoadedWeights(7, 8)] * 2)


@in_world()
async def test_a_replica_with_an_older_version_loads_the_current_one(world: World) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    old_key = replica.keys[7]
    await world.push(8, weights(8))
    replica.loaded, replica.keys = LoadedWeights(7), {7: old_key}
    await world.restart()
    await admitted(world)
    assert (replica.loaded, world.cluster.killed) == (LoadedWeights(8), [])


@in_world()
async def test_a_store_that_lost_its_folder_gives_replicas_the_initial_weights_and_no_number_again(
    world: World,
) -> None:
    replicas = await fleet_at(world, 7, "r0", "r1")
    await world.restart_without_folder()
    await admitted(world)
    assert [replica.loaded for replica in replicas] == [LoadedWeights(0)] * 2
    assert (versions(world), world.versions.current, world.cluster.killed) == ([], 0, [])
    async with taken(7, newest=7):
        await world.store.write_chunk(7, None, 0, b"")
    await world.restart()
    async with taken(7, newest=7):
        await world.store.write_chunk(7, None, 0, b"")
    assert (await world.push(8, weights(3.0))).version == 8
    assert [replica.loaded for replica in replicas] == [LoadedWeights(8)] * 2


@in_world()
async def test_a_store_over_an_older_copy_of_its_folder_gives_replicas_what_the_copy_has(
    world: World, tmp_path: Path
) -> None:
    [replica] = await fleet_at(world, 5, "r0")
    shutil.copytree(world.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("removing"))
    await world.push(7, weights(7))
    shutil.rmtree(world.folder, ignore_errors=True)
    shutil.copytree(tmp_path / "copy", world.folder)
    await world.restart()
    await admitted(world)
    assert (replica.loaded, replica.files[5], world.cluster.killed) == (LoadedWeights(5), weights(5), [])
    async with taken(6, newest=7):
        await world.store.write_chunk(6, None, 0, b"")


@pytest.mark.parametrize("is_on_trial", [False, True])
def test_a_replica_with_other_weights_under_a_number_of_the_store_is_replaced_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_on_trial: bool
) -> None:
    async def story(world: World) -> None:
        first, second = await fleet_at(world, 7, "r0", "r1")
        second.keys[7], second.is_on_trial = "another key", is_on_trial
        await world.restart()
        await until(lambda: world.cluster.killed == ["r1"])
        assert (first.loaded, world.versions.current) == (LoadedWeights(7), 7)

    play(story, tmp_path)
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage() == (
        "A generator replica has to be replaced: it holds other weights as version 7 than the policy store knows under "
        "this number."
    )
    assert vars(error)["replica_id"] == "r1"


@in_world()
async def test_a_replica_with_another_adapter_under_the_current_number_is_replaced(world: World) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    await world.push(8, adapter(), kind="adapter")
    replica.keys[8] = "another key"
    await world.restart()
    await until(lambda: world.cluster.killed == ["r0"])


@pytest.mark.parametrize("folder_is_lost", [False, True])
@in_world()
async def test_a_replica_with_a_version_on_trial_goes_back_and_the_number_may_have_other_weights(
    world: World, folder_is_lost: bool
) -> None:
    [trying] = await fleet_at(world, 7, "r0")
    trying.loaded, trying.keys[8], trying.is_on_trial = LoadedWeights(8), "never current", True
    await (world.restart_without_folder() if folder_is_lost else world.restart())
    await admitted(world)
    assert (trying.loaded, world.cluster.killed) == (LoadedWeights(0 if folder_is_lost else 7), [])
    assert (await world.push(8, weights(3.0))).version == 8
    assert (trying.loaded, trying.is_on_trial) == (LoadedWeights(8), False)


@in_world()
async def test_a_version_that_was_current_on_disk_when_the_store_died_is_no_longer_on_trial(world: World) -> None:
    [trying] = await fleet_at(world, 8, "r0")
    trying.is_on_trial = True
    await world.restart()
    await until(lambda: not trying.is_on_trial)
    assert (trying.loaded, world.cluster.killed) == (LoadedWeights(8), [])
