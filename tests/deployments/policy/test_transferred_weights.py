"""Weights that a trainer sent are saved for the policy store: late replicas load them, and those that go back."""

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from deployments.policy.commands import LoadedWeights, StartTransfer
from deployments.policy.versions import InitialVersion
from rollout_client.contract.policy import SwitchOptions
from rollout_client.weights.safetensors_file import LENGTH_BYTES, NotSafetensors, parse_header
from tests import virtual_time
from tests.deployments.policy.policy_world import (
    INITIAL,
    NORM,
    World,
    checksum_of,
    delta,
    in_world,
    play,
    versions,
    weights,
)
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.deployments.policy.transfers import TRANSFER, MakeStore, meet, serving, transfer
from tests.virtual_time import now, settled, until

SENT = weights(2.0)


async def transferring(world: World, *names: str, saves: bytes | None = SENT) -> list[ScriptedReplica]:
    """Replicas that are in the middle of a transfer. Each could save it."""
    replicas = [await world.replica(name) for name in names]
    for replica in replicas:
        save(replica, saves)
    await until(lambda: all(replica.accepts_requests for replica in replicas))
    await connected(world)
    await world.store.start_transfer(SwitchOptions())
    return replicas


def save(replica: ScriptedReplica, saves: bytes | None) -> None:
    replica.saves, replica.saved_checksum = saves, "" if saves is None else checksum_of(saves)


async def connected(world: World) -> None:
    size = (await world.store.state(0)).transfer_world_size
    await world.store.init_transfer({"master_address": "10.0.0.4", "master_port": 29500, "world_size": size})


async def stored(world: World, version: int) -> None:
    """Returns once the store has the weights of the version."""
    await until(lambda: world.versions.has_weights(version))


@virtual_time.test
async def test_one_replica_is_told_to_save_all_tensors_of_the_checkpoint(make_store: MakeStore) -> None:
    store = make_store(transfer=TRANSFER)
    first, second = await serving(store, 1, 1)
    await meet(store, 3)
    await transfer(store)
    [told], [other] = [
        [command for command in replica.received if isinstance(command, StartTransfer)] for replica in (first, second)
    ]
    assert told.header is not None
    entries = parse_header(told.header[LENGTH_BYTES:]).by_name
    assert list(entries) == list(INITIAL)
    assert (entries[NORM].dtype, entries[NORM].shape) == ("BF16", (128,))
    assert other.header is None


