"""Replicas that register: what they load before they accept requests, and where its bytes are."""

import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.commands import LoadedWeights, VersionPayload
from deployments.policy.failures import VersionUnknown
from deployments.policy.update import Updates
from deployments.policy.versions import Version, Versions
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import (
    DELTA,
    MODEL,
    World,
    adapter,
    checksum_of,
    content_of,
    fleet,
    full_weights,
    in_world,
    nothing,
    push_deltas,
    version_files,
    weights,
)
from tests.deployments.policy.scripted_replicas import Step
from tests.virtual_time import now, until

LOAD_S = 100.0
COMMANDS = 2
"""To load a version: stage and swap."""


@pytest.mark.parametrize(("version", "is_on_trial"), [(7, False), (7, True), (8, False)])
@in_world()
async def test_a_replica_with_other_weights_under_a_known_number_is_replaced(
    world: World, caplog: pytest.LogCaptureFixture, version: int, is_on_trial: bool
) -> None:
    first, second = [await world.ready(name) for name in ("r0", "r1")]
    await world.push(7, weights(7))
    if version == 8:
        await world.push(8, adapter(), kind="adapter")
    loaded = first.loaded
    second.keys[version], second.is_on_trial = "another key", is_on_trial
    await world.restart()
    await until(lambda: world.cluster.killed == ["r1"])
    assert (first.loaded, world.versions.current) == (loaded, version)
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage() == (
        f"A generator replica has to be replaced: it holds other weights as version {version} than the policy store "
        "knows under this number."
    )
    assert vars(error)["replica_id"] == "r1"


@in_world()
async def test_a_replica_for_which_the_weights_cannot_be_read_is_replaced(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_versions: Versions, _version: int) -> Path:
        raise OSError("weights: the disk is gone")

    await world.push(9, weights(2.0))
    monkeypatch.setattr(Versions, "file", unreadable)
    await world.replica("r0")
    await until(lambda: world.cluster.killed == ["r0"])
    assert (await world.store.state(0)).replicas == []
    warning, replaced = caplog.records
    assert (warning.name, warning.levelname) == ("rollout_service.policy", "WARNING")
    assert warning.getMessage() == "The current weights could not be given to a replica."
    assert (warning.exc_info is not None, vars(warning)["replica_id"]) == (True, "r0")
    assert replaced.getMessage().startswith("A generator replica is replaced: weights: ")


@pytest.mark.parametrize(("step", "after_s"), [("error", 0.0), ("hang", 30.0)])
@in_world(command_timeout_s=30)
async def test_a_replica_that_does_not_accept_requests_is_replaced(world: World, step: Step, after_s: float) -> None:
    await world.replica("r0", script=[step])
    await until(lambda: world.cluster.killed == ["r0"])
    assert now() == after_s
    assert (await world.push(1, weights(2.0))).replicas == []


@in_world()
async def test_replicas_that_start_at_the_same_time_load_at_the_same_time(world: World) -> None:
    await world.push(1, weights(2.0))
    replicas = [await world.replica(f"r{number}", command_s=LOAD_S) for number in range(4)]
    await until(lambda: all(replica.loaded == LoadedWeights(1) for replica in replicas))
    assert now() == COMMANDS * LOAD_S


@in_world(keep_versions=1)
async def test_an_update_does_not_wait_for_a_replica_that_loads(world: World) -> None:
    await world.push(1, weights(2.0))
    slow = await world.replica("slow", command_s=LOAD_S)
    await until(lambda: len(slow.received) == 1)
    assert (await world.push(2, weights(3.0))).replicas == []
    assert now() == 0.0
    await until(lambda: slow.staged is not None)
    assert content_of(slow.staged) == weights(2.0), "its file stays as long"
    await until(lambda: slow.accepts_requests)
    steps = [(what, version) for _, what, version in world.cluster.events]
    assert steps == [("stage", 1), ("swap", 1), ("stage", 2), ("swap", 2), ("accept requests", 2)]
    await world.push(3, weights(4.0))
    assert not world.versions.weights(1).exists()


