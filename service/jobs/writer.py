"""Writes what the jobs of one ingress replica have to keep, the writes of all jobs together."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deployments.failures import StoreLost
from deployments.jobs.records import JobWrite
from deployments.storage.group_commit import GroupCommit
from deployments.storage.storage import EntryName

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

RETRY_S = 0.2
logger = logging.getLogger("rollout_service.jobs")


class JobWriter:
    """Guarantees: what `write` returns for is stored; the writes of a job are made in their order; a store that is lost
    is asked again until it is back.

    Args:
        on_lost: called with each job that this replica must not play any longer, and the epoch of the write: it may
            have the job anew. A caller that waits for a write of it waits until it is cancelled.
    """

    def __init__(self, store: "JobStore", owner: str, on_lost: Callable[[str, int], None]) -> None:
        self._store = store
        self._owner = owner
        self._on_lost = on_lost
        self._writes = GroupCommit(self._write, size_of)

    def put(self, write: JobWrite) -> "asyncio.Future[bool]":
        """The result says whether the write was made; nobody need wait for it."""
        return self._writes.put(write)

    async def write(self, write: JobWrite) -> None:
        await self.until_made(self.put(write))

    async def until_made(self, made: "asyncio.Future[bool]") -> None:
        """Returns when the write of this result was made, else never."""
        if not await asyncio.shield(made):
            await asyncio.Event().wait()

    async def _write(self, writes: Sequence[JobWrite]) -> list[bool]:
        of_jobs: defaultdict[tuple[str, int], list[JobWrite]] = defaultdict(list)
        for write in writes:
            of_jobs[write.job_id, write.epoch].append(write)
        try:
            made = await self._made([merged_write(of_job) for of_job in of_jobs.values()])
        except Exception:
            logger.exception("Jobs could not be written; they are given up here.")
            made = [False] * len(of_jobs)
        is_made = dict(zip(of_jobs, made, strict=True))
        for job_id, epoch in (of_job for of_job in of_jobs if not is_made[of_job]):
            self._on_lost(job_id, epoch)
        return [is_made[write.job_id, write.epoch] for write in writes]

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


def merged_write(writes: Sequence[JobWrite]) -> JobWrite:
    """One write of a job that does what these do in their order."""
    added: dict[EntryName, bytes] = {}
    removed: set[EntryName] = set()
    for write in writes:
        added |= write.added
        for name in write.removed:
            added.pop(name, None)
        removed.update(write.removed)
    ended = next((write.ended for write in writes if write.ended), None)
    forgets_key = any(write.forgets_key for write in writes)
    return replace(writes[0], added=added, removed=removed, ended=ended, forgets_key=forgets_key)


def size_of(write: JobWrite) -> int:
    return sum(map(len, write.added.values()))
