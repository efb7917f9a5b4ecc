"""Weights from a trainer: who takes part, the order of the steps, transfers that break off, and saved weights."""

import asyncio
import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deployments.policy.commands import (
    AbandonTransfer,
    AcceptRequests,
    ApplyTransfer,
    Command,
    FinishTransfer,
    InitTransfer,
    LoadedWeights,
    SaveTransfer,
    Stage,
    StartTransfer,
    Swap,
    SwapOptions,
    UpdateTransfer,
)
from deployments.policy.failures import TrainerNotTrusted, TransferRefused, VersionRefused, WeightsRefused
from deployments.policy.versions import InitialVersion
from deployments.policy.weight_transfer import ENDS_WITHIN_S, NOT_UNDER_WAY, REPLICAS_CHANGED
from rollout_client.contract.policy import PolicyUpdate, SwitchOptions
from rollout_client.weights.safetensors_file import LENGTH_BYTES, NotSafetensors, parse_header
from tests.deployments.policy.policy_world import (
    INITIAL,
    NORM,
    World,
    checksum_of,
    delta,
    in_world,
    play,
    refused,
    versions,
    weights,
)
from tests.deployments.policy.scripted_replicas import ScriptedReplica, Step
from tests.virtual_time import now, settled, until

TRAINER = {"master_address": "10.0.0.4", "master_port": 29500}
TRANSFER: dict[str, Any] = {"trainers": ["10.0.0.4:29500"]}
WEIGHTS = {"names": ["a"]}
BACK: list[type[Command]] = [AbandonTransfer, Stage, Swap]
BROKE = "it broke, and the replicas go back to the weights before it: "
NO_ROOM = "OSError: r0 has no room"
STEPS = [StartTransfer, UpdateTransfer, ApplyTransfer, FinishTransfer]
SENT = weights(2.0)


async def serving(world: World, *workers: int, saves: bytes | None = None, **first: Any) -> list[ScriptedReplica]:
    """Replicas with so many workers each, the first one with these fields. Each could save a transfer."""
    replicas = [await world.ready(f"r{number}", workers=count) for number, count in enumerate(workers)]
    for replica in replicas:
        save(replica, saves)
    for name, value in first.items():
        setattr(replicas[0], name, value)
    return replicas


def save(replica: ScriptedReplica, saves: bytes | None) -> None:
    replica.saves, replica.saved_checksum = saves, "" if saves is None else checksum_of(saves)


async def meet(world: World, world_size: int) -> int:
    return await world.store.init_transfer({**TRAINER, "rank_offset": 1, "world_size": world_size})


async def start(world: World, **options: Any) -> None:
    """A transfer to all replicas, which meet the trainer first."""
    await meet(world, 1 + sum(replica.workers for replica in world.replicas if replica.is_alive))
    await world.store.start_transfer(SwitchOptions(**options))


async def transfer(world: World, is_met: bool = False) -> PolicyUpdate:
    await (world.store.start_transfer(SwitchOptions()) if is_met else start(world))
    await world.store.update_transfer(WEIGHTS)
    return await world.store.finish_transfer(None)


async def gone_back(*replicas: ScriptedReplica) -> None:
    """Returns once they have loaded version 0 again."""
    await until(lambda: all(replica.kinds[-1] is Swap for replica in replicas))
    for replica in replicas:
        assert replica.kinds[-3:] == BACK
        assert (replica.is_alive, replica.loaded) == (True, LoadedWeights(0))


def commands(replica: ScriptedReplica) -> list[Command]:
    return [each.command for each in replica.received if not isinstance(each.command, SaveTransfer)]


@in_world(transfer={**TRANSFER, "rendezvous_timeout_s": 4})
async def test_replicas_meet_the_trainer_each_at_ranks_of_its_own(world: World) -> None:
    replicas = await serving(world, 2, 1, 4)
    assert (await world.store.state(0)).transfer_world_size == 8
    assert await meet(world, 8) == 8
    assert [commands(replica) for replica in replicas] == [
        [AcceptRequests(), InitTransfer({**TRAINER, "rank_offset": rank, "world_size": 8}, 4.0)] for rank in (1, 3, 4)
    ]


WORLD_SIZE = "3 processes take part: the trainer's one and 2 of the replicas"


