"""A store that restarts with less than its replicas have goes on with theirs, and numbers only go up."""

import asyncio
import logging
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.failures import VersionRefused, WeightsRefused
from deployments.policy.replicas.commands import LoadedWeights, ReplicaRegistration
from deployments.policy.update.recovery import RegistrationState as State
from deployments.policy.update.recovery import RegistrationVerdict, classify, reported_versions
from deployments.policy.versions.version_store import KnownVersions, StoredVersion, VersionStore
from rollout_client.contract.policy import SwitchOptions
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import (
    World,
    adapter,
    content_of,
    delta,
    in_world,
    play,
    refused,
    taken,
    versions,
    weights,
)
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.virtual_time import now, settled, until


async def fleet_at(world: World, version: int, *names: str) -> list[ScriptedReplica]:
    replicas = [await world.ready(name) for name in names]
    await world.push(version, weights(version))
    assert [replica.loaded for replica in replicas] == [LoadedWeights(version)] * len(replicas)
    return replicas


def has_weights(world: World, version: int) -> bool:
    return world.version_store.weights(version).exists()


@in_world()
async def test_a_store_that_lost_its_folder_goes_on_with_the_version_and_the_weights_of_its_replicas(
    world: World,
) -> None:
    replicas = await fleet_at(world, 7, "r0", "r1")
    before = world.version_store.info(7)
    world.cluster.events.clear()
    await world.restart_without_folder()
    await until(lambda: has_weights(world, 7))
    assert (world.version_store.current(), world.version_store.info(7)) == (7, before)
    assert world.version_store.weights(7).read_bytes() == weights(7)
    await until(lambda: len(world.cluster.events) == 2)
    assert [what for _, what, _ in world.cluster.events] == ["accept requests"] * 2
    assert (world.cluster.killed, [replica.loaded for replica in replicas]) == ([], [LoadedWeights(7)] * 2)
    async with taken(7, newest=7):
        await world.store.begin_chunk(7, 0)
    late = await world.ready("late")
    assert (late.loaded, content_of(late.staged)) == (LoadedWeights(7), weights(7))
    assert (await world.push(8, delta(), kind="delta", base=7)).version == 8
    assert [replica.loaded for replica in world.replicas] == [LoadedWeights(8)] * 3


@in_world()
async def test_a_store_over_an_older_copy_of_its_folder_goes_on_with_what_the_replicas_have(
    world: World, tmp_path: Path
) -> None:
    await fleet_at(world, 5, "r0")
    shutil.copytree(world.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("removing"))
    await world.push(7, weights(7))
    shutil.rmtree(world.folder, ignore_errors=True)
    shutil.copytree(tmp_path / "copy", world.folder)
    await world.restart()
    await until(lambda: has_weights(world, 7))
    assert (versions(world), world.version_store.current(), world.cluster.killed) == ([5, 7], 7, [])
    assert await world.store.wait_for(7, 7, 0.0) == 7


@pytest.mark.parametrize("damage", ["gone", "other bytes", "cut"])
@in_world()
async def test_a_version_whose_weights_no_replica_can_give_keeps_its_number(world: World, damage: str) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    content = {"gone": None, "other bytes": weights(8), "cut": weights(7)[:-1]}[damage]
    replica.files = {} if content is None else {7: content}
    await world.restart_without_folder()
    late = await world.replica("late")
    await until(lambda: len(world.store.registry.started) == 2)
    await asyncio.sleep(1.0)
    assert (world.version_store.current(), has_weights(world, 7)) == (7, False)
    assert (replica.loaded, late.accepts_requests, world.cluster.killed) == (LoadedWeights(7), False, [])
    async with refused(WeightsRefused, "base", "the version has no full weights here", 7):
        await world.push(8, delta(), kind="delta", base=7)
    await world.push(9, weights(9))
    assert (replica.loaded, late.loaded, late.accepts_requests) == (LoadedWeights(9), LoadedWeights(9), True)


