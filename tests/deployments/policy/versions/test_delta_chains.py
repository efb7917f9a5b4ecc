"""The full weights of versions that are stored as deltas: what they are made of, and that they are never others."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.failures import VersionUnknown, WeightsRefused
from deployments.policy.replicas.commands import LoadedWeights
from deployments.policy.versions.assembly import BASE_REMOVED
from deployments.policy.versions.version_store import StoredVersion
from tests.deployments.policy.delta_world import DELTA, fleet, push_deltas, version_files
from tests.deployments.policy.policy_world import World, in_world, refused, weights
from tests.virtual_time import settled


@in_world()
async def test_a_chain_whose_base_is_damaged_gives_no_other_weights(world: World) -> None:
    [replica] = await fleet(world, "r0")
    await push_deltas(world, 1)
    world.version_store.weights(1).write_bytes(weights(7.0))
    with pytest.raises(WeightsRefused, match="makes weights with the checksum"):
        await asyncio.to_thread(world.policy.versions.file, 2)
    await settled()
    assert version_files(world)[2] == DELTA
    assert (replica.loaded, world.files() & {"making/2.safetensors"}) == (LoadedWeights(2), set())


@in_world()
async def test_a_chain_begins_with_the_newest_version_that_has_a_file(world: World) -> None:
    chains = world.policy.versions.chains
    await fleet(world, "r0")
    await push_deltas(world, 3)
    assert [chains.links(version) for version in (0, 1, 3, 4, 9)] == [[0], [1], [1, 2, 3], [1, 2, 3, 4], []]
    assert chains.bytes_behind(3) == sum(world.version_store.delta(version).stat().st_size for version in (2, 3))
    await asyncio.to_thread(chains.file, 3)
    assert [chains.links(version) for version in (3, 4)] == [[3], [3, 4]]
    world.version_store.weights(1).unlink()
    assert [chains.links(version) for version in (2, 4)] == [[], [3, 4]]


@in_world()
async def test_full_weights_that_cannot_be_made_any_more_are_not_known(world: World) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 1)
    world.version_store.weights(1).unlink()
    async with refused(VersionUnknown, "version", "it is not stored here, or no longer", 2):
        await asyncio.to_thread(world.policy.versions.file, 2)
    assert not world.policy.versions.has_weights(2)


@in_world()
async def test_a_delta_whose_base_was_removed_before_its_update_began_is_refused(world: World, tmp_path: Path) -> None:
    await fleet(world)
    info = StoredVersion(version=7, kind="delta", base=5, delta_bytes=3, created_at=datetime(2026, 1, 1, tzinfo=UTC))
    async with (
        refused(WeightsRefused, "base", BASE_REMOVED, 5),
        world.policy.versions.adding(info, tmp_path / "delta"),
    ):
        pass


@in_world()
async def test_a_base_that_is_removed_while_full_weights_are_made_of_it_ends_that(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet(world, "r0")
    await push_deltas(world, 2)
    chains, found = world.policy.versions.chains, [1, 2, 3]
    # What it saw before the files were removed.
    monkeypatch.setattr(chains, "links", lambda version: found[: found.index(version) + 1])
    world.version_store.weights(1).unlink()
    async with refused(VersionUnknown, "version", "it is not stored here, or no longer", 3):
        await asyncio.to_thread(chains.file, 3)
    async with refused(WeightsRefused, "base", BASE_REMOVED):
        await asyncio.to_thread(chains.applied, 2, world.version_store.delta(3), tmp_path / "full")
