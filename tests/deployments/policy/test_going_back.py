"""Transfers that break off, with scripted replicas: all go back to the weights before it, in place."""

import asyncio
from typing import Any

import pytest

from deployments.policy.commands import (
    AbandonTransfer,
    ApplyTransfer,
    Command,
    ComputeChecksum,
    FinishTransfer,
    InitTransfer,
    Stage,
    StartTransfer,
    Swap,
    UpdateTransfer,
)
from deployments.policy.failures import TransferRefused
from deployments.policy.replica_registry import RegisteredReplica, ReplicaRegistry
from deployments.policy.weight_transfer import ENDS_WITHIN_S
from rollout_client.contract.policy import SwitchOptions
from tests import virtual_time
from tests.deployments.policy.transfers import (
    BACK,
    BROKE,
    WEIGHTS,
    MakeStore,
    assert_refused,
    gone_back,
    kinds,
    meet,
    serving,
    transfer,
)
from tests.virtual_time import now, run, settled, until


@pytest.mark.parametrize("how", ["fails", "dies"])
@pytest.mark.parametrize("step", [StartTransfer, UpdateTransfer])
@virtual_time.test
async def test_if_a_replica_fails_midway_all_go_back_in_place_even_those_that_wait_for_the_trainer(
    make_store: MakeStore, step: type[Command], how: str
) -> None:
    store = make_store()
    script: dict[str, Any] = {"fails": {step: "out of memory"}} if how == "fails" else {"dies": {step}}
    failing, waiting, other = await serving(store, 1, 1, 1, **script)
    waiting.hangs.add(step)
    await meet(store, 4)
    with pytest.raises(TransferRefused) as refused:
        await transfer(store)
    assert_refused(refused, "transfer", BROKE + ("out of memory" if how == "fails" else "it died"))
    # It gives the trainer up by itself.
    waiting.go_on.set()
    await gone_back(*([failing] if how == "fails" else []), waiting, other)
    assert failing.is_alive == (how == "fails")
    assert (await store.state(0)).current == 0
    # Nothing is left held: they meet a trainer again, and receive.
    failing.fails.clear()
    waiting.hangs.clear()
    await meet(store, 4 if how == "fails" else 3)
    assert (await transfer(store)).version == 1