@in_world()
async def test_an_overtaken_replica_holds_up_the_next_update_for_one_load(world: World) -> None:
    await world.push(1, weights(2.0))
    slow = await world.replica("slow", command_s=LOAD_S)
    await until(lambda: len(slow.received) == COMMANDS)
    assert (await world.push(2, adapter(1.0), kind="adapter")).replicas == []
    await until(lambda: len(slow.received) == 2 * COMMANDS - 1)
    assert [replica.replica_id for replica in (await world.push(3, adapter(9.0), kind="adapter")).replicas] == ["slow"]


# Payloads


async def to_load(world: World, full: int, adapter: int | None = None) -> list[int]:
    """The versions that a replica which holds these has to load."""
    return [payload.version for payload in await world.store.loading.to_load(LoadedWeights(full, adapter))]


async def payload(world: World, version: int) -> VersionPayload:
    return await world.store.loading.payload(version)


@in_world(copy_to_nodes=True)
async def test_a_payload_names_the_stored_file_of_which_nodes_read_ranges(world: World) -> None:
    await world.push(1, content := weights(2.0))
    found, path = await payload(world, 1), world.versions.weights(1)
    assert (found.kind, found.size_bytes, found.checksum) == ("full", path.stat().st_size, checksum_of(content))
    assert (found.file.path, found.file.node_id, found.file.inode) == (str(path), "node", path.stat().st_ino)
    assert (found.file.modified_ns, found.file.is_copied) == (path.stat().st_mtime_ns, True)
    assert found.keep == {1}
    read = world.store.read_weights
    assert await read(1, found.checksum, 10, 20) == content[10:30]
    for version, checksum in ((1, "another checksum"), (2, found.checksum)):
        with pytest.raises(VersionUnknown, match="it is not stored here, or no longer"):
            await read(version, checksum, 10, 20)
    initial = await payload(world, 0)
    assert initial.checksum == file_checksum(MODEL / "model.safetensors")
    assert await read(0, initial.checksum, 0, initial.size_bytes) == world.versions.weights(0).read_bytes()
    update = await world.push(1, content := adapter(3.0), kind="adapter", name="a")
    assert await read(1, str(update.checksum), 0, 10) == content[:10]


@in_world()
async def test_a_replica_lacks_the_base_the_adapter_or_both(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    found = await payload(world, 2)
    assert (found.kind, found.adapter_config, set(found.keep)) == ("adapter", '{"r": 2}', {1, 2})
    assert await to_load(world, 0) == [1, 2]
    assert await to_load(world, 1) == [2]
    assert (await to_load(world, 1, 2), await to_load(world, 0, 2)) == ([], [1, 2])
    await world.push(3, weights(3.0))
    assert await to_load(world, 1, 2) == [3]
    # Of a transfer only engines have the weights; an adapter on top of them can be given.
    made_at = datetime(2026, 1, 1, tzinfo=UTC)
    world.versions.make_current(Version(version=4, kind="transfer", created_at=made_at, stored="nothing"))
    await world.store.policies.publish(world.policy)
    assert await to_load(world, 0) == []
    await world.push(5, adapter(), kind="adapter")
    assert (await to_load(world, 0), await to_load(world, 4)) == ([], [5])


@in_world()
async def test_who_holds_the_base_gets_a_delta_that_others_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet(world, "r0")
    monkeypatch.setattr(Updates, "write_full_weights", nothing)
    await push_deltas(world, 2)
    found = await world.store.loading.payload(3, is_delta=True)
    delta = world.versions.delta(3)
    assert found.delta is not None
    base, changes = found.delta.base, found.delta.changes
    assert (base.version, base.checksum) == (2, world.versions.info(2).checksum)
    assert (base.file.path, base.file.is_copied) == (str(world.versions.weights(2)), False)
    assert (changes.file.path, changes.file.inode) == (str(delta), delta.stat().st_ino)
    assert (changes.size_bytes, changes.checksum) == (delta.stat().st_size, file_checksum(delta))
    assert (found.size_bytes, found.checksum) == (len(full_weights(3)[2]), checksum_of(full_weights(3)[2]))
    assert await world.store.read_weights(3, changes.checksum, 0, 10**6) == delta.read_bytes()
    assert version_files(world)[3] == DELTA
    assert await world.store.read_weights(3, found.checksum, 0, 10**7) == full_weights(3)[2]
    assert (await world.store.loading.payload(3, is_delta=True)).delta is None
