"""Versions that are stored, sent and applied as what changed: what replicas get, and that all weights can be given."""

from collections.abc import Sequence

import pytest
from safetensors.torch import save

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import Canary, LoadedWeights
from rollout_client.contract.policy import SwitchOptions
from tests.deployments.policy.delta_world import BASE, DELTA, WHOLE, fleet, full_weights, push_deltas, version_files
from tests.deployments.policy.policy_world import (
    INITIAL,
    World,
    adapter,
    changed,
    checksum_of,
    delta,
    in_world,
    refused,
    versions,
    weights,
)
from tests.virtual_time import until


@in_world()
async def test_a_delta_is_stored_and_sent_as_a_delta_and_each_node_makes_the_full_weights(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    [update] = await push_deltas(world, 1)
    new = full_weights(2)[1]
    assert [(replica.loaded, replica.files[2], replica.deltas) for replica in replicas] == [
        (LoadedWeights(2), new, [2])
    ] * 2
    assert version_files(world) == {1: WHOLE, 2: DELTA}
    stored = world.version_store.info(2)
    assert (stored.kind, stored.base, stored.size_bytes) == ("delta", 1, len(new))
    assert stored.delta_bytes == len(delta(1.0, 1)) == world.version_store.delta(2).stat().st_size
    assert update.checksum == stored.checksum == checksum_of(new)
    [_, _, listed] = (await world.store.state(0)).versions
    assert (listed.size_bytes, listed.delta_bytes) == (len(new), len(delta(1.0, 1)))


@in_world()
async def test_a_delta_whose_sender_does_not_say_what_it_makes_is_applied_by_the_store(world: World) -> None:
    [replica] = await fleet(world, "r0")
    update = await world.push(2, delta(1.0, 1), kind="delta", base=1)
    assert (replica.files[2], replica.deltas) == (full_weights(2)[1], [])
    assert update.checksum == checksum_of(full_weights(2)[1])
    assert (version_files(world)[2], world.version_store.info(2).delta_bytes) == (WHOLE, None)


@in_world()
async def test_a_delta_of_an_older_version_is_applied_by_the_store(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 2)
    new = changed(full_weights(2)[1], 5.0, 5)
    await world.push(4, delta(5.0, 5), kind="delta", base=2, checksum=checksum_of(new))
    assert (replica.files[4], replica.deltas) == (new, [2, 3])
    assert version_files(world)[4] == WHOLE


@pytest.mark.parametrize("names", [("r0", "r1"), ()], ids=["found out by the nodes", "found out by the store"])
@in_world()
async def test_a_delta_that_makes_other_weights_than_its_sender_says_is_refused_before_anything_is_paused(
    world: World, names: Sequence[str]
) -> None:
    replicas = await fleet(world, *names)
    world.cluster.events.clear()
    with pytest.raises(WeightsRefused, match="makes weights with the checksum"):
        # As for a base that is not version 1.
        await world.push(2, delta(), kind="delta", base=1, checksum=checksum_of(changed(weights(3.0))))
    assert world.cluster.done("swap") == []
    assert [replica.loaded for replica in replicas] == [LoadedWeights(1)] * len(names)
    assert (versions(world), world.version_store.current(), world.cluster.killed) == ([1], 1, [])
    assert [update.version for update in await push_deltas(world, 1)] == [2]


@pytest.mark.parametrize("kind", ["full", "delta"])
@in_world()
async def test_weights_with_another_checksum_than_their_sender_says_are_refused(world: World, kind: str) -> None:
    await fleet(world)
    await push_deltas(world, 1)
    content, base, made = {
        "full": (weights(4.0), None, weights(4.0)),
        "delta": (delta(), 1, changed(BASE)),
    }[kind]
    async with refused(WeightsRefused, "checksum", f"the weights have {checksum_of(made)}", "0" * 64):
        await world.push(3, content, kind=kind, base=base, checksum="0" * 64)
    assert world.version_store.current() == 2


@in_world(keep_versions=2)
async def test_a_replica_that_starts_late_gets_full_weights_which_the_store_makes_once(world: World) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 3)
    assert version_files(world) == {1: WHOLE, 2: DELTA, 3: DELTA, 4: DELTA}
    late = [await world.replica(name) for name in ("late", "later")]
    await until(lambda: all(replica.accepts_requests for replica in late))
    assert [replica.files for replica in late] == [{4: full_weights(4)[3]}] * 2
    assert version_files(world)[4] == WHOLE | DELTA
    # Versions 1 and 2 are not needed for version 4 any more, but for version 3.
    await world.push(5, weights(5.0))
    assert versions(world) == [4, 5]


@in_world()
async def test_a_replica_on_trial_goes_back_to_a_delta_without_the_store_making_it(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 1)
    replica.at[Canary] = "error"
    with pytest.raises(WeightsRefused, match="could not generate"):
        await push_deltas(world, 1, first=3)
    assert (replica.loaded, replica.accepts_requests, world.cluster.killed) == (LoadedWeights(2), True, [])
    assert world.cluster.events[-2:] == [("r0", "stage", 2), ("r0", "swap", 2)]
    assert version_files(world) == {1: WHOLE, 2: DELTA}


@in_world()
async def test_a_store_that_restarts_still_has_the_weights_of_its_deltas(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 2)
    await world.restart()
    await until(lambda: not world.store.registry.replicas[0].is_starting)
    assert (replica.loaded, world.cluster.killed) == (LoadedWeights(3), [])
    late = await world.ready("late")
    assert late.files == {3: full_weights(3)[2]}
    await push_deltas(world, 1, first=4)
    assert [each.files[4] for each in world.replicas] == [full_weights(4)[3]] * 2


@in_world()
async def test_a_store_that_lost_its_folder_reads_the_full_weights_of_a_delta_back(world: World) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 1)
    await world.restart_without_folder()
    await until(lambda: world.version_store.weights(2).exists())
    assert version_files(world) == {2: WHOLE}
    await push_deltas(world, 1, first=3)
    assert (version_files(world), world.replicas[0].deltas) == ({2: WHOLE, 3: DELTA}, [2, 3])


@in_world()
async def test_a_rollback_to_a_delta_and_from_one(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 2)
    assert (await world.store.roll_back(2, None, SwitchOptions())).version == 4
    assert (replica.loaded, replica.files[4]) == (LoadedWeights(4), full_weights(2)[1])
    stored = world.version_store.info(4)
    assert (stored.kind, stored.rollback_of, stored.delta_bytes) == ("full", 2, None)


@in_world()
async def test_an_adapter_is_loaded_on_top_of_a_delta_and_a_delta_takes_its_place(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 1)
    await world.push(3, adapter(), kind="adapter")
    assert replica.loaded == LoadedWeights(2, 3)
    late = await world.ready("late")
    assert (late.loaded, late.files[2]) == (LoadedWeights(2, 3), full_weights(2)[1])
    new = changed(full_weights(2)[1], 5.0, 5)
    await world.push(4, delta(5.0, 5), kind="delta", base=2, checksum=checksum_of(new))
    assert [(each.loaded, each.files[4]) for each in (replica, late)] == [(LoadedWeights(4), new)] * 2


@in_world()
async def test_a_delta_of_the_initial_weights_is_one_of_the_stores_file_of_them(world: World) -> None:
    replica = await world.ready("r0")
    new = changed(save(INITIAL, {"format": "pt"}))
    await world.push(1, delta(), kind="delta", base=0, checksum=checksum_of(new))
    assert (replica.deltas, checksum_of(replica.files[1])) == ([1], checksum_of(new))
    assert version_files(world) == {1: DELTA}


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
