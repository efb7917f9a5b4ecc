"""The job store: stored before it is answered, and callers that wait are woken."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from deployments.jobs.records import JobUnknown, JobWrite
from deployments.jobs.registry import JobsSettings
from deployments.jobs.store import JobStore
from deployments.storage.storage import EntryName, StorageFailed, StoreReplaced
from deployments.storage.stored_state import ANSWER_WITHIN_S
from tests import virtual_time
from tests.deployments.jobs.stored_jobs import asked, event
from tests.fakes.storage import ScriptedStorage

SETTINGS = JobsSettings(lease_s=5)


def run(scenario: Callable[[JobStore, ScriptedStorage], Awaitable[None]], errors: Sequence[Exception] = ()) -> None:
    async def with_store() -> None:
        storage = ScriptedStorage(errors=errors)
        await scenario(JobStore(SETTINGS, storage), storage)

    virtual_time.run(with_store())


def test_nothing_is_answered_before_it_is_stored() -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        storage.gate.clear()
        opened = asyncio.create_task(store.open(*asked(), b"body"))
        again = asyncio.create_task(store.open(*asked(owner="b"), b"body"))
        await asyncio.sleep(0.1)
        assert not opened.done()
        assert not again.done()
        storage.gate.set()
        assert (await opened).claim is not None
        assert (await again).claim is None

    run(scenario)


def test_a_caller_that_goes_away_leaves_no_change_half_made() -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        storage.gate.clear()
        opened = asyncio.create_task(store.open(*asked(), b"body"))
        await asyncio.sleep(0.1)
        opened.cancel()
        storage.gate.set()
        await asyncio.sleep(0.1)
        assert (await store.open(*asked(owner="b"), b"body")).claim is None

    run(scenario)


def test_a_storage_that_cannot_be_reached_is_tried_again() -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        assert (await store.open(*asked(), b"body")).claim is not None
        assert storage.errors == []

    run(scenario, [StorageFailed("no"), StorageFailed("disk")])


def test_while_the_database_fails_calls_are_refused_in_time() -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(key="1"), b"body")).record.job_id
        storage.is_failing = True
        began = asyncio.get_running_loop().time()
        calls = [store.open(*asked(key=key), b"body") for key in ("2", "3")]
        failures = await asyncio.gather(
            *calls,
            store.read(job_id, [EntryName("body", 0)]),
            store.delete(job_id, ""),
            store.answer(),
            return_exceptions=True,
        )
        assert [type(failure) for failure in failures] == [StorageFailed] * 5
        assert asyncio.get_running_loop().time() - began == pytest.approx(ANSWER_WITHIN_S)
        assert list((await store.poll("a", [job_id])).lost) == [], "leases are kept meanwhile"
        storage.is_failing = False
        await asyncio.sleep(1)
        await store.answer()
        keys = {record.key for record in await store.records("")}
        assert keys == {"1", "2"}, "the first one may have been stored, so it is there; the others never were"

    run(scenario)


def test_a_store_that_cannot_load_its_jobs_begins_when_it_can() -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        storage.is_failing = True
        for _ in range(2):
            with pytest.raises(StorageFailed, match="has not answered for 5 s"):
                await store.records("")
        storage.is_failing = False
        assert await store.records("") == []

    run(scenario)


@pytest.mark.parametrize("error", [StorageFailed("no room"), RuntimeError("a bug")])
def test_leases_run_out_also_after_an_attempt_to_store_it_failed(error: Exception) -> None:
    async def scenario(store: JobStore, storage: ScriptedStorage) -> None:
        await store.open(*asked(owner="a"), b"body")
        storage.errors.append(error)
        await asyncio.sleep(SETTINGS.lease_s + 2)
        assert [record.state for record in await store.records("")] == ["waiting"]

    run(scenario)


def test_a_job_that_its_owner_does_not_play_waits_for_another_one() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(owner="a"), b"body")).record.job_id
        for _second in range(4):
            assert list((await store.poll("a", [])).waiting) == [], "the answer may be on its way"
        for _second in range(4):
            waiting = list((await store.poll("a", [])).waiting)
        assert waiting == [job_id]

    run(scenario)


def test_a_store_that_was_replaced_refuses_every_call_and_is_unhealthy() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        await store.check_health()
        with pytest.raises(StoreReplaced):
            await store.open(*asked(), b"body")
        with pytest.raises(StoreReplaced):
            await store.records("")
        with pytest.raises(StoreReplaced):
            await store.check_health()

    run(scenario, [StoreReplaced("by another")])


def test_who_waits_for_events_gets_them_when_they_are_written() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(), b"body")).record.job_id
        waiting = asyncio.create_task(store.events(job_id, "", 0, 1000, 60))
        await asyncio.sleep(3)
        assert not waiting.done()
        await store.write("a", [JobWrite(job_id, 1, {event(1): b"group"})])
        assert list((await waiting).events) == [(1, b"group")]

    run(scenario)


def test_who_waits_for_events_in_vain_gets_none_after_its_time() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(), b"body")).record.job_id
        began = asyncio.get_running_loop().time()
        page = await store.events(job_id, "", 0, 1000, 30)
        assert list(page.events) == []
        assert asyncio.get_running_loop().time() == pytest.approx(began + 30)

    run(scenario)


def test_who_waits_for_events_of_a_job_that_is_deleted_learns_it() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(), b"body")).record.job_id
        waiting = asyncio.create_task(store.events(job_id, "", 0, 1000, 60))
        await asyncio.sleep(0.1)
        await store.delete(job_id, "")
        with pytest.raises(JobUnknown):
            await waiting

    run(scenario)


def test_a_replica_that_waits_for_orders_learns_of_a_deletion_at_once() -> None:
    async def scenario(store: JobStore, _: ScriptedStorage) -> None:
        job_id = (await store.open(*asked(), b"body")).record.job_id
        commands = asyncio.create_task(store.poll("a", [job_id]))
        await asyncio.sleep(0.1)
        deleted_at = asyncio.get_running_loop().time()
        await store.delete(job_id, "")
        assert list((await commands).lost) == [job_id]
        assert asyncio.get_running_loop().time() == deleted_at

    run(scenario)