@virtual_time.test
async def test_a_replica_that_does_not_give_up_the_trainer_is_replaced_alone(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    stuck, failing = await serving(store, 1, 1, hangs={UpdateTransfer})
    failing.fails[UpdateTransfer] = "the trainer sent nothing for 30 s"
    await meet(store, 3)
    began = now()
    with pytest.raises(TransferRefused, match="the trainer sent nothing for 30 s"):
        await transfer(store)
    await stuck.killed.wait()
    assert now() - began == 30.0 + ENDS_WITHIN_S
    await gone_back(failing)


@pytest.mark.parametrize("step", [AbandonTransfer, Stage, Swap])
@virtual_time.test
async def test_a_replica_that_cannot_go_back_is_replaced_alone(make_store: MakeStore, step: type[Command]) -> None:
    store = make_store()
    broken, other = await serving(store, 1, 1, fails={UpdateTransfer: "no", step: "no room"})
    await meet(store, 3)
    with pytest.raises(TransferRefused):
        await transfer(store)
    await gone_back(other)
    await broken.killed.wait()
    await meet(store, 2)
    assert (await transfer(store)).version == 1


@virtual_time.test
async def test_where_only_engines_had_the_weights_all_replicas_are_replaced(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(transfer_idle_s=30)
    replicas = await serving(store, 1, 1)
    await meet(store, 3)
    await transfer(store)
    await store.start_transfer(SwitchOptions())
    for replica in replicas:
        await replica.killed.wait()
    reason = "it has to go back, and only engines had the weights of version 1"
    assert caplog.messages[-2:] == [f"A generator replica is replaced: {reason}"] * 2


@virtual_time.test
async def test_a_trainer_that_comes_again_waits_until_the_replicas_have_gone_back(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1, hangs={Stage})
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    second = asyncio.create_task(meet(store, 2))
    await replica.is_asked.wait()
    await settled()
    assert (kinds(replica)[-1], second.done()) == (Stage, False)
    replica.go_on.set()
    assert await second == 2
    assert kinds(replica)[-4:] == [*BACK, InitTransfer]


@virtual_time.test
async def test_what_no_replica_can_make_its_weights_is_no_version(make_store: MakeStore) -> None:
    store = make_store()
    [replica] = await serving(store, 1, fails={ApplyTransfer: "a tensor is missing"})
    await meet(store, 2)
    with pytest.raises(TransferRefused) as refused:
        await transfer(store)
    assert_refused(refused, "transfer", BROKE + "a tensor is missing")
    await gone_back(replica)
    assert (await store.state(0)).current == 0


@virtual_time.test
async def test_of_a_version_that_cannot_be_stored_the_replicas_go_back(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    [replica] = await serving(store, 1)
    await meet(store, 2)

    def full(*_arguments: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("deployments.policy.versions.write_durably", full)
        with pytest.raises(OSError, match="no space left"):
            await transfer(store)
        await gone_back(replica)
    assert (await store.state(0)).current == 0
    await meet(store, 2)
    assert (await transfer(store)).version == 1


@virtual_time.test
async def test_replicas_go_back_in_place_when_the_trainer_is_silent_between_two_steps(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    replicas = await serving(store, 1, 1)
    await meet(store, 3)
    await store.start_transfer(SwitchOptions())
    await asyncio.sleep(29.0)
    await store.update_transfer(WEIGHTS)
    began = now()
    await gone_back(*replicas)
    assert now() - began == 30.0
    with pytest.raises(TransferRefused, match="none is under way"):
        await store.update_transfer(WEIGHTS)
    await meet(store, 3)
    assert (await transfer(store)).version == 1


@virtual_time.test
async def test_a_checksum_that_a_transfer_has_cut_off_can_be_asked_for_again(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1)
    await meet(store, 2)
    await store.state(0.1)
    await store.start_transfer(SwitchOptions())
    await gone_back(replica)
    await until(lambda: not store.registry.update_lock._lock.locked())
    await store.state(0.1)
    await until(lambda: kinds(replica)[-1] is ComputeChecksum)
    assert kinds(replica).count(ComputeChecksum) == 2


@virtual_time.test
async def test_an_abandoned_transfer_lets_the_next_one_begin_even_if_a_replica_cannot_be_ended(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_registry: ReplicaRegistry, _replica: RegisteredReplica, _reason: str, _version: int | None) -> None:
        raise OSError("the actor cannot be ended")

    store = make_store(transfer_idle_s=30)
    await serving(store, 1, fails={AbandonTransfer: "stuck"})
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    monkeypatch.setattr(ReplicaRegistry, "replace", refuse)
    assert store.registry.update_lock._lock.locked()
    await until(lambda: not store.registry.update_lock._lock.locked())


@virtual_time.test
async def test_a_transfer_is_abandoned_when_its_trainer_hangs_up_during_an_update(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1, hangs={UpdateTransfer})
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    updating = asyncio.create_task(store.update_transfer(WEIGHTS))
    await replica.is_asked.wait()
    updating.cancel()
    await asyncio.sleep(100.0)
    assert kinds(replica)[-1] is UpdateTransfer
    replica.go_on.set()
    began = now()
    await gone_back(replica)
    assert now() - began == 30.0


@virtual_time.test
async def test_a_transfer_that_is_finished_is_not_abandoned_later(make_store: MakeStore) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1)
    await meet(store, 2)
    await transfer(store)
    await asyncio.sleep(31.0)
    assert replica.is_alive


@pytest.mark.parametrize("step", [ApplyTransfer, FinishTransfer])
@virtual_time.test
async def test_a_transfer_is_not_abandoned_while_it_is_being_finished(
    make_store: MakeStore, step: type[Command]
) -> None:
    store = make_store(transfer_idle_s=30)
    [replica] = await serving(store, 1, hangs={step})
    await meet(store, 2)
    await store.start_transfer(SwitchOptions())
    finishing = asyncio.create_task(store.finish_transfer(None))
    await asyncio.sleep(31.0)
    replica.go_on.set()
    assert (await finishing).version == 1
    assert replica.is_alive


@pytest.mark.parametrize(
    ("command", "reason"),
    [(UpdateTransfer, "out of memory"), (None, "nothing was heard from the trainer")],
)
def test_a_transfer_that_is_abandoned_is_logged_with_the_reason(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture, command: type[Command] | None, reason: str
) -> None:
    async def story() -> None:
        store = make_store(transfer_idle_s=30)
        [replica] = await serving(store, 1, fails={command: reason})
        await meet(store, 2)
        await store.start_transfer(SwitchOptions())
        if command is not None:
            with pytest.raises(TransferRefused):
                await store.update_transfer(WEIGHTS)
        await gone_back(replica)
        await until(lambda: not store.registry.update_lock._lock.locked())

    with caplog.at_level("INFO", "rollout_service.policy"):
        run(story())
    abandoned, back = caplog.records
    assert (abandoned.name, abandoned.levelname) == ("rollout_service.policy", "WARNING")
    assert abandoned.getMessage() == f"A weight transfer is abandoned, and its replicas go back: {reason}"
    assert (back.getMessage(), vars(back)["version"]) == ("1 of 1 replicas are at version 0 again.", 0)
