"""The steps of weight transfers, with scripted replicas: who takes part at which rank, and in which order."""

import asyncio

import pytest

from deployments.policy.commands import (
    AcceptRequests,
    ApplyTransfer,
    Command,
    FinishTransfer,
    InitTransfer,
    LoadedWeights,
    SaveTransfer,
    StartTransfer,
    SwapOptions,
    UpdateTransfer,
)
from deployments.policy.failures import (
    TrainerNotTrusted,
    TransferRefused,
    VersionRefused,
)
from rollout_client.contract.policy import SwitchOptions
from tests import virtual_time
from tests.deployments.policy.transferring_replicas import TransferringReplica
from tests.deployments.policy.transfers import (
    CHANGED,
    TRAINER,
    TRANSFER,
    WEIGHTS,
    MakeStore,
    assert_refused,
    kinds,
    meet,
    serving,
    transfer,
)
from tests.virtual_time import settled


@virtual_time.test
async def test_replicas_meet_the_trainer_each_at_ranks_of_its_own(make_store: MakeStore) -> None:
    store = make_store(transfer={**TRANSFER, "rendezvous_timeout_s": 4})
    replicas = await serving(store, 2, 1, 4)
    assert (await store.state(0)).transfer_world_size == 8
    assert await meet(store, 8) == 8
    assert [replica.received for replica in replicas] == [
        [AcceptRequests(), InitTransfer({**TRAINER, "rank_offset": rank_offset, "world_size": 8}, 4.0)]
        for rank_offset in (1, 3, 4)
    ]


@virtual_time.test
async def test_a_world_of_another_size_is_refused_with_the_right_one(make_store: MakeStore) -> None:
    store = make_store()
    [replica] = await serving(store, 2)
    with pytest.raises(TransferRefused) as refused:
        await meet(store, 2)
    assert_refused(refused, "init_info.world_size", "3 processes take part: the trainer's one and 2 of the replicas")
    assert refused.value.problems[0].value == 2
    assert kinds(replica) == [AcceptRequests]


@virtual_time.test
async def test_no_replica_is_told_of_a_trainer_that_is_not_listed(make_store: MakeStore) -> None:
    store = make_store()
    [replica] = await serving(store, 1)
    with pytest.raises(TrainerNotTrusted, match=r"10\.0\.0\.5:29500 is not listed"):
        await store.init_transfer({**TRAINER, "master_address": "10.0.0.5", "world_size": 2})
    assert kinds(replica) == [AcceptRequests]
    await meet(store, 2)
    assert (await transfer(store)).version == 1


@virtual_time.test
async def test_without_listed_trainers_init_says_how_to_list_them_and_no_step_follows(make_store: MakeStore) -> None:
    store = make_store(transfer={})
    [replica] = await serving(store, 1)
    with pytest.raises(TrainerNotTrusted) as refused:
        await store.init_transfer({**TRAINER, "world_size": 2})
    assert [problem.field for problem in refused.value.problems] == ["policy.transfer.trainers"]
    for step in (store.start_transfer(SwitchOptions()), store.update_transfer(WEIGHTS), store.finish_transfer(None)):
        with pytest.raises(TransferRefused):
            await step
    assert kinds(replica) == [AcceptRequests]


@virtual_time.test
async def test_without_replicas_there_is_nobody_to_meet(make_store: MakeStore) -> None:
    with pytest.raises(TransferRefused) as refused:
        await meet(make_store(), 1)
    assert_refused(refused, "transfer", "no replica is there yet; wait until the service is ready")


@virtual_time.test
async def test_every_replica_takes_every_step_and_the_version_is_made(make_store: MakeStore) -> None:
    store = make_store()
    replicas = await serving(store, 1, 2)
    await meet(store, 4)
    await store.start_transfer(SwitchOptions(mode="abort", reset_prefix_cache=False))
    await store.update_transfer(WEIGHTS)
    await store.update_transfer({"names": ["b"]})
    update = await store.finish_transfer(7)
    assert (update.version, update.checksum) == (7, None)
    assert [(replica.replica_id, replica.status) for replica in update.replicas] == [("a", "swapped"), ("b", "swapped")]
    for replica in replicas:
        start, *others = (command for command in replica.received[2:] if not isinstance(command, SaveTransfer))
        assert isinstance(start, StartTransfer)
        assert start.options == SwapOptions("abort", reset_prefix_cache=False)
        assert others == [
            UpdateTransfer(WEIGHTS, 30.0),
            UpdateTransfer({"names": ["b"]}, 30.0),
            ApplyTransfer(),
            FinishTransfer(7),
        ]
    assert (await store.wait_for(None, 7, 7, 0.0)).versions[""] == 7


