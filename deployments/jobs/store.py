"""The job store, one for the service: the Serve deployment that `rpc/handle_calls.py` calls.

What each call means is in `JobRegistry`. Here it is stored before it is answered, callers are woken, and time passes.
What a failing database does to a call is in `StoredState`.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from deployments.jobs.records import Change, Claim, EventsPage, JobCommands, JobRecord, JobRequest, JobWrite, OpenedJob
from deployments.jobs.registry import JobRegistry, JobsSettings
from deployments.storage.storage import EntryName, Storage, StoredRecord
from deployments.storage.stored_state import Planned, StoreReplica

POLL_S, POLLS_A_LEASE = 2.0, 2.5
"""How long a poll waits for commands, and how often it comes at least within a lease: an ingress replica calls again at
once, and each call keeps its lease. A call costs both sides some milliseconds, also of a service that is idle."""
COMMANDS = ""
Result = TypeVar("Result")


class JobStore(StoreReplica[JobRegistry]):
    """The job store; `JobRegistry` documents its calls.

    Args:
        time_s: seconds since 1970.
    """

    def __init__(
        self, settings: JobsSettings, storage: Storage | None = None, time_s: Callable[[], float] = time.time
    ) -> None:
        super().__init__(settings, storage, "job")
        self._settings = settings
        self._time_s = time_s
        self._changed: dict[str, asyncio.Event] = {}
        """By job, for those whose events somebody waits for; `COMMANDS` is there for those who poll."""

    # Called by the ingress for a caller of the service; documented in `JobRegistry`.

    async def open(self, request: JobRequest, owner: str, body: bytes) -> OpenedJob:
        return await self._change(lambda registry: registry.open(request, owner, body, self._time_s()))

    async def record(self, job_id: str, namespace: str) -> JobRecord:
        return (await self._state.started()).record(job_id, namespace)

    async def records(self, namespace: str) -> list[JobRecord]:
        return (await self._state.started()).records(namespace)

    async def events(self, job_id: str, namespace: str, after: int, most_bytes: int, wait_s: float) -> EventsPage:
        """The events after `after`. Without any, waits for the next one, at most `wait_s` seconds.

        Raises `JobUnknown`, also for a job that is deleted meanwhile; `EventUnknown`; `EventsAcknowledged`.
        """
        registry = await self._state.started()
        deadline = _now() + wait_s
        while True:
            names = registry.events_after(job_id, namespace, after, most_bytes)
            record = registry.record(job_id, namespace)
            left_s = deadline - _now()
            if names or record.has_ended or left_s <= 0:
                data = await self.read(job_id, names)
                # What was acknowledged meanwhile is not there any longer.
                return EventsPage(record, [(name.number, data[name]) for name in names if name in data])
            await self._wait(job_id, min(left_s, POLL_S))

    async def ledger(self, job_id: str, namespace: str, after: int) -> dict[EntryName, bytes]:
        return await self.read(job_id, (await self._state.started()).ledger(job_id, namespace, after))

    async def acknowledge(self, job_id: str, namespace: str, last: int) -> JobRecord:
        await self._change(lambda registry: (None, registry.acknowledge(job_id, namespace, last)))
        return (await self._state.started()).record(job_id, namespace)

    async def delete(self, job_id: str, namespace: str) -> None:
        await self._change(lambda registry: (None, registry.delete(job_id, namespace)))

    async def delete_key(self, key: str, namespace: str) -> None:
        await self._change(lambda registry: (None, registry.delete_key(key, namespace)))

    # Called by an ingress replica for itself.

    async def poll(self, owner: str, playing: Collection[str]) -> JobCommands:
        """Waits at most `POLL_S` seconds for some, less where leases are short."""
        registry = await self._state.started()
        commands = registry.poll(owner, playing, _now())
        if not (commands.lost or commands.waiting):
            await self._wait(COMMANDS, min(POLL_S, self._settings.lease_s / POLLS_A_LEASE))
            commands = registry.poll(owner, playing, _now())
        return commands

    async def claim(self, job_id: str, owner: str) -> Claim | None:
        return await self._change(lambda registry: registry.claim(job_id, owner))

    async def read(self, job_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await self._state.read(job_id, names)

    async def write(self, owner: str, writes: Sequence[JobWrite]) -> list[bool]:
        """Whether each was made; one that was not is of a job that the replica must not play any longer."""

        def plan(registry: JobRegistry) -> tuple[list[bool], list[Change]]:
            changes = [registry.write(owner, write, self._time_s()) for write in writes]
            return [change is not None for change in changes], [change for change in changes if change is not None]

        return await self._change(plan)

    async def release(self, owner: str, job_ids: Collection[str]) -> None:
        await self._change(lambda registry: (None, registry.release(owner, job_ids)))

    async def pass_time(self) -> None:
        await self._change(lambda registry: (None, registry.time_passed(_now(), self._time_s())))

    def _load(self, kept: Sequence[StoredRecord]) -> JobRegistry:
        return JobRegistry(self._settings, kept, _now())

    async def _change(self, plan: Callable[[JobRegistry], tuple[Result, Sequence[Change]]]) -> Result:
        """Returns the result of `plan` once its changes are stored, committed, and told to those who wait for them."""

        def planned(registry: JobRegistry) -> Planned[Result]:
            result, changes = plan(registry)

            def commit() -> Result:
                registry.commit(changes, _now())
                self._wake(changes)
                return result

            return [change.stored for change in changes], commit

        return await self._state.change(planned)

    def _wake(self, changes: Sequence[Change]) -> None:
        woken = {change.job_id for change in changes}
        if any(change.record is None or change.record.state == "waiting" for change in changes):
            woken.add(COMMANDS)
        for name in woken & self._changed.keys():
            self._changed.pop(name).set()

    async def _wait(self, name: str, seconds: float) -> None:
        """Returns when the job has changed, or there are `COMMANDS`, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.setdefault(name, asyncio.Event()).wait()


def _now() -> float:
    """Seconds of the monotonic clock."""
    return asyncio.get_running_loop().time()
