"""The numbers of versions, and which of them are kept on disk."""

from rollout_client.contract.policy import PushOptions
from tests.deployments.policy.policy_world import World, adapter, delta, in_world, taken, versions, weights


@in_world()
async def test_versions_are_numbered_upward(world: World) -> None:
    await world.push(5, weights(2.0))
    for version in (5, 4, 1):
        async with taken(version, newest=5):
            await world.store.write_chunk(version, None, 0, b"")
        async with taken(version, newest=5):
            await world.store.load_checkpoint(version, "/", PushOptions())
    assert (await world.push(9, weights(3.0))).version == 9


@in_world()
async def test_a_number_is_taken_while_its_update_is_under_way(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(5, weights(2.0))
    await world.until_updating(5)
    async with taken(4, newest=5):
        await world.store.write_chunk(4, None, 0, b"")
    await world.store.write_chunk(6, None, 0, b"")
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