@in_world()
async def test_weights_that_could_not_be_read_back_are_read_from_a_replica_that_registers_later(world: World) -> None:
    first, second = await fleet_at(world, 7, "r0", "r1")
    first.files = {}
    shutil.rmtree(world.folder, ignore_errors=True)
    world.store = first.store = world.another_store()
    await first.register()
    await until(lambda: world.version_store.current() == 7)
    await settled()
    assert not has_weights(world, 7)
    second.store = world.store
    await second.register()
    await until(lambda: has_weights(world, 7))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@in_world()
async def test_the_newest_version_of_all_replicas_is_the_one_that_all_end_with(
    world: World, order: tuple[int, int]
) -> None:
    old, new = await fleet_at(world, 7, "r0", "r1")
    await world.push(9, weights(9))
    old.loaded = LoadedWeights(7)
    world.replicas = [world.replicas[position] for position in order]
    await world.restart_without_folder()
    await until(lambda: old.loaded == LoadedWeights(9) and has_weights(world, 9))
    assert (new.loaded, world.version_store.current(), world.cluster.killed) == (LoadedWeights(9), 9, [])


@in_world()
async def test_a_replica_that_serves_an_older_version_is_replaced_if_the_newer_one_cannot_be_read(world: World) -> None:
    old, new = await fleet_at(world, 7, "r0", "r1")
    await world.push(9, weights(9))
    old.loaded, new.files = LoadedWeights(7), {}
    await world.restart_without_folder()
    await until(lambda: world.cluster.killed == ["r0"])
    assert (new.loaded, world.version_store.current()) == (LoadedWeights(9), 9)


@in_world()
async def test_an_adapter_is_taken_over_with_its_full_weights(world: World) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    await world.push(8, adapter(), kind="adapter")
    await world.restart_without_folder()
    await until(lambda: has_weights(world, 8))
    assert (versions(world), replica.loaded) == ([7, 8], LoadedWeights(7, adapter=8))
    late = await world.ready("late")
    assert late.loaded == LoadedWeights(7, adapter=8)


@in_world()
async def test_of_a_replica_without_records_the_number_is_taken_over(world: World) -> None:
    replica = await world.ready("r0", loaded=LoadedWeights(7))
    assert (replica.loaded, world.version_store.info(7).kind) == (LoadedWeights(7), "transfer")
    async with taken(7, newest=7):
        await world.store.begin_chunk(7, 0)


def changed_record(replica: ScriptedReplica, version: int, **changes: str) -> None:
    info = StoredVersion.model_validate_json(str(replica.records[version]))
    replica.records[version] = info.model_copy(update=changes).model_dump_json()


@pytest.mark.parametrize("is_folder_lost", [False, True])
def test_a_replica_with_other_weights_under_the_same_number_is_replaced_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_folder_lost: bool
) -> None:
    async def story(world: World) -> None:
        first, second = await fleet_at(world, 7, "r0", "r1")
        changed_record(second, 7, checksum="d" * 64)
        await (world.restart_without_folder() if is_folder_lost else world.restart())
        await until(lambda: world.cluster.killed == ["r1"])
        assert (first.loaded, world.version_store.current()) == (LoadedWeights(7), 7)

    play(story, tmp_path)
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage() == (
        "A generator replica has to be replaced: it holds other weights as version 7 than the policy store knows under "
        "this number."
    )
    assert vars(error)["replica_id"] == "r1"


@in_world(run="run-a")
async def test_a_replica_with_weights_of_another_run_is_replaced(world: World) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    changed_record(replica, 7, run="run-b")
    await world.restart_without_folder()
    await until(lambda: world.cluster.killed == ["r0"])
    assert world.version_store.current() == 0


@in_world(settle_s=5.0)
async def test_a_store_with_an_empty_folder_waits_a_while_for_replicas_that_are_ahead(world: World) -> None:
    began = now()
    [replica] = await fleet_at(world, 7, "r0")
    assert now() - began == 5.0
    shutil.rmtree(world.folder, ignore_errors=True)
    world.store = world.another_store()
    new = await world.replica("new")
    watching = asyncio.create_task(world.store.watch(7))
    pushing = world.pushing(1, weights(1))
    await asyncio.sleep(4.0)
    assert [new.accepts_requests, watching.done(), pushing.done()] == [False] * 3
    replica.store = world.store
    await replica.register()
    with pytest.raises(VersionRefused):
        await pushing
    await until(lambda: new.accepts_requests)
    assert new.loaded == LoadedWeights(7)
    assert await watching == 7


