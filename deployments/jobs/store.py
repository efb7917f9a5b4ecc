"""The job store, one for the service: the Serve deployment that `store_client.JobStoreClient` calls.

What each call means is in `JobBook`. Here it is stored before it is answered, callers are woken, and time passes.

Guarantees: while the database fails, each call that needs it raises `StorageFailed` after `ANSWER_WITHIN_S`, and what
waited for its turn changes nothing; when the database is back, the store goes on by itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import ray
from redis.asyncio import Redis
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_fixed

from deployments import logs
from deployments.jobs.book import BODY, JobBook
from deployments.jobs.cluster_folder import cluster_jobs_folder
from deployments.jobs.records import (
    Change,
    Claim,
    EntryName,
    EventsPage,
    JobRecord,
    JobRequest,
    JobWrite,
    LoadedJob,
    Opened,
    Orders,
)
from deployments.jobs.redis_storage import RedisStorage
from deployments.jobs.settings import JobsSettings
from deployments.jobs.sqlite_storage import FILE, SqliteStorage
from deployments.jobs.storage import JobStorage, StorageFailed, StoreReplaced

ORDERS_S = 1.0
"""How long a call for orders waits for some: an ingress replica calls again at once, and each call keeps its lease."""
TICK_S = 0.5
STORAGE_RETRY_S = 0.5
ANSWER_WITHIN_S = 5.0
"""How long a call waits for a database that fails."""
REDIS_ANSWERS_WITHIN_S = 5.0
"""A Redis that is silent for longer is asked again."""
Result = TypeVar("Result")
logger = logging.getLogger("rollout_service.jobs")


class FolderNotShared(Exception):
    """The cluster has several nodes, and the config no Redis. The message is a sentence."""


class JobStore:
    """One replica.

    Args:
        time_s: seconds since 1970.

    Raises:
        FolderNotShared: several nodes, no Redis, and no jobs on this node.
    """

    def __init__(
        self, settings: JobsSettings, storage: JobStorage | None = None, time_s: Callable[[], float] = time.time
    ) -> None:
        logs.configure()
        self._settings = settings
        self._time_s = time_s
        self._storage = storage_of(settings) if storage is None else storage
        self._lock = asyncio.Lock()
        """Of all changes: each sees what the one before it has stored."""
        self._book: JobBook | None = None
        self._changed: dict[str, asyncio.Event] = {}
        """Of the jobs whose events somebody waits for."""
        self._ordered = asyncio.Event()
        self._replaced: StoreReplaced | None = None
        self._starting: asyncio.Task[JobBook] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Called by Serve. Raises `StoreReplaced` in a store that another one has replaced."""
        if self._replaced is not None:
            raise self._replaced

    async def answer(self) -> None:
        """Says that it reads and writes. Raises `StorageFailed` if what comes first cannot be stored."""
        await self._change(lambda _: (None, []))
        await self.read("", [BODY])

    # Called by the ingress for a caller of the service; documented in `JobBook`.

    async def open(self, request: JobRequest, owner: str, body: bytes) -> Opened:
        return await self._change(lambda book: book.open(request, owner, body, now(), self._time_s()))

    async def record(self, job_id: str, namespace: str) -> JobRecord:
        return (await self._started()).record(job_id, namespace)

    async def records(self, namespace: str) -> list[JobRecord]:
        return (await self._started()).records(namespace)

    async def events(self, job_id: str, namespace: str, after: int, most_bytes: int, wait_s: float) -> EventsPage:
        """The events after `after`. Without any, waits for the next one, at most `wait_s` seconds.

        Raises `JobUnknown`, also for a job that is deleted meanwhile; `EventUnknown`; `EventsAcknowledged`.
        """
        book = await self._started()
        deadline = now() + wait_s
        while True:
            names = book.events_after(job_id, namespace, after, most_bytes)
            record = book.record(job_id, namespace)
            book.note_listener(job_id, now())
            left_s = deadline - now()
            if names or record.has_ended or left_s <= 0:
                data = await self.read(job_id, names)
                # What was acknowledged meanwhile is not there any longer.
                return EventsPage(record, [(name.number, data[name]) for name in names if name in data])
            await self._wait(self._changed.setdefault(job_id, asyncio.Event()), min(left_s, ORDERS_S))

    async def ledger(self, job_id: str, namespace: str, after: int) -> dict[EntryName, bytes]:
        names = (await self._started()).ledger(job_id, namespace, after)
        return await self.read(job_id, names)

    async def acknowledge(self, job_id: str, namespace: str, last: int) -> JobRecord:
        await self._change(lambda book: (None, book.acknowledge(job_id, namespace, last)))
        return (await self._started()).record(job_id, namespace)

    async def delete(self, job_id: str, namespace: str) -> None:
        await self._change(lambda book: (None, book.delete(job_id, namespace)))

    async def delete_key(self, key: str, namespace: str) -> None:
        await self._change(lambda book: (None, book.delete_key(key, namespace)))

    # Called by an ingress replica for itself.

    async def orders(self, owner: str, playing: Collection[str]) -> Orders:
        """Waits at most `ORDERS_S` seconds for some."""
        book = await self._started()
        if unplayed := book.unplayed(owner, set(playing), now()):
            logger.warning("%s jobs are not played by their owner %s.", len(unplayed), owner)
            await self.release(owner, unplayed)
        ordered = self._ordered
        orders = book.orders(owner, playing, now())
        if orders.lost or orders.waiting:
            return orders
        await self._wait(ordered, ORDERS_S)
        return book.orders(owner, playing, now())

    async def claim(self, job_id: str, owner: str) -> Claim | None:
        return await self._change(lambda book: book.claim(job_id, owner, now(), self._time_s()))

    async def read(self, job_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await answered(retrying("read")(self._storage.read, job_id, names))

    async def write(self, owner: str, writes: Sequence[JobWrite]) -> list[bool]:
        """Whether each was made; one that was not is of a job that the replica must not play any longer."""

        def plan(book: JobBook) -> tuple[list[bool], list[Change]]:
            changes = [book.write(owner, write, self._time_s()) for write in writes]
            return [change is not None for change in changes], [change for change in changes if change is not None]

        return await self._change(plan)

    async def release(self, owner: str, job_ids: Collection[str]) -> None:
        await self._change(lambda book: (None, book.release(owner, job_ids)))

    async def _started(self) -> JobBook:
        """Loads what is kept, at the first call that needs it."""
        if self._replaced is not None:
            raise self._replaced
        if self._book is None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start())
            return await answered(asyncio.shield(self._starting))
        return self._book

    async def _start(self) -> JobBook:
        jobs: list[LoadedJob] = await retrying("loaded")(self._storage.take_over)
        book = self._book = JobBook(self._settings, jobs, now())
        self._ticking = asyncio.create_task(self._tick())
        logger.info("The job store has %s jobs.", len(book))
        return book

    async def _change(self, plan: Callable[[JobBook], tuple[Result, Sequence[Change]]]) -> Result:
        """Makes the changes of `plan`, which sees all earlier ones, and returns its result once they are stored.

        A caller that goes away before its turn changes nothing; later, it breaks nothing off: what may be stored must
        be committed.
        """
        return await answered(self._stored_in_turn(await self._started(), plan))

    async def _stored_in_turn(
        self, book: JobBook, plan: Callable[[JobBook], tuple[Result, Sequence[Change]]]
    ) -> Result:
        await self._lock.acquire()
        storing = asyncio.create_task(self._stored(book, plan))
        storing.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(storing)

    async def _stored(self, book: JobBook, plan: Callable[[JobBook], tuple[Result, Sequence[Change]]]) -> Result:
        if self._replaced is not None:
            raise self._replaced
        result, changes = plan(book)
        if changes:
            await self._applied(changes)
            book.commit(changes, now())
            self._wake(changes)
        return result

    async def _applied(self, changes: Sequence[Change]) -> None:
        """Does not give up: after an error nobody knows whether they were made, and what was made must be committed."""
        try:
            await retrying("stored")(self._storage.apply, changes)
        except StoreReplaced as replaced:
            self._replaced = replaced
            raise

    def _wake(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if changed := self._changed.pop(change.job_id, None):
                changed.set()
        if any(change.record is None or change.record.state in ("waiting", "suspended") for change in changes):
            self._ordered.set()
            self._ordered = asyncio.Event()

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    async def _tick(self) -> None:
        while self._replaced is None:
            await asyncio.sleep(TICK_S)
            try:
                await self._change(lambda book: (None, book.passed(now(), self._time_s())))
            except StoreReplaced:
                logger.error("Another job store has taken over; this one ends.")
            except StorageFailed:
                # Was logged where it was tried.
                continue
            except Exception:
                logger.exception("What time changes of the jobs could not be done; it is tried again.")


def retrying(what: str) -> AsyncRetrying:
    """Tries a call of the storage again while it raises `StorageFailed`. Its first failure is logged."""

    def log(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            error = state.outcome.exception()
            logger.warning("The jobs cannot be %s, trying again: %s", what, error and error.__cause__)

    return AsyncRetrying(
        wait=wait_fixed(STORAGE_RETRY_S), retry=retry_if_exception_type(StorageFailed), before_sleep=log, reraise=True
    )


async def answered(working: Awaitable[Result]) -> Result:
    """Raises `StorageFailed` if there is no answer within `ANSWER_WITHIN_S`."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await working
    except TimeoutError as error:
        message = f"The database of the jobs has not answered for {ANSWER_WITHIN_S:g} s; try again later."
        raise StorageFailed(message) from error


def now() -> float:
    """Seconds of the monotonic clock."""
    return asyncio.get_running_loop().time()


def storage_of(settings: JobsSettings) -> JobStorage:
    """Raises `FolderNotShared`, unless the folder is there: then this is the node of the store that was here before."""
    if settings.redis_url is not None:
        bound_s = REDIS_ANSWERS_WITHIN_S
        redis = Redis.from_url(settings.redis_url, socket_timeout=bound_s, socket_connect_timeout=bound_s)
        return RedisStorage(redis, settings.redis_prefix)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    folder = Path(settings.folder).expanduser() if settings.folder else cluster_jobs_folder()
    if (count := sum(bool(node["Alive"]) for node in nodes)) > 1:
        message = (
            f"The cluster has {count} nodes, and the job store may be started again on another one, which has not its "
            "folder. Set jobs.redis_url to a Redis that all nodes reach, or jobs: null for a service that refuses jobs "
            "and Idempotency-Keys."
        )
        if not (folder / FILE).exists():
            raise FolderNotShared(message)
        logger.warning("%s", message)
    return SqliteStorage(folder)
