"""Chains of deltas are cut in the background, and what only they needed is removed."""

from tests.deployments.policy.delta_world import DELTA, WHOLE, fleet, full_weights, push_deltas, version_files
from tests.deployments.policy.policy_world import World, in_world, versions
from tests.virtual_time import until


@in_world(keep_versions=1, longest_delta_chain=3)
async def test_versions_that_others_are_deltas_of_stay_and_chains_are_cut_in_the_background(world: World) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 3)
    assert version_files(world) == {1: WHOLE, 2: DELTA, 3: DELTA, 4: DELTA}
    await push_deltas(world, 1, first=5)
    await until(lambda: versions(world) == [5])
    assert version_files(world) == {5: WHOLE | DELTA}
    assert world.version_store.weights(5).read_bytes() == full_weights(5)[4]
    await push_deltas(world, 2, first=6)
    assert version_files(world) == {5: WHOLE | DELTA, 6: DELTA, 7: DELTA}


@in_world(keep_versions=1, longest_delta_chain=0)
async def test_without_chains_the_store_makes_the_full_weights_of_each_delta_after_the_replicas_have_them(
    world: World,
) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 1)
    assert replica.deltas == [2]
    await until(lambda: version_files(world) == {2: WHOLE | DELTA})