@pytest.mark.parametrize(
    ("workers", "init_info", "failure", "field", "message"),
    [
        ([2], {"world_size": 2}, TransferRefused, "init_info.world_size", WORLD_SIZE),
        ([], {"world_size": 1}, TransferRefused, "transfer", "no replica is there yet; wait until the"),
        ([1], {"master_address": "10.0.0.5"}, TrainerNotTrusted, "init_info.master_address", "10.0.0.5:29500"),
        (None, {"world_size": 2}, TrainerNotTrusted, "policy.transfer.trainers", ""),
    ],
)
def test_a_trainer_that_may_not_send_is_refused_and_no_replica_told(
    tmp_path: Path,
    workers: list[int] | None,
    init_info: dict[str, Any],
    failure: type[TransferRefused],
    field: str,
    message: str,
) -> None:
    async def story(world: World) -> None:
        replicas = await serving(world, *workers or [1] * (workers is None))
        with pytest.raises(failure) as raised:
            await world.store.init_transfer({**TRAINER, **init_info})
        [problem] = raised.value.problems
        assert (problem.field, problem.message[: len(message)]) == (field, message)
        with pytest.raises(TransferRefused):
            await world.store.start_transfer(SwitchOptions())
        assert [replica.kinds for replica in replicas] == [[AcceptRequests]] * len(replicas)

    play(story, tmp_path, transfer={} if workers is None else TRANSFER)


@in_world()
async def test_every_replica_takes_every_step_and_the_version_is_made(world: World) -> None:
    replicas = await serving(world, 1, 2)
    await start(world, mode="abort", reset_prefix_cache=False)
    await world.store.update_transfer(WEIGHTS)
    await world.store.update_transfer([{"for": 1}, {"for": 2}, {"for": 3}])
    update = await world.store.finish_transfer(7)
    assert (update.version, update.checksum, update.keeps_prefix_cache) == (7, None, True)
    assert [(each.replica_id, each.status) for each in update.replicas] == [("r0", "swapped"), ("r1", "swapped")]
    of_each: list[Any] = [[{"for": 1}], [{"for": 2}, {"for": 3}]]
    for replica, share in zip(replicas, of_each, strict=True):
        begin, *others = commands(replica)[2:]
        assert isinstance(begin, StartTransfer)
        assert begin.options == SwapOptions("abort", reset_prefix_cache=False)
        updates = [UpdateTransfer(WEIGHTS, 20.0), UpdateTransfer(share, 20.0)]
        assert others == [*updates, ApplyTransfer(), FinishTransfer(7)]
        # The first one saves what arrives, as a file with the tensors of the checkpoint.
        assert (begin.header is None) == (replica is not replicas[0])
        if begin.header is not None:
            entries = parse_header(begin.header[LENGTH_BYTES:]).by_name
            assert list(entries) == sorted(INITIAL)
            assert (entries[NORM].dtype, entries[NORM].shape) == ("BF16", (128,))
    assert (await world.store.wait_for(None, 7, 7, 0.0)).versions[""] == 7
    await start(world)
    assert not (await world.store.finish_transfer(None)).keeps_prefix_cache


@in_world()
async def test_a_list_without_an_entry_for_each_worker_is_refused(world: World) -> None:
    await serving(world, 2, 1)
    async with refused(TransferRefused, "transfer", NOT_UNDER_WAY):
        await world.store.update_transfer(WEIGHTS)
    await start(world)
    async with refused(TransferRefused, "update_info", "3 workers take part, one entry each", 1):
        await world.store.update_transfer([{"for": 1}])
    assert (await world.store.finish_transfer(None)).version == 1


@in_world()
async def test_a_replica_without_the_trainer_leaves_nothing_met(world: World, caplog: pytest.LogCaptureFixture) -> None:
    replica, other = await serving(world, 1, 1)
    await meet(world, 3)
    replica.at[InitTransfer] = "error"
    async with refused(TransferRefused, "init_info", f"a replica could not meet the trainer: {NO_ROOM}"):
        await meet(world, 3)
    assert caplog.messages == [f"A replica could not meet the trainer of a weight transfer: {NO_ROOM}"]
    async with refused(TransferRefused, "transfer", REPLICAS_CHANGED):
        await world.store.start_transfer(SwitchOptions())
    assert (await transfer(world)).version == 1
    assert (replica.is_alive, other.is_alive) == (True, True)


