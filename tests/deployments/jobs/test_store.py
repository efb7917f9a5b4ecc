"""The job store: stored before it is answered, and callers that wait are woken."""

import asyncio

import pytest

from deployments.jobs.records import BODY, JobUnknown, JobWrite
from deployments.jobs.registry import JobsSettings
from deployments.jobs.store import JobStore
from deployments.storage.storage import StorageFailed, StoreReplaced
from tests import virtual_time
from tests.deployments.jobs.stored_jobs import asked, event
from tests.fakes.storage import ScriptedStorage

SETTINGS = JobsSettings(lease_s=5)


@pytest.fixture
def storage() -> ScriptedStorage:
    return ScriptedStorage()


@pytest.fixture
def store(storage: ScriptedStorage) -> JobStore:
    return JobStore(SETTINGS, storage)


async def test_while_the_database_fails_leases_are_kept(store: JobStore, storage: ScriptedStorage) -> None:
    job_id = (await store.open(*asked(key="1"), b"body")).record.job_id
    storage.is_failing = True
    calls = store.open(*asked(key="2"), b"body"), store.read(job_id, [BODY]), store.delete(job_id, ""), store.answer()
    assert [type(failure) for failure in await asyncio.gather(*calls, return_exceptions=True)] == [StorageFailed] * 4
    assert list((await store.poll("a", [job_id])).lost) == []


@pytest.mark.parametrize("error", [StorageFailed("no room"), RuntimeError("a bug")])
async def test_leases_run_out_also_after_an_attempt_to_store_it_failed(
    store: JobStore, storage: ScriptedStorage, error: Exception
) -> None:
    await store.open(*asked(owner="a"), b"body")
    storage.errors.append(error)
    await asyncio.sleep(SETTINGS.lease_s + 2)
    assert [record.state for record in await store.records("")] == ["waiting"]


async def test_a_job_that_its_owner_does_not_play_waits_for_another_one(store: JobStore) -> None:
    job_id = (await store.open(*asked(owner="a"), b"body")).record.job_id
    for _two_seconds in range(2):
        assert list((await store.poll("a", [])).waiting) == [], "the answer may be on its way"
    for _two_seconds in range(2):
        waiting = list((await store.poll("a", [])).waiting)
    assert waiting == [job_id]


async def test_a_store_that_was_replaced_is_unhealthy(store: JobStore, storage: ScriptedStorage) -> None:
    await store.check_health()
    storage.errors.append(StoreReplaced("by another"))
    for call in (store.open(*asked(), b"body"), store.check_health()):
        with pytest.raises(StoreReplaced):
            await call


async def test_who_waits_for_events_gets_them_when_they_are_written(store: JobStore) -> None:
    job_id = (await store.open(*asked(), b"body")).record.job_id
    waiting = asyncio.create_task(store.events(job_id, "", 0, 1000, 60))
    await asyncio.sleep(3)
    assert not waiting.done()
    await store.write("a", [JobWrite(job_id, 1, {event(1): b"group"})])
    assert list((await waiting).events) == [(1, b"group")]


async def test_who_waits_for_events_in_vain_gets_none_after_its_time(store: JobStore) -> None:
    job_id = (await store.open(*asked(), b"body")).record.job_id
    began = virtual_time.now()
    assert list((await store.events(job_id, "", 0, 1000, 30)).events) == []
    assert virtual_time.now() == pytest.approx(began + 30)


async def test_who_waits_for_events_or_orders_learns_of_a_deletion_at_once(store: JobStore) -> None:
    job_id = (await store.open(*asked(), b"body")).record.job_id
    waiting = asyncio.create_task(store.events(job_id, "", 0, 1000, 60))
    commands = asyncio.create_task(store.poll("a", [job_id]))
    await asyncio.sleep(0.1)
    deleted_at = virtual_time.now()
    await store.delete(job_id, "")
    with pytest.raises(JobUnknown):
        await waiting
    assert list((await commands).lost) == [job_id]
    assert virtual_time.now() == deleted_at