@virtual_time.test
async def test_of_a_list_each_replica_is_told_its_own_workers_part(make_store: MakeStore) -> None:
    store = make_store()
    replicas = await serving(store, 2, 1)
    await meet(store, 4)
    await store.start_transfer(SwitchOptions())
    await store.update_transfer([{"for": 1}, {"for": 2}, {"for": 3}])
    assert [replica.received[-1] for replica in replicas] == [
        UpdateTransfer([{"for": 1}, {"for": 2}], 30.0),
        UpdateTransfer([{"for": 3}], 30.0),
    ]
    with pytest.raises(TransferRefused) as refused:
        await store.update_transfer([{"for": 1}])
    assert_refused(refused, "update_info", "3 workers take part, one entry each")
    assert (await store.finish_transfer(None)).version == 1


@virtual_time.test
async def test_without_replicas_no_transfer_starts(make_store: MakeStore) -> None:
    store = make_store()
    with pytest.raises(TransferRefused) as refused:
        await store.start_transfer(SwitchOptions())
    assert_refused(refused, "transfer", CHANGED)


@pytest.mark.parametrize("step", ["update_transfer", "finish_transfer"])
@virtual_time.test
async def test_no_step_is_taken_before_the_start(make_store: MakeStore, step: str) -> None:
    store = make_store()
    await serving(store, 1)
    await meet(store, 2)
    with pytest.raises(TransferRefused) as refused:
        await getattr(store, step)(None)
    assert_refused(refused, "transfer", "none is under way; start it first, or it was abandoned")