@virtual_time.test
async def test_where_the_checkpoint_cannot_be_read_a_transfer_goes_on_and_nothing_is_saved(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_layout(_: InitialVersion) -> NoReturn:
        raise NotSafetensors("pytorch_model.bin is a pickle")

    store = make_store(transfer=TRANSFER)
    [replica] = await serving(store, 1)
    await meet(store, 2)
    monkeypatch.setattr(InitialVersion, "layout", property(no_layout))
    assert (await transfer(store)).version == 1
    [start] = [command for command in replica.received if isinstance(command, StartTransfer)]
    assert start.header is None
    reason = "the model's checkpoint cannot be read: pytorch_model.bin is a pickle"
    assert f"What a trainer sends is not saved: {reason}" in caplog.messages


@in_world()
async def test_the_store_gets_what_one_replica_has_saved(world: World) -> None:
    await transferring(world, "r0", "r1")
    assert (await world.store.finish_transfer(None)).checksum is None
    await stored(world, 1)
    assert world.cluster.done("save") == [("r0", 1)]
    info = world.versions.info(1)
    assert (info.kind, info.checksum, info.size_bytes) == ("transfer", checksum_of(SENT), len(SENT))
    assert world.versions.weights(1).read_bytes() == SENT


@in_world()
async def test_a_replica_that_starts_later_loads_what_the_trainer_sent(world: World) -> None:
    await transferring(world, "r0")
    await world.store.finish_transfer(None)
    await stored(world, 1)
    late = await world.ready("late")
    assert (late.loaded, late.files) == (LoadedWeights(1), {1: SENT})


@in_world()
async def test_a_replica_that_starts_before_the_weights_are_saved_waits_for_them(world: World) -> None:
    [saver] = await transferring(world, "r0")
    late = await world.replica("late")
    saver.command_s = 5.0
    await world.store.finish_transfer(None)
    began = now()
    await settled()
    state = await world.store.state(0)
    assert [(each.replica_id, each.version, each.accepts_requests) for each in state.replicas] == [
        ("r0", 1, True),
        ("late", 0, False),
    ]
    await until(lambda: late.accepts_requests)
    assert (late.loaded, now() - began) == (LoadedWeights(1), 5.0)


@pytest.mark.parametrize(
    ("saves", "says", "reason"),
    [
        (None, None, "WeightsNotSaved: no space left"),
        (
            SENT,
            checksum_of(weights(3.0)),
            "What was fetched as version 1 has another checksum.",
        ),
    ],
)
def test_where_nothing_was_saved_a_replica_that_starts_later_waits_for_the_next_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saves: bytes | None, says: str | None, reason: str
) -> None:
    async def story(world: World) -> None:
        [saver] = await transferring(world, "r0", saves=saves)
        saver.saved_checksum = says or ""
        await world.store.finish_transfer(None)
        late = await world.replica("late")
        await asyncio.sleep(5.0)
        assert (late.accepts_requests, saver.accepts_requests) == (False, True)
        assert world.versions.info(1).checksum is None
        await world.push(2, weights(4.0))
        assert (late.accepts_requests, late.loaded) == (True, LoadedWeights(2))
        assert world.cluster.killed == []

    play(story, tmp_path)
    message = "Version 1 stays in the engines alone, so that a replica that starts waits for the next: "
    assert [text for text in caplog.messages if text.startswith("Version 1")] == [message + reason]
    assert "A replica waits: only engines have the weights of version 1." in caplog.messages


@in_world()
async def test_a_transfer_that_breaks_off_costs_no_replica_even_if_a_trainer_sent_the_current_weights(
    world: World,
) -> None:
    [replica] = await transferring(world, "r0")
    await world.store.finish_transfer(None)
    await world.store.start_transfer(SwitchOptions())
    await until(lambda: ("r0", 1) in world.cluster.done("swap"))
    await until(lambda: not world.store.registry.update_lock._lock.locked())
    assert (replica.loaded, replica.files[1], world.cluster.killed) == (LoadedWeights(1), SENT, [])


@in_world()
async def test_the_next_transfer_begins_when_the_last_one_was_saved(world: World) -> None:
    await transferring(world, "r0")
    world.cluster.read_s = 5.0
    await world.store.finish_transfer(None)
    began = now()
    await world.store.start_transfer(SwitchOptions())
    assert (world.versions.has_weights(1), now() - began) == (True, 5.0)


@in_world()
async def test_saved_weights_are_a_version_like_any_other(world: World) -> None:
    await transferring(world, "r0")
    await world.store.finish_transfer(None)
    await stored(world, 1)
    assert (await world.push(2, delta(), kind="delta", base=1)).version == 2
    assert (await world.store.roll_back(1, None, SwitchOptions())).checksum == checksum_of(SENT)


@in_world(keep_versions=2)
async def test_the_newest_saved_versions_stay(world: World) -> None:
    [replica] = await transferring(world, "r0")
    await world.store.finish_transfer(None)
    for scale in (3.0, 4.0):
        await stored(world, world.versions.desired.version)
        save(replica, weights(scale))
        await world.store.start_transfer(SwitchOptions())
        await world.store.finish_transfer(None)
    await stored(world, 3)
    await until(lambda: versions(world) == [2, 3])


@in_world()
async def test_a_replica_that_knows_no_checksum_of_what_was_sent_to_it_goes_on_when_the_store_restarts(
    world: World,
) -> None:
    [replica] = await transferring(world, "r0")
    await world.store.finish_transfer(None)
    await stored(world, 1)
    await world.restart()
    replica.accepts_requests = False
    await until(lambda: replica.accepts_requests)
    assert (replica.loaded, world.cluster.killed) == (LoadedWeights(1), [])
    late = await world.ready("late")
    assert late.loaded == LoadedWeights(1)
