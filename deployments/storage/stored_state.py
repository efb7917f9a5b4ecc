"""The state of a store beside its storage: loaded at its start, changed in turn, stored before it is answered.

`StoreReplica` is the Serve deployment around it: the job store, the session store and the image store.

Guarantees: what is not stored was never said to anybody; while the database fails, each call that needs it raises
`StorageFailed` after `ANSWER_WITHIN_S`, and what waited for its turn changes nothing; when the database is back, the
store goes on by itself.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from tenacity import AsyncRetrying

from deployments import logs
from deployments.storage.storage import (
    EntryName,
    Storage,
    StorageFailed,
    StorageSettings,
    StoredChange,
    StoredRecord,
    StoreKind,
    StoreReplaced,
    attempts,
)
from deployments.upstream.ray_serve.own_replica import install

TICK_S = 0.5
ANSWER_WITHIN_S = 5.0
"""Bound of the wait of a call for a database that fails."""
State = TypeVar("State")
Result = TypeVar("Result")
Planned = tuple[Sequence[StoredChange], Callable[[], Result]]
"""The changes to store, and the commit after that: it changes the state and returns the answer."""
logger = logging.getLogger("rollout_service.storage")


class StoredState(Generic[State]):
    """State in memory whose changes are stored before they are made.

    Args:
        load: makes the state from the stored records, once, at the first call that needs it.
    """

    def __init__(self, storage: Storage, kind: StoreKind, load: Callable[[Sequence[StoredRecord]], State]) -> None:
        self._storage = storage
        self._kind = kind
        self._load = load
        self._state: State | None = None
        self._lock = asyncio.Lock()
        """Held by each change: it sees what the one before it has stored."""
        self._starting: asyncio.Task[State] | None = None
        self.replaced: StoreReplaced | None = None
        """Set once another store has taken over."""

    async def started(self) -> State:
        """Raises `StorageFailed`, and `StoreReplaced` in a store that another one has replaced."""
        if self.replaced is not None:
            raise self.replaced
        if self._state is None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start())
            return await self._answered(asyncio.shield(self._starting))
        return self._state

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await self._answered(self._retrying("read")(self._storage.read, record_id, names))

    async def change(self, plan: Callable[[State], Planned[Result]]) -> Result:
        """Makes the changes of `plan`, which sees all earlier ones, and returns its result once they are stored.

        A caller that leaves before its turn changes nothing. Later its change goes on: what may be stored must be
        committed.
        """
        return await self._answered(self._stored_in_turn(await self.started(), plan))

    async def _start(self) -> State:
        records: list[StoredRecord] = await self._retrying("loaded")(self._storage.take_over)
        self._state = self._load(records)
        logger.info("The %s store has %s %ss.", self._kind, len(records), self._kind)
        return self._state

    async def _stored_in_turn(self, state: State, plan: Callable[[State], Planned[Result]]) -> Result:
        await self._lock.acquire()
        storing = asyncio.create_task(self._stored(state, plan))
        storing.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(storing)

    async def _stored(self, state: State, plan: Callable[[State], Planned[Result]]) -> Result:
        if self.replaced is not None:
            raise self.replaced
        changes, commit = plan(state)
        try:
            if changes:
                # Until it succeeds: after an error the changes may have been made, and then must be committed.
                await self._retrying("stored")(self._storage.apply, changes)
        except StoreReplaced as replaced:
            self.replaced = replaced
            raise
        return commit()

    def _retrying(self, what: str) -> AsyncRetrying:
        """Retries a call of the storage while it raises `StorageFailed`. Only the first failure is logged."""

        def log(error: BaseException | None) -> None:
            logger.warning("The %ss cannot be %s, trying again: %s", self._kind, what, error and error.__cause__)

        return attempts(StorageFailed, math.inf, log)

    async def _answered(self, working: Awaitable[Result]) -> Result:
        """Raises `StorageFailed` if there is no answer within `ANSWER_WITHIN_S`."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await working
        except TimeoutError as error:
            message = f"The database of the {self._kind}s has not answered for {ANSWER_WITHIN_S:g} s; try again later."
            raise StorageFailed(message) from error


class StoreReplica(ABC, Generic[State]):
    """The only replica of a store, which stores each change before it answers, and notices that time passes."""

    def __init__(self, settings: StorageSettings, storage: Storage | None, kind: StoreKind) -> None:
        """Opens the storage that the settings name, unless `storage` is given.

        Raises:
            _StorageNotUsable: see `storage_of`.
        """
        logs.configure()
        install()
        self._kind = kind
        self._logger = logging.getLogger(f"rollout_service.{kind}s")
        # Imported here: redis takes a twentieth of a second, also of replicas that know only what a store raises.
        from deployments.storage.databases import storage_of

        self._state = StoredState(storage or storage_of(settings, kind), kind, self._begin)
        self._ticking: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Called by Serve. Raises `StoreReplaced` in a store that another one has replaced."""
        if self._state.replaced is not None:
            raise self._state.replaced

    async def answer(self) -> None:
        """Returns if the store reads and writes. Raises `StorageFailed` if what comes first cannot be stored."""
        await self.pass_time()
        await self._state.read("", [EntryName("", 0)])

    @abstractmethod
    async def pass_time(self) -> None:
        """Makes the changes that follow from the time alone."""

    @abstractmethod
    def _load(self, kept: Sequence[StoredRecord]) -> State:
        """The state of the stored records."""

    def _begin(self, kept: Sequence[StoredRecord]) -> State:
        self._ticking = asyncio.create_task(self._tick())
        return self._load(kept)

    async def _tick(self) -> None:
        while self._state.replaced is None:
            await asyncio.sleep(TICK_S)
            try:
                await self.pass_time()
            except StoreReplaced:
                self._logger.error("Another %s store has taken over; this one ends.", self._kind)
            except StorageFailed:
                # Was logged where it was tried.
                continue
            except Exception:
                self._logger.exception(
                    "The changes of the %ss that time brings could not be made; they are retried.", self._kind
                )
