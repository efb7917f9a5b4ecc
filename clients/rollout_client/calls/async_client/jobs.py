"""`client.jobs`: rollouts that outlive their connection."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncResource, body_chunks
from rollout_client.calls.call import NDJSON, Call, call_for, nothing, path_of
from rollout_client.calls.json_values import json_bytes
from rollout_client.calls.options import AUTOMATIC_KEY, CallOptions, call_options
from rollout_client.calls.rollouts import RolloutOptions, Samples, rollout_body
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobEvent, JobList, JobStatus
from rollout_client.errors import RequestRejected, StreamBroken
from rollout_client.json_lines import LineReader


class AsyncJobs(AsyncResource):
    """`client.jobs`. Each method raises a `RolloutError`."""

    async def submit(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> JobStatus:
        """Posts `samples` as `rollout` does, and returns as soon as they are played.

        It has a key of its own unless `idempotency_key` is given: an attempt that is made again makes no second job.
        """
        given: CallOptions = call_options({"idempotency_key": AUTOMATIC_KEY, **options})
        call = call_for(JobStatus, "POST", "/jobs", body=rollout_body(samples, options))
        return await self._connection.result(call, self._connection.settings.limits(given))

    async def status(self, job_id: str, **options: Unpack[CallOptions]) -> JobStatus:
        return await self._connection.short(call_for(JobStatus, "GET", path_of("jobs", job_id)), options)

    async def all(self, **options: Unpack[CallOptions]) -> list[JobStatus]:
        """The jobs of the client's key, the newest first."""
        return (await self._connection.short(call_for(JobList, "GET", "/jobs"), options)).jobs

    async def acknowledge(self, job_id: str, last: int, **options: Unpack[CallOptions]) -> JobStatus:
        """Events up to `last` have arrived; the service forgets them."""
        body = json_bytes(Acknowledgement(last=last))
        call = call_for(JobStatus, "POST", path_of("jobs", job_id, "acknowledge"), body=body)
        return await self._connection.short(call, options)

    async def cursor(self, job_id: str, event: int, **options: Unpack[CallOptions]) -> JobCursor:
        """Names what a job over `samples_from` has delivered up to `event`, for a checkpoint that has trained on it."""
        call = call_for(JobCursor, "GET", path_of("jobs", job_id, "cursor"), query={"after": event})
        return await self._connection.short(call, options)

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
        left = cursor.ranges_to_play()
        if not left:
            return None
        try:
            status = await self.status(cursor.job_id, **call_options(options))
        except RequestRejected as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        else:
            has_all_groups = status.state in ("completed", "failed") and cursor.event >= status.last_event - 1
            if has_all_groups and cursor.kept is not None and status.state == "completed":
                return None
            if status.acknowledged <= cursor.event and not has_all_groups:
                return cursor
        options["samples_from"] = left
        return JobCursor(job_id=(await self.submit(**options)).job_id, event=0, samples_from=left)

    async def delete(self, job_id: str, **options: Unpack[CallOptions]) -> None:
        """Cancels what still runs and forgets the job."""
        await self._connection.short(Call("DELETE", path_of("jobs", job_id), nothing), options)

    async def events(
        self, job_id: str, after: int = 0, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[JobEvent, None]:
        """Each group when it has ended, then the summary or the problem, each event once.

        A stream that breaks is opened again after the last event, with the client's `retries` for each break.
        """
        limits = self._connection.settings.limits(options)
        while True:
            lines = LineReader(JobEvent, "A line of the events")
            call = Call("GET", path_of("jobs", job_id, "events"), nothing, NDJSON, {"after": after})
            response = await self._connection.open(call, limits)
            try:
                async with aclosing(response), aclosing(body_chunks(response, limits)) as chunks:
                    async for chunk in chunks:
                        for event in lines.feed(chunk):
                            if event.event > after:
                                after = event.event
                                yield event
                                if event.is_last:
                                    return
            except StreamBroken:
                continue