@virtual_time.test
async def test_a_replica_that_cannot_meet_the_trainer_leaves_nothing_met(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    replica, other = await serving(store, 1, 1)
    await meet(store, 3)
    replica.fails[InitTransfer] = "no route"
    with pytest.raises(TransferRefused) as refused:
        await meet(store, 3)
    assert_refused(refused, "init_info", "a replica could not meet the trainer: no route")
    assert caplog.messages == ["A replica could not meet the trainer of a weight transfer: no route"]
    with pytest.raises(TransferRefused, match=CHANGED):
        await store.start_transfer(SwitchOptions())
    replica.fails.clear()
    await meet(store, 3)
    assert (await transfer(store)).version == 1
    assert (replica.is_alive, other.is_alive) == (True, True)


@pytest.mark.parametrize("change", ["registers", "dies", "registers again"])
@virtual_time.test
async def test_other_replicas_than_those_that_met_the_trainer_are_refused(make_store: MakeStore, change: str) -> None:
    store = make_store()
    first, second = await serving(store, 1, 1)
    await meet(store, 3)
    if change == "registers":
        await TransferringReplica(store, "c").register_and_serve()
    elif change == "dies":
        second.end()
    else:
        second.end()
        await TransferringReplica(store, second.name).register_and_serve()
    with pytest.raises(TransferRefused) as refused:
        await store.start_transfer(SwitchOptions())
    assert_refused(refused, "transfer", CHANGED)
    await meet(store, {"registers": 4, "dies": 2, "registers again": 3}[change])
    assert (await transfer(store)).version == 1
    assert kinds(first)[-4:] == [StartTransfer, UpdateTransfer, ApplyTransfer, FinishTransfer]


@pytest.mark.parametrize("step", [ApplyTransfer, FinishTransfer])
@virtual_time.test
async def test_a_replica_that_fails_after_all_is_sent_is_replaced_alone(
    make_store: MakeStore, step: type[Command]
) -> None:
    store = make_store()
    first, second = await serving(store, 1, 1, fails={step: "cannot"})
    await meet(store, 3)
    update = await transfer(store)
    assert [(replica.status, replica.error) for replica in update.replicas] == [
        ("replaced", "cannot"),
        ("swapped", None),
    ]
    assert (first.is_alive, second.is_alive) == (False, True)
    assert (await store.wait_for(None, 1, 1, 0.0)).versions[""] == 1


@virtual_time.test
async def test_a_finish_waits_for_the_update_before_it(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1, hangs={UpdateTransfer})
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    updating = asyncio.create_task(store.update_transfer(WEIGHTS))
    await replica.is_asked.wait()
    finishing = [asyncio.create_task(store.finish_transfer(None)) for _ in range(2)]
    await settled()
    assert kinds(replica)[-1] == UpdateTransfer
    replica.go_on.set()
    await updating
    assert (await finishing[0]).version == 1
    with pytest.raises(TransferRefused, match="none is under way"):
        await finishing[1]
    assert kinds(replica)[-3:] == [UpdateTransfer, ApplyTransfer, FinishTransfer]


@virtual_time.test
async def test_a_second_transfer_starts_when_the_first_has_ended_and_no_step_of_the_two_mixes(
    make_store: MakeStore,
) -> None:
    store = make_store()
    [replica] = await serving(store, 1)
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    second = asyncio.create_task(store.start_transfer(SwitchOptions()))
    await asyncio.sleep(1.0)
    assert not second.done()
    await store.update_transfer(WEIGHTS)
    await store.finish_transfer(None)
    await second
    await store.update_transfer(WEIGHTS)
    assert (await store.finish_transfer(None)).version == 2
    assert kinds(replica)[2:] == [StartTransfer, UpdateTransfer, ApplyTransfer, FinishTransfer] * 2


@virtual_time.test
async def test_a_transfer_that_is_refused_at_its_start_holds_up_nobody(make_store: MakeStore) -> None:
    store = make_store()
    [replica] = await serving(store, 1)
    with pytest.raises(TransferRefused, match=CHANGED):
        await store.start_transfer(SwitchOptions())
    await meet(store, 2)
    await store.start_transfer(SwitchOptions(if_busy="refuse"))
    assert (await store.finish_transfer(None)).version == 1
    assert replica.is_alive


@virtual_time.test
async def test_a_replica_that_is_late_waits_for_the_next_transfer_and_takes_part_in_it(make_store: MakeStore) -> None:
    store = make_store()
    [early] = await serving(store, 1)
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    late = await TransferringReplica(store, "late").register()
    await store.update_transfer(WEIGHTS)
    assert [replica.replica_id for replica in (await store.finish_transfer(None)).replicas] == ["a"]
    # The trainer is not connected with it, so it was told nothing.
    with pytest.raises(TransferRefused, match=CHANGED):
        await store.start_transfer(SwitchOptions())
    assert late.received == []
    await meet(store, 3)
    update = await transfer(store)
    assert [(replica.replica_id, replica.status) for replica in update.replicas] == [
        ("a", "swapped"),
        ("late", "swapped"),
    ]
    assert kinds(late) == [InitTransfer, StartTransfer, UpdateTransfer, ApplyTransfer, FinishTransfer, AcceptRequests]
    assert early.loaded == late.loaded == LoadedWeights(2)


@virtual_time.test
async def test_a_number_that_is_taken_can_be_corrected(make_store: MakeStore) -> None:
    store = make_store()
    await serving(store, 1)
    await meet(store, 2)
    await transfer(store)
    await store.start_transfer(SwitchOptions())
    with pytest.raises(VersionRefused, match="1 is taken; the next is 2"):
        await store.finish_transfer(1)
    assert (await store.finish_transfer(2)).version == 2


@virtual_time.test
async def test_a_transfer_says_whether_the_prefix_cache_of_older_weights_stays(make_store: MakeStore) -> None:
    store = make_store()
    [replica] = await serving(store, 1)
    await meet(store, 2)
    kept = []
    for reset_prefix_cache in (True, False):
        await store.start_transfer(SwitchOptions(reset_prefix_cache=reset_prefix_cache))
        await store.update_transfer(WEIGHTS)
        kept.append((await store.finish_transfer(None)).keeps_prefix_cache)
    state = await store.state()
    assert kept == [False, True]
    listed = [(version.version, version.keeps_prefix_cache) for version in state.versions]
    assert listed == [(0, False), (2, True)]
    replica.end()
