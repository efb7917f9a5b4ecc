"""The numbers of versions, and which of them are kept on disk."""

from deployments.policy.failures import VersionRefused
from rollout_client.contract.policy import PushOptions
from tests.deployments.policy.policy_world import World, adapter, delta, in_world, refused, taken, versions, weights


@in_world()
async def test_versions_are_numbered_upward(world: World) -> None:
    await world.push(5, weights(2.0))
    for version in (5, 4, 1):
        async with taken(version, newest=5):
            await world.store.begin_chunk(version, 0)
        async with taken(version, newest=5):
            await world.store.load_checkpoint(version, "/", PushOptions())
    assert (await world.push(9, weights(3.0))).version == 9


@in_world(max_version_step=10)
async def test_a_number_too_far_above_the_newest_is_refused(world: World) -> None:
    await world.push(5, weights(2.0))
    message = "it is too far above the newest version, 5: take 6 or at most 15, or raise policy.max_version_step"
    async with refused(VersionRefused, "version", message, 16):
        await world.store.begin_chunk(16, 0)
    async with refused(VersionRefused, "version", message, 2**63 - 1):
        await world.store.load_checkpoint(2**63 - 1, "/", PushOptions())
    assert (await world.push(15, weights(3.0))).version == 15


@in_world()
async def test_a_number_is_taken_while_its_update_is_under_way(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(5, weights(2.0))
    await world.until_updating(5)
    async with taken(4, newest=5):
        await world.store.begin_chunk(4, 0)
    await world.store.begin_chunk(6, 0)
    assert (await pushing).version == 5


@in_world(keep_versions=2)
async def test_the_newest_full_versions_are_kept_as_bases(world: World) -> None:
    for version in (1, 2, 3):
        await world.push(version, weights(version + 1.0))
    assert versions(world) == [2, 3]
    await world.push(4, delta(), kind="delta", base=3)
    assert versions(world) == [3, 4]
    await world.push(5, weights(5.0), kind="partial")
    assert versions(world) == [4, 5]
    for version in (6, 7):
        await world.push(version, adapter(version), kind="adapter")
        assert versions(world) == [4, 5, version]


@in_world(keep_versions=1)
async def test_the_base_of_the_current_adapter_is_kept(world: World) -> None:
    await world.push(1, weights(2.0))
    for version in (2, 3, 4):
        await world.push(version, adapter(version), kind="adapter")
    assert versions(world) == [1, 4]
    await world.push(5, weights(3.0))
    assert versions(world) == [5]
