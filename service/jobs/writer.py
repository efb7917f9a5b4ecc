"""Writes what the jobs of one ingress replica have to keep: one call of the store at a time, with all that came
since."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deployments.failures import StoreLost
from deployments.jobs.records import JobWrite
from deployments.rpc.message_size import MOST_BYTES_PER_MESSAGE, divided
from deployments.storage.storage import EntryName

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

RETRY_S = 0.2
Ended = Literal["completed", "failed"]
logger = logging.getLogger("rollout_service.jobs")


@dataclass(slots=True)
class PendingWrite:
    """What one job has to write next."""

    job_id: str
    epoch: int
    stored: "asyncio.Future[None]"
    added: dict[EntryName, bytes] = field(default_factory=dict)
    removed: set[EntryName] = field(default_factory=set)
    ended: Ended | None = None
    forgets_key: bool = False
    size_bytes: int = 0

    def write(self) -> JobWrite:
        return JobWrite(self.job_id, self.epoch, self.added, self.removed, self.ended, self.forgets_key)


class JobWriter:
    """Guarantees: what `write` returns for is stored; the writes of a job are made in their order; a store that is lost
    is asked again until it is back."""

    def __init__(self, store: "JobStore", owner: str, on_lost: Callable[[str, int], None]) -> None:
        """`on_lost` is called with each job that this replica must not play any longer, and the epoch of which it was
        to be written: it may have the job anew. Who waits for a write of it waits on, until it is cancelled."""
        self._store = store
        self._owner = owner
        self._on_lost = on_lost
        self._pending: list[PendingWrite] = []
        self._last_of: dict[str, PendingWrite] = {}
        """Of those that are pending, the last one of each job."""
        self._writing: asyncio.Task[None] | None = None

    def put(
        self,
        job_id: str,
        epoch: int,
        added: Mapping[EntryName, bytes],
        removed: Collection[EntryName] = (),
        ended: Ended | None = None,
        forgets_key: bool = False,
    ) -> "asyncio.Future[None]":
        """Returns what is done when it is stored."""
        pending = self._last_of.get(job_id)
        if pending is None or pending.epoch != epoch or pending.size_bytes > MOST_BYTES_PER_MESSAGE:
            pending = PendingWrite(job_id, epoch, asyncio.get_running_loop().create_future())
            self._pending.append(pending)
            self._last_of[job_id] = pending
        pending.added |= added
        pending.size_bytes += sum(map(len, added.values()))
        for name in removed:
            pending.added.pop(name, None)
        pending.removed |= set(removed)
        pending.ended = ended or pending.ended
        pending.forgets_key |= forgets_key
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), context=Context())
        return pending.stored

    async def write(self, job_id: str, epoch: int, added: Mapping[EntryName, bytes]) -> None:
        # Others wait for the same write.
        await asyncio.shield(self.put(job_id, epoch, added))

    async def _write_all(self) -> None:
        try:
            while self._pending:
                pending, self._pending, self._last_of = self._pending, [], {}
                for message in divided(pending, lambda each: each.size_bytes):
                    await self._write(message)
        finally:
            self._writing = None

    async def _write(self, pending: Sequence[PendingWrite]) -> None:
        try:
            made = await self._made([each.write() for each in pending])
        except Exception:
            logger.exception("Jobs could not be written; they are given up here.")
            made = [False] * len(pending)
        for each, is_made in zip(pending, made, strict=True):
            if not is_made:
                self._on_lost(each.job_id, each.epoch)
            elif not each.stored.done():
                each.stored.set_result(None)

    async def _made(self, writes: list[JobWrite]) -> list[bool]:
        is_lost = False
        while True:
            try:
                return await self._store.write(self._owner, writes)
            except StoreLost as lost:
                if not is_lost:
                    logger.warning("Jobs cannot be written, trying again: %s", lost)
                is_lost = True
                await asyncio.sleep(RETRY_S)