@in_world(settle_s=5.0)
async def test_a_store_with_versions_waits_for_no_replica(world: World) -> None:
    await world.push(7, weights(7))
    await world.restart()
    began = now()
    await world.push(8, weights(8))
    assert now() == began


async def store_died_while_it_tried(world: World, version: int) -> ScriptedReplica:
    """As a store does that dies after a first replica has loaded a version which is not current yet."""
    [replica] = await fleet_at(world, version - 1, "r0")
    (world.folder / "arrived").write_bytes(weights(version))
    info = world.version_store.info(version - 1)
    checksum = file_checksum(world.folder / "arrived")
    tried = info.model_copy(update={"version": version, "checksum": checksum})
    world.version_store.add(tried, world.folder / "arrived")
    replica.loaded, replica.records[version] = LoadedWeights(version), tried.model_dump_json()
    return replica


@in_world()
async def test_a_version_that_was_tried_when_the_store_died_is_given_up_and_its_number_is_not_given_again(
    world: World,
) -> None:
    replica = await store_died_while_it_tried(world, 8)
    for _ in range(2):
        await world.restart()
        await until(lambda: replica.loaded == LoadedWeights(7))
    assert (versions(world), world.version_store.current(), world.cluster.killed) == ([7], 7, [])
    message = "a replica has loaded other weights under this number, which did not become current; the next is 9"
    async with refused(VersionRefused, "version", message, 8):
        await world.push(8, weights(3.0))
    assert (await world.store.roll_back(7, None, SwitchOptions())).version == 9
    assert world.version_store.tried().loaded == []


@in_world()
async def test_a_version_that_was_tried_may_be_pushed_again_with_the_same_weights(world: World) -> None:
    replica = await store_died_while_it_tried(world, 8)
    await world.restart()
    await until(lambda: replica.loaded == LoadedWeights(7))
    assert (await world.push(8, weights(8))).version == 8
    assert replica.loaded == LoadedWeights(8)


@in_world()
async def test_a_replica_that_registers_again_with_a_version_that_was_refused_goes_back(world: World) -> None:
    replica = await store_died_while_it_tried(world, 8)
    # As an update does that is refused after a first replica has loaded it.
    world.version_store.give_up(8)
    await replica.register()
    await until(lambda: replica.loaded == LoadedWeights(7))
    assert (world.version_store.current(), world.cluster.killed) == (7, [])


@pytest.mark.parametrize("folder_is_lost", [False, True])
@in_world(settle_s=5.0)
async def test_a_replica_with_a_version_on_trial_goes_back_and_the_number_may_have_other_weights(
    world: World, folder_is_lost: bool
) -> None:
    trying = await store_died_while_it_tried(world, 8)
    trying.is_on_trial = True
    await world.ready("r1")
    await (world.restart_without_folder() if folder_is_lost else world.restart())
    await until(lambda: trying.loaded == LoadedWeights(7))
    assert (world.version_store.current(), world.cluster.killed) == (7, [])
    assert (await world.push(8, weights(3.0))).version == 8
    assert (trying.loaded, trying.is_on_trial) == (LoadedWeights(8), False)


@in_world()
async def test_a_version_that_was_current_on_disk_when_the_store_died_is_no_longer_on_trial(world: World) -> None:
    trying = await store_died_while_it_tried(world, 8)
    trying.is_on_trial = True
    world.version_store.make_current(8)
    await world.restart()
    await until(lambda: not trying.is_on_trial)
    assert trying.loaded == LoadedWeights(8)