@pytest.mark.parametrize("change", ["registers", "dies", "registers again"])
@in_world()
async def test_other_replicas_than_those_that_met_the_trainer_are_refused(world: World, change: str) -> None:
    first, second = await serving(world, 1, 1)
    await meet(world, 3)
    if change != "registers":
        second.end()
    if change != "dies":
        await world.ready("r2" if change == "registers" else "r1")
    async with refused(TransferRefused, "transfer", REPLICAS_CHANGED):
        await world.store.start_transfer(SwitchOptions(if_busy="refuse"))
    assert not world.is_busy
    assert (await transfer(world)).version == 1
    assert first.kinds[-4:] == STEPS


@pytest.mark.parametrize("step", [ApplyTransfer, FinishTransfer])
@in_world()
async def test_a_replica_that_fails_after_all_is_sent_is_replaced_alone(world: World, step: type[Command]) -> None:
    first, second = await serving(world, 1, 1, at={step: "error"})
    update = await transfer(world)
    assert [(each.status, each.error) for each in update.replicas] == [("replaced", NO_ROOM), ("swapped", None)]
    assert (first.is_alive, second.is_alive) == (False, True)
    assert (await world.store.wait_for(None, 1, 1, 0.0)).versions[""] == 1


@in_world()
async def test_a_finish_waits_for_the_update_before_it(world: World) -> None:
    [replica] = await serving(world, 1, holds={UpdateTransfer})
    await start(world)
    updating = asyncio.create_task(world.store.update_transfer(WEIGHTS))
    await until(lambda: replica.kinds[-1] is UpdateTransfer)
    finishing = [asyncio.create_task(world.store.finish_transfer(None)) for _ in range(2)]
    await settled()
    assert replica.kinds[-1] is UpdateTransfer
    replica.go_on.set()
    await updating
    assert (await finishing[0]).version == 1
    with pytest.raises(TransferRefused, match="none is under way"):
        await finishing[1]
    assert replica.kinds[-3:] == STEPS[1:]


@in_world()
async def test_during_a_transfer_other_updates_wait_or_are_refused(world: World) -> None:
    [replica] = await serving(world, 1)
    await start(world)
    assert world.is_busy
    second = asyncio.create_task(world.store.start_transfer(SwitchOptions()))
    await asyncio.sleep(1.0)
    pushing = world.pushing(5, weights(2.0))
    await world.store.update_transfer(WEIGHTS)
    assert not second.done()
    await world.store.finish_transfer(None)
    await second
    with pytest.raises(VersionRefused, match="1 is taken; the next is 2"):
        await world.store.finish_transfer(1)
    await world.store.update_transfer(WEIGHTS)
    assert (await world.store.finish_transfer(2)).version == 2
    assert (await pushing).version == 5
    assert replica.kinds[2:] == [*STEPS, *STEPS, *replica.kinds[10:]]


# Transfers that break off


def assert_abandoned(caplog: pytest.LogCaptureFixture, reason: str, back: str) -> None:
    """It is logged with the reason, once."""
    [abandoned] = [record for record in caplog.records if "abandoned" in record.getMessage()]
    assert (abandoned.name, abandoned.levelname) == ("rollout_service.policy", "WARNING")
    assert abandoned.getMessage() == f"A weight transfer is abandoned, and its replicas go back: {reason}"
    [went] = [record for record in caplog.records if record.getMessage().endswith("again.")]
    assert (went.getMessage(), vars(went)["version"]) == (f"{back} replicas are at version 0 again.", 0)


