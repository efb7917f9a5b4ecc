"""Rollbacks: an older version's weights become a new version."""

import os

from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import VersionUnknown, WeightsRefused
from rollout_client.contract.policy import SwitchOptions, VersionInfo
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import (
    World,
    adapter,
    content_of,
    delta,
    in_world,
    refused,
    taken,
    weights,
)
from tests.paths import TINY_MODEL


@in_world(keep_versions=3)
async def test_a_rollback_is_a_new_version_with_the_old_bytes_and_no_copy_of_them(world: World) -> None:
    replica = await world.replica("r0")
    for version in (5, 6):
        await world.push(version, weights(version))
    update = await world.store.roll_back(5, None, SwitchOptions())
    assert (update.version, replica.loaded, content_of(replica.staged)) == (7, LoadedWeights(7), weights(5))
    stored = world.versions.info(7)
    assert (stored.kind, stored.rollback_of, stored.base) == ("full", 5, None)
    assert update.checksum == stored.checksum == file_checksum(world.versions.weights(7))
    state = await world.store.state(0)
    assert [(info.version, info.rollback_of) for info in state.versions][-1] == (7, 5)
    assert world.versions.weights(7).samefile(world.versions.weights(5))


@in_world(keep_versions=2)
async def test_the_weights_stay_when_the_version_that_they_came_from_is_removed(world: World) -> None:
    for version in (5, 6):
        await world.push(version, weights(version))
    await world.store.roll_back(5, 20, SwitchOptions())
    assert [info.version for info in world.versions.all] == [6, 20]
    await world.restart()
    assert world.versions.weights(20).read_bytes() == weights(5)


@in_world()
async def test_a_version_has_the_time_at_which_it_arrived_and_the_initial_one_has_none(world: World) -> None:
    await world.push(1, weights(2.0))
    initial, pushed = (await world.store.state(0)).versions
    assert initial == VersionInfo(version=0, kind="initial", created_at=None)
    assert pushed.created_at == world.versions.info(1).created_at


@in_world()
async def test_a_rollback_to_version_0_is_one_to_the_initial_weights(world: World) -> None:
    await world.push(1, weights(2.0))
    update = await world.store.roll_back(0, None, SwitchOptions())
    assert (update.version, update.checksum) == (2, file_checksum(TINY_MODEL / "model.safetensors"))


@in_world(keep_versions=4)
async def test_a_rolled_back_version_can_be_the_base_of_a_delta(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, delta(), kind="delta", base=1)
    await world.store.roll_back(1, None, SwitchOptions())
    await world.push(4, delta(), kind="delta", base=3)
    [two, four] = [world.versions.info(version).checksum for version in (2, 4)]
    assert two == four


@in_world(keep_versions=2)
async def test_weights_that_are_not_stored_any_more_are_refused_with_what_is_stored(world: World) -> None:
    for version in (1, 2, 3):
        await world.push(version, weights(version))
    message = "its weights are not stored here, or no longer; stored are 0, 2, 3"
    async with refused(VersionUnknown, "to", message, 1):
        await world.store.roll_back(1, None, SwitchOptions())
    assert (await world.store.state(0)).current == 3


@in_world()
async def test_the_number_of_a_rollback_is_bound_as_that_of_a_push(world: World) -> None:
    await world.push(5, weights(2.0))
    async with taken(5, newest=5):
        await world.store.roll_back(5, 5, SwitchOptions())


@in_world()
async def test_the_current_adapter_can_be_rolled_back_to_only_on_top_of_its_own_full_weights(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    assert (await world.store.roll_back(2, None, SwitchOptions())).version == 3
    stored = world.versions.info(3)
    assert (stored.kind, stored.base, stored.rollback_of, stored.adapter_config) == ("adapter", 1, 2, '{"r": 2}')
    world.versions.make_current(stored.model_copy(update={"version": 9, "base": 0}))
    os.link(world.versions.weights(3), world.versions.weights(9))
    world.versions.make_current(world.versions.info(1))
    message = "it is an adapter for the weights of version 0, and those of version 1 are current; roll back to 0 first"
    async with refused(WeightsRefused, "to", message, 9):
        await world.store.roll_back(9, 20, SwitchOptions())


@in_world(keep_versions=1)
async def test_an_adapter_is_served_again_as_a_named_policy_beside_the_weights_of_now(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(2), kind="adapter")
    checksum = world.versions.info(2).checksum
    update = await world.store.roll_back(2, None, SwitchOptions(), "again")
    await world.push(3, adapter(3), kind="adapter")
    assert (update.label, update.base, replica.loaded) == ("again/1", 1, LoadedWeights(1, 3))
    state = await world.store.state(0)
    assert [(named.name, named.checksum) for named in state.named] == [("again", checksum)]
    async with refused(
        WeightsRefused, "to", "a named policy is an adapter, and this version is not one; roll back without a name", 1
    ):
        await world.store.roll_back(1, None, SwitchOptions(), "full")
    assert [named.name for named in (await world.store.state(0)).named] == ["again"]
