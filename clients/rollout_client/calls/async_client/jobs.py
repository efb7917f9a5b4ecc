"""The methods of the client for jobs: rollouts that outlive their connection."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncConnection, body_chunks
from rollout_client.calls.jobs import (
    EventReader,
    acknowledge_call,
    cursor_call,
    delete_call,
    events_call,
    goes_on,
    has_nothing_left,
    job_call,
    job_list_call,
    submit_call,
)
from rollout_client.calls.options import CallOptions, call_options
from rollout_client.calls.rollouts import RolloutOptions, Samples
from rollout_client.contract.jobs import JobCursor, JobEvent, JobStatus
from rollout_client.errors import RequestRejected, StreamBroken

NOT_FOUND = 404


class AsyncJobs:
    """`client.jobs`. Each method raises a `RolloutError`."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def submit(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> JobStatus:
        """Posts `samples` as `rollout` does, and returns as soon as they are played.

        It has a key of its own unless `idempotency_key` is given: an attempt that is made again makes no second job.
        """
        given = {"idempotency_key": "auto", **call_options(options)}
        limits = self._connection.defaults.limits(CallOptions(**given))  # type: ignore[typeddict-item]
        return await self._connection.result(submit_call(samples, options), limits)

    async def status(self, job_id: str, **options: Unpack[CallOptions]) -> JobStatus:
        return await self._connection.short(job_call(job_id), options)

    async def all(self, **options: Unpack[CallOptions]) -> list[JobStatus]:
        """The jobs of the client's key, the newest first."""
        return await self._connection.short(job_list_call(), options)

    async def acknowledge(self, job_id: str, last: int, **options: Unpack[CallOptions]) -> JobStatus:
        """Events up to `last` have arrived; the service forgets them."""
        return await self._connection.short(acknowledge_call(job_id, last), options)

    async def cursor(self, job_id: str, event: int, **options: Unpack[CallOptions]) -> JobCursor:
        """Names what a job over `samples_from` has delivered up to `event`, for a checkpoint that has trained on it."""
        return await self._connection.short(cursor_call(job_id, event), options)

    async def resume(self, cursor: JobCursor, **options: Unpack[RolloutOptions]) -> JobCursor | None:
        """Goes on from a checkpoint: the events after the returned cursor bring each sample that those up to `cursor`
        have not brought, once, and no other one.

        That is the same job as long as the service keeps it, it has further samples, and none of these events was
        acknowledged. Otherwise a new job plays what is left: what no event has brought, and again each sample whose
        group has failed. `None` if nothing is.

        Args:
            options: those of a new job, as `submit` takes them; `samples_from` is the cursor's. With `keep.where`, its
                `groups` are those that are still wanted: `cursor.kept` fewer than the job was to keep.

        Raises:
            RequestRejected: a new job is needed, and the data have changed since the cursor was made.
        """
        if cursor.samples_left:
            try:
                status = await self.status(cursor.job_id, **call_options(options))
            except RequestRejected as error:
                if error.status != NOT_FOUND:
                    raise
            else:
                if has_nothing_left(cursor, status):
                    return None
                if goes_on(cursor, status):
                    return cursor
        left = cursor.ranges_to_play()
        if not left:
            return None
        options["samples_from"] = left
        status = await self.submit(**options)
        return JobCursor(job_id=status.job_id, event=0, samples_from=left)

    async def delete(self, job_id: str, **options: Unpack[CallOptions]) -> None:
        """Cancels what still runs and forgets the job."""
        await self._connection.short(delete_call(job_id), options)

    async def events(
        self, job_id: str, after: int = 0, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[JobEvent, None]:
        """Each group when it has ended, then the summary or the problem, each event once.

        A stream that breaks is opened again after the last event, with the client's `retries` for each break.
        """
        limits = self._connection.defaults.limits(options)
        reader = EventReader(after)
        while not reader.has_ended:
            reader.begin_stream()
            response = await self._connection.open(events_call(job_id, reader.after), limits)
            async with aclosing(response):
                try:
                    async with aclosing(body_chunks(response, limits.deadline)) as chunks:
                        async for chunk in chunks:
                            for event in reader.feed(chunk):
                                yield event
                except StreamBroken:
                    continue