@pytest.mark.parametrize("how", ["error", "die"])
@pytest.mark.parametrize("step", [StartTransfer, UpdateTransfer])
@in_world()
async def test_if_a_replica_fails_midway_all_go_back_in_place(
    world: World, caplog: pytest.LogCaptureFixture, step: type[Command], how: Step
) -> None:
    caplog.set_level(logging.INFO, "rollout_service.policy")
    failing, waiting, other = await serving(world, 1, 1, 1, at={step: how})
    waiting.holds.add(step)
    reason = NO_ROOM if how == "error" else "it died"
    async with refused(TransferRefused, "transfer", BROKE + reason):
        await transfer(world)
    # It waits for the trainer, which it gives up by itself.
    waiting.go_on.set()
    await gone_back(*([failing] if how == "error" else []), waiting, other)
    await world.until_idle()
    assert_abandoned(caplog, reason, "3 of 3" if how == "error" else "2 of 3")
    assert failing.is_alive == (how == "error")
    assert world.policy.current == 0
    assert (await transfer(world)).version == 1


@pytest.mark.parametrize(
    ("how", "at_s"),
    [({"holds": {UpdateTransfer}}, 30.0 + ENDS_WITHIN_S), *(({"at": {step: "error"}}, 0.0) for step in BACK)],
)
@in_world(transfer_idle_s=30)
async def test_a_replica_that_cannot_go_back_is_replaced_alone(world: World, how: dict[str, Any], at_s: float) -> None:
    _, other = await serving(world, 1, 1, **how)
    other.at[UpdateTransfer] = "error"
    began = now()
    with pytest.raises(TransferRefused, match="r1 has no room"):
        await transfer(world)
    await until(lambda: world.cluster.killed == ["r0"])
    assert now() - began == at_s
    await gone_back(other)
    assert (await transfer(world)).version == 1


