"""Payloads: what a replica is told to load, and what replicas of other nodes may read of it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.commands import LoadedWeights, VersionPayload
from deployments.policy.failures import VersionUnknown
from deployments.policy.update import Updates
from deployments.policy.versions import Version
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.delta_world import DELTA, fleet, full_weights, nothing, push_deltas, version_files
from tests.deployments.policy.policy_world import World, adapter, checksum_of, in_world, play, weights
from tests.paths import TINY_MODEL


async def to_load(world: World, full: int, adapter: int | None = None) -> list[int]:
    """The versions that a replica which holds these has to load."""
    return [payload.version for payload in await world.store.loading.to_load(LoadedWeights(full, adapter))]


async def payload(world: World, version: int) -> VersionPayload:
    return await world.store.loading.payload(version)


@in_world()
async def test_a_payload_names_the_stored_file_and_never_holds_its_bytes(world: World) -> None:
    await world.push(1, weights(2.0))
    found = await payload(world, 1)
    path = world.versions.weights(1)
    assert (found.kind, found.size_bytes, found.checksum) == ("full", path.stat().st_size, file_checksum(path))
    assert (found.file.path, found.file.node_id, found.file.inode) == (str(path), "node", path.stat().st_ino)
    assert found.file.modified_ns == path.stat().st_mtime_ns
    assert found.keep == {1}


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_payload_says_whether_nodes_copy_what_they_could_read(tmp_path: Path, is_copied: bool) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        assert (await payload(world, 1)).file.is_copied == is_copied

    play(story, tmp_path, copy_to_nodes=is_copied)


@in_world()
async def test_of_an_adapter_its_base_stays_on_the_nodes(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    found = await payload(world, 2)
    assert (found.kind, found.adapter_config, set(found.keep)) == ("adapter", '{"r": 2}', {1, 2})


@in_world()
async def test_a_replica_lacks_the_base_the_adapter_or_both(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    assert await to_load(world, 0) == [1, 2]
    assert await to_load(world, 1) == [2]
    assert await to_load(world, 1, 2) == []
    await world.push(3, weights(3.0))
    assert await to_load(world, 1, 2) == [3]


@in_world()
async def test_full_weights_of_a_transfer_cannot_be_given_but_an_adapter_on_top_of_them_can(world: World) -> None:
    made_at = datetime(2026, 1, 1, tzinfo=UTC)
    world.versions.make_current(Version(version=1, kind="transfer", created_at=made_at, stored="nothing"))
    await world.store.policies.publish(world.policy)
    assert await to_load(world, 0) == []
    await world.push(2, adapter(), kind="adapter")
    assert await to_load(world, 0) == []
    assert await to_load(world, 1) == [2]


@in_world()
async def test_other_nodes_read_ranges_of_a_stored_version(world: World) -> None:
    content = weights(2.0)
    await world.push(1, content)
    checksum = (await payload(world, 1)).checksum
    assert await world.store.read_weights(1, checksum, 10, 20) == content[10:30]
    with pytest.raises(VersionUnknown, match="it is not stored here, or no longer"):
        await world.store.read_weights(1, "another checksum", 10, 20)
    with pytest.raises(VersionUnknown, match="it is not stored here, or no longer"):
        await world.store.read_weights(2, checksum, 10, 20)


@in_world()
async def test_other_nodes_read_the_initial_weights_too(world: World) -> None:
    found = await payload(world, 0)
    assert found.checksum == file_checksum(TINY_MODEL / "model.safetensors")
    data = await world.store.read_weights(0, found.checksum, 0, found.size_bytes)
    assert data == world.versions.weights(0).read_bytes()


@in_world()
async def test_replicas_that_hold_the_base_get_a_delta_and_others_may_read_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet(world, "r0")
    monkeypatch.setattr(Updates, "write_full_weights", nothing)
    await push_deltas(world, 2)
    found = await world.store.loading.payload(3, is_delta=True)
    delta = world.versions.delta(3)
    assert found.delta is not None
    base, changes = found.delta.base, found.delta.changes
    assert (base.version, base.checksum) == (2, world.versions.info(2).checksum)
    assert base.file.path == str(world.versions.weights(2))
    assert (changes.file.path, changes.file.inode) == (str(delta), delta.stat().st_ino)
    assert (changes.size_bytes, changes.checksum) == (delta.stat().st_size, file_checksum(delta))
    assert (found.size_bytes, found.checksum) == (len(full_weights(3)[2]), checksum_of(full_weights(3)[2]))
    assert await world.store.read_weights(3, changes.checksum, 0, 10**6) == delta.read_bytes()
    assert version_files(world)[3] == DELTA
    assert await world.store.read_weights(3, found.checksum, 0, 10**7) == full_weights(3)[2]
    assert (await world.store.loading.payload(3, is_delta=True)).delta is None
