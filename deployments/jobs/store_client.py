"""The job store over its Serve handle, for the ingress: the client of `store.JobStore`."""

from collections.abc import Collection, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import JobStoreLost
from deployments.jobs.records import Claim, EventsPage, JobCommands, JobRecord, JobRequest, JobWrite, OpenedJob
from deployments.rpc.handle_calls import call_result
from deployments.storage.storage import EntryName


class JobStoreClient:
    """Has the methods of `JobStore`.

    Each raises what the store raises, and `JobStoreLost` if the store dies or cannot be reached.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def answer(self) -> None:
        await self._call("answer")

    async def open(self, request: JobRequest, owner: str, body: bytes) -> OpenedJob:
        opened: OpenedJob = await self._call("open", request, owner, body)
        return opened

    async def record(self, job_id: str, namespace: str) -> JobRecord:
        record: JobRecord = await self._call("record", job_id, namespace)
        return record

    async def records(self, namespace: str) -> list[JobRecord]:
        records: list[JobRecord] = await self._call("records", namespace)
        return records

    async def events(self, job_id: str, namespace: str, after: int, most_bytes: int, wait_s: float) -> EventsPage:
        page: EventsPage = await self._call("events", job_id, namespace, after, most_bytes, wait_s)
        return page

    async def ledger(self, job_id: str, namespace: str, after: int) -> dict[EntryName, bytes]:
        entries: dict[EntryName, bytes] = await self._call("ledger", job_id, namespace, after)
        return entries

    async def acknowledge(self, job_id: str, namespace: str, last: int) -> JobRecord:
        record: JobRecord = await self._call("acknowledge", job_id, namespace, last)
        return record

    async def delete(self, job_id: str, namespace: str) -> None:
        await self._call("delete", job_id, namespace)

    async def delete_key(self, key: str, namespace: str) -> None:
        await self._call("delete_key", key, namespace)

    async def poll(self, owner: str, playing: Collection[str]) -> JobCommands:
        commands: JobCommands = await self._call("poll", owner, playing)
        return commands

    async def claim(self, job_id: str, owner: str) -> Claim | None:
        claim: Claim | None = await self._call("claim", job_id, owner)
        return claim

    async def read(self, job_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        entries: dict[EntryName, bytes] = await self._call("read", job_id, names)
        return entries

    async def write(self, owner: str, writes: Sequence[JobWrite]) -> list[bool]:
        made: list[bool] = await self._call("write", owner, writes)
        return made

    async def release(self, owner: str, job_ids: Collection[str], were_played: bool) -> None:
        await self._call("release", owner, job_ids, were_played)

    async def _call(self, method: str, *arguments: Any) -> Any:
        response: Any = getattr(self._handle, method).remote(*arguments)
        return await call_result(response, response, JobStoreLost, "The job store")