@in_world(transfer_idle_s=30)
async def test_where_only_engines_had_weights_all_are_replaced(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await serving(world, 1, 1)
    await transfer(world)
    await start(world)
    await until(lambda: world.cluster.killed == ["r0", "r1"])
    reason = "it has to go back, and only engines had the weights of version 1"
    assert caplog.messages[-2:] == [f"A generator replica is replaced: {reason}"] * 2


@in_world(transfer_idle_s=30)
async def test_a_trainer_that_comes_again_waits_until_the_replicas_are_back(world: World) -> None:
    [replica] = await serving(world, 1, holds={Stage})
    await start(world)
    second = asyncio.create_task(meet(world, 2))
    await until(lambda: replica.kinds[-1] is Stage)
    await settled()
    assert not second.done()
    replica.go_on.set()
    assert await second == 2
    assert replica.kinds[-4:] == [*BACK, InitTransfer]


@pytest.mark.parametrize("why", ["no replica can apply it", "it cannot be stored"])
@in_world()
async def test_what_cannot_become_a_version_is_none_and_the_replicas_go_back(
    world: World, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError("no space left")

    [replica] = await serving(world, 1)
    with monkeypatch.context() as patch:
        if why == "it cannot be stored":
            patch.setattr("deployments.policy.versions.write_durably", full)
            with pytest.raises(OSError, match="no space left"):
                await transfer(world)
        else:
            replica.at[ApplyTransfer] = "error"
            async with refused(TransferRefused, "transfer", BROKE + NO_ROOM):
                await transfer(world)
        await gone_back(replica)
    assert (world.policy.current, versions(world)) == (0, [])
    assert (await transfer(world)).version == 1


@pytest.mark.parametrize("has_left", [False, True])
@in_world(transfer_idle_s=30)
async def test_replicas_go_back_when_the_trainer_is_silent_or_has_left(
    world: World, caplog: pytest.LogCaptureFixture, has_left: bool
) -> None:
    caplog.set_level(logging.INFO, "rollout_service.policy")
    replica, other = await serving(world, 1, 1, holds={UpdateTransfer} if has_left else set())
    await start(world)
    await asyncio.sleep(29.0)
    updating = asyncio.create_task(world.store.update_transfer(WEIGHTS))
    await until(lambda: replica.kinds[-1] is UpdateTransfer)
    if has_left:
        updating.cancel()
        await asyncio.sleep(100.0)
        assert replica.kinds[-1] is UpdateTransfer
        replica.go_on.set()
    began = now()
    await gone_back(replica, other)
    assert now() - began == 30.0
    await world.until_idle()
    assert_abandoned(caplog, "nothing was heard from the trainer", "2 of 2")
    async with refused(TransferRefused, "transfer", NOT_UNDER_WAY):
        await world.store.update_transfer(WEIGHTS)
    assert (await transfer(world)).version == 1


@pytest.mark.parametrize("step", [ApplyTransfer, FinishTransfer])
@in_world(transfer_idle_s=30)
async def test_a_transfer_is_not_abandoned_while_or_after_it_is_finished(world: World, step: type[Command]) -> None:
    [replica] = await serving(world, 1, holds={step})
    await start(world)
    finishing = asyncio.create_task(world.store.finish_transfer(None))
    await asyncio.sleep(31.0)
    replica.go_on.set()
    assert (await finishing).version == 1
    await asyncio.sleep(31.0)
    assert (replica.is_alive, replica.kinds[-1]) == (True, FinishTransfer)


# Saved weights


@in_world()
async def test_where_the_checkpoint_cannot_be_read_nothing_is_saved(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_layout(_: InitialVersion) -> NoReturn:
        raise NotSafetensors("pytorch_model.bin is a pickle")

    [replica] = await serving(world, 1)
    monkeypatch.setattr(InitialVersion, "layout", property(no_layout))
    assert (await transfer(world)).version == 1
    [begin] = [command for command in commands(replica) if isinstance(command, StartTransfer)]
    assert begin.header is None
    reason = "the model's checkpoint cannot be read: pytorch_model.bin is a pickle"
    assert f"What a trainer sends is not saved: {reason}" in caplog.messages


@in_world()
async def test_what_one_replica_has_saved_is_stored_and_loaded_by_late_ones(world: World) -> None:
    saver, _ = await serving(world, 1, 1, saves=SENT)
    await start(world)
    early = await world.replica("early")
    saver.command_s = 5.0
    assert (await world.store.finish_transfer(None)).checksum is None
    began = now()
    await settled()
    states = [(each.replica_id, each.version, each.accepts_requests) for each in (await world.store.state(0)).replicas]
    assert states == [("r0", 1, True), ("r1", 1, True), ("early", 0, False)]
    await until(lambda: early.accepts_requests)
    assert (early.loaded, now() - began) == (LoadedWeights(1), 5.0)
    assert world.cluster.done("save") == [("r0", 1)]
    info = world.versions.info(1)
    assert (info.kind, info.checksum, info.size_bytes) == ("transfer", checksum_of(SENT), len(SENT))
    late = await world.ready("late")
    assert (late.loaded, late.files, world.versions.weights(1).read_bytes()) == (LoadedWeights(1), {1: SENT}, SENT)


@pytest.mark.parametrize(
    ("saves", "says", "reason"),
    [
        (None, "", "WeightsNotSaved: no space left"),
        (SENT, checksum_of(weights(3.0)), "What was fetched as version 1 has another checksum."),
    ],
)
@in_world()
async def test_where_nothing_was_saved_late_replicas_wait_for_the_next_version(
    world: World, caplog: pytest.LogCaptureFixture, saves: bytes | None, says: str, reason: str
) -> None:
    [saver] = await serving(world, 1, saves=saves, saved_checksum=says)
    await transfer(world)
    late = await world.replica("late")
    await asyncio.sleep(5.0)
    assert (late.accepts_requests, saver.accepts_requests) == (False, True)
    assert world.versions.info(1).checksum is None
    async with refused(WeightsRefused, "base", "the version has no full weights here", 1):
        await world.push(2, delta(), kind="delta", base=1)
    await world.push(2, weights(4.0))
    assert (late.accepts_requests, late.loaded, world.cluster.killed) == (True, LoadedWeights(2), [])
    message = "Version 1 stays in the engines alone, so that a replica that starts waits for the next: "
    assert [text for text in caplog.messages if text.startswith("Version 1")] == [message + reason]
    assert "A replica waits: only engines have the weights of version 1." in caplog.messages


@in_world(keep_versions=2)
async def test_a_transfer_begins_when_the_last_is_saved_and_old_ones_are_removed(world: World) -> None:
    [replica] = await serving(world, 1, saves=SENT)
    world.cluster.read_s = 5.0
    for version in (1, 2, 3):
        save(replica, weights(version + 1.0))
        began = now()
        await start(world)
        assert (world.versions.has_weights(version - 1), now() - began) == (True, 5.0 if version > 1 else 0.0)
        await world.store.finish_transfer(None)
    await until(lambda: versions(world) == [2, 3])