@in_world()
async def test_a_replica_whose_version_cannot_be_recorded_registers_again_until_it_can(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    [replica] = await fleet_at(world, 7, "r0")
    with monkeypatch.context() as patched:
        patched.setattr(VersionStore, "make_current", no_space)
        await world.restart_without_folder()
        await until(lambda: not world.store.registry.replicas)
    await until(lambda: world.version_store.current() == 7)
    assert (replica.loaded, world.cluster.killed) == (LoadedWeights(7), [])


def no_space(_store: VersionStore, version: int) -> None:
    raise OSError(f"no space left for {version}")


BEFORE, AFTER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def info(version: int, checksum: str | None = "c", run: str | None = "run-a", at: datetime = BEFORE) -> StoredVersion:
    return StoredVersion(version=version, kind="full", checksum=checksum, run=run, created_at=at)


def known(*stored: StoredVersion, current: int = 7, tried: tuple[StoredVersion, ...] = ()) -> KnownVersions:
    return KnownVersions(
        run="run-a",
        current=current,
        stored={version.version: version for version in stored},
        tried={version.version: version for version in tried},
    )


def holding(
    *records: StoredVersion, loaded: LoadedWeights | None = None, is_on_trial: bool = False
) -> ReplicaRegistration:
    loaded = loaded or LoadedWeights(records[0].version)
    texts = {record.version: record.model_dump_json() for record in records}
    return ReplicaRegistration("r0", None, 1, loaded, texts, is_on_trial)


OTHER_WEIGHTS = "it holds other weights as version 7 than the policy store knows under this number"
OTHER_RUN = "it holds version 9 of the run run-b, and this is the run run-a"


@pytest.mark.parametrize(
    ("registration", "knowledge", "state"),
    [
        (holding(loaded=LoadedWeights()), known(), State.KNOWN),
        (holding(info(7)), known(info(7)), State.KNOWN),
        (holding(info(5)), known(info(7)), State.KNOWN),
        (holding(info(8)), known(info(7)), State.AHEAD),
        (holding(info(1)), known(current=0), State.AHEAD),
        (holding(loaded=LoadedWeights(8)), known(info(7)), State.AHEAD),
        (holding(info(8)), known(info(7), tried=(info(8),)), State.TRIED),
        (holding(info(9)), known(info(7), tried=(info(8),)), State.AHEAD),
        (holding(info(7, None)), known(info(7)), State.KNOWN),
        (holding(info(7, None)), known(info(7, None)), State.KNOWN),
        (holding(info(7, at=AFTER)), known(info(7)), State.KNOWN),
        (holding(info(9, run=None)), known(info(7)), State.AHEAD),
        (holding(info(8), is_on_trial=True), known(info(7)), State.KNOWN),
        (holding(info(8), is_on_trial=True), known(info(7), tried=(info(8),)), State.KNOWN),
    ],
)
def test_the_state_of_a_replica_that_registers(
    registration: ReplicaRegistration, knowledge: KnownVersions, state: State
) -> None:
    assert classify(registration, knowledge) == RegistrationVerdict(state)


@pytest.mark.parametrize(
    ("registration", "knowledge", "reason"),
    [
        (holding(info(7, "d")), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, None, at=AFTER)), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, None, at=AFTER)), known(info(7, None)), OTHER_WEIGHTS),
        (holding(info(8, "d")), known(info(7), tried=(info(8),)), OTHER_WEIGHTS.replace("7", "8")),
        (holding(info(9, run="run-b")), known(info(7)), OTHER_RUN),
        (holding(info(7, "d"), is_on_trial=True), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, "d"), info(9), loaded=LoadedWeights(7, adapter=9)), known(info(7)), OTHER_WEIGHTS),
    ],
)
def test_a_replica_with_other_weights_or_of_another_run_is_different(
    registration: ReplicaRegistration, knowledge: KnownVersions, reason: str
) -> None:
    assert classify(registration, knowledge) == RegistrationVerdict(State.DIFFERENT, reason)


def test_of_versions_without_a_record_the_numbers_are_known() -> None:
    full, adapter = reported_versions(ReplicaRegistration("r0", None, 1, LoadedWeights(7, adapter=9)))
    assert (full.version, full.kind, full.checksum) == (7, "transfer", None)
    assert (adapter.version, adapter.kind, adapter.base) == (9, "adapter", 7)
    assert reported_versions(ReplicaRegistration("r0", None, 1, LoadedWeights())) == []
