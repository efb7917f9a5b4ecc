"""Versions that are stored, sent and applied as what changed: what replicas get, and that all weights can be given."""

import asyncio
from collections.abc import Sequence

import pytest
from safetensors.torch import save

from deployments.policy import versions as versions_module
from deployments.policy.commands import Canary, LoadedWeights
from deployments.policy.failures import WeightsRefused
from deployments.policy.update import Updates
from rollout_client.contract.policy import SwitchOptions
from tests.deployments.policy.delta_world import (
    BASE,
    DELTA,
    WHOLE,
    fleet,
    full_weights,
    nothing,
    push_deltas,
    version_files,
)
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
async def test_a_delta_is_sent_as_a_delta_and_each_node_makes_the_full_weights(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    [update] = await push_deltas(world, 1)
    new = full_weights(2)[1]
    assert [(replica.loaded, replica.files[2], replica.deltas) for replica in replicas] == [
        (LoadedWeights(2), new, [2])
    ] * 2
    stored = world.versions.info(2)
    assert (stored.kind, stored.base, stored.size_bytes) == ("delta", 1, len(new))
    assert stored.delta_bytes == len(delta(1.0, 1))
    assert update.checksum == stored.checksum == checksum_of(new)
    [_, _, listed] = (await world.store.state(0)).versions
    assert (listed.size_bytes, listed.delta_bytes) == (len(new), len(delta(1.0, 1)))


@in_world()
async def test_a_delta_whose_sender_does_not_say_what_it_makes_is_applied_by_the_store(world: World) -> None:
    [replica] = await fleet(world, "r0")
    update = await world.push(2, delta(1.0, 1), kind="delta", base=1)
    assert (replica.files[2], replica.deltas) == (full_weights(2)[1], [])
    assert update.checksum == checksum_of(full_weights(2)[1])
    assert (version_files(world)[2], world.versions.info(2).delta_bytes) == (WHOLE, None)


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
    assert (versions(world), world.versions.current, world.cluster.killed) == ([1], 1, [])
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
    assert world.versions.current == 2


@in_world(keep_versions=2)
async def test_a_replica_that_starts_late_gets_full_weights(world: World) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 3)
    late = [await world.replica(name) for name in ("late", "later")]
    await until(lambda: all(replica.accepts_requests for replica in late))
    assert [replica.files for replica in late] == [{4: full_weights(4)[3]}] * 2
    assert version_files(world) == {3: WHOLE, 4: WHOLE}


@in_world()
async def test_a_replica_on_trial_goes_back_to_a_delta(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 1)
    replica.at[Canary] = "error"
    with pytest.raises(WeightsRefused, match="could not generate"):
        await push_deltas(world, 1, first=3)
    assert (replica.loaded, replica.accepts_requests, world.cluster.killed) == (LoadedWeights(2), True, [])
    assert world.cluster.events[-2:] == [("r0", "stage", 2), ("r0", "swap", 2)]


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
async def test_a_rollback_to_a_delta_and_from_one(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 2)
    assert (await world.store.roll_back(2, None, SwitchOptions())).version == 4
    assert (replica.loaded, replica.files[4]) == (LoadedWeights(4), full_weights(2)[1])
    stored = world.versions.info(4)
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


@in_world(keep_versions=1)
async def test_full_weights_of_a_delta_are_written_behind_its_activation_and_its_base_stays_as_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    [replica] = await fleet(world, "r0")
    with monkeypatch.context() as patched:
        patched.setattr(Updates, "write_full_weights", nothing)
        await push_deltas(world, 1)
    assert version_files(world) == {1: WHOLE, 2: DELTA}
    await world.restart()
    await until(lambda: version_files(world) == {2: WHOLE})
    assert world.versions.weights(2).read_bytes() == full_weights(2)[1]
    await push_deltas(world, 1, first=3)
    assert replica.deltas == [2, 3]
    await until(lambda: version_files(world) == {3: WHOLE})


@in_world(keep_versions=1)
async def test_no_delta_is_added_above_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet(world, "r0")
    monkeypatch.setattr(Updates, "write_full_weights", nothing)
    await push_deltas(world, 3)
    assert version_files(world) == {3: WHOLE, 4: DELTA}
    assert world.versions.weights(3).read_bytes() == full_weights(3)[2]


@in_world()
async def test_a_delta_can_be_read_until_its_update_has_ended_though_a_node_needed_the_full_weights(
    world: World,
) -> None:
    [replica] = await fleet(world, "r0")
    replica.command_s = 5.0
    pushing = asyncio.create_task(push_deltas(world, 1))
    await until(lambda: world.versions.delta(2).exists())
    checksum = checksum_of(full_weights(2)[1])
    assert await world.store.read_weights(2, checksum, 0, 10**7) == full_weights(2)[1]
    assert (world.versions.delta(2).read_bytes(), world.versions.current) == (delta(1.0, 1), 1)
    await pushing
    assert (replica.files[2], version_files(world)) == (full_weights(2)[1], {1: WHOLE, 2: WHOLE})


@in_world()
async def test_full_weights_that_could_not_be_written_are_written_when_they_are_needed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet(world, "r0")
    with monkeypatch.context() as patched:
        patched.setattr(versions_module, "write_applied", no_space)
        await push_deltas(world, 1)
        await until(lambda: "The full weights of version 2 could not be made." in caplog.messages)
    assert version_files(world) == {1: WHOLE, 2: DELTA}
    late = await world.ready("late")
    assert (late.files, version_files(world)[2]) == ({2: full_weights(2)[1]}, WHOLE)


def no_space(*_: object) -> str:
    raise OSError("no space left")
