"""The calls of `/jobs`: the request and the response of each. No I/O."""

from collections.abc import Iterator
from urllib.parse import quote

from rollout_client.calls.call import NDJSON, Call, call_for, call_without_result
from rollout_client.calls.json_values import json_bytes
from rollout_client.calls.rollouts import RolloutOptions, Samples, rollout_body
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobEvent, JobList, JobStatus
from rollout_client.json_lines import LineReader

JOBS = "/jobs"


def submit_call(samples: Samples, options: RolloutOptions) -> Call[JobStatus]:
    """Raises `NotJson` if `samples` or `options` hold a value that JSON does not have."""
    return call_for(JobStatus, "POST", JOBS, body=rollout_body(samples, options))


def job_list_call() -> Call[list[JobStatus]]:
    return call_for(JobList, "GET", JOBS).picking(lambda found: found.jobs)


def job_call(job_id: str) -> Call[JobStatus]:
    return call_for(JobStatus, "GET", path_of(job_id))


def cursor_call(job_id: str, event: int) -> Call[JobCursor]:
    return call_for(JobCursor, "GET", f"{path_of(job_id)}/cursor", query={"after": event})


def goes_on(cursor: JobCursor, status: JobStatus) -> bool:
    """Whether the events after the cursor are all kept, or to come, and bring groups."""
    has_ended = status.state in ("completed", "failed")
    has_nothing_more = has_ended and cursor.event >= status.last_event - 1
    return status.acknowledged <= cursor.event and not has_nothing_more


def has_nothing_left(cursor: JobCursor, status: JobStatus) -> bool:
    """Whether the job has selected all its groups, and the cursor has them."""
    return cursor.kept is not None and status.state == "completed" and cursor.event >= status.last_event - 1


def acknowledge_call(job_id: str, last: int) -> Call[JobStatus]:
    return call_for(JobStatus, "POST", f"{path_of(job_id)}/acknowledge", body=json_bytes(Acknowledgement(last=last)))


def delete_call(job_id: str) -> Call[None]:
    return call_without_result("DELETE", path_of(job_id))


def events_call(job_id: str, after: int) -> Call[bytes]:
    return Call("GET", f"{path_of(job_id)}/events", bytes, accept=NDJSON, query={"after": after})


def path_of(job_id: str) -> str:
    return f"{JOBS}/{quote(job_id, safe='')}"


class EventReader:
    """Turns the bytes of a stream of events, in chunks of any size, into events. Each event is returned once, also when
    a stream that broke is opened again."""

    def __init__(self, after: int) -> None:
        self.after = after
        """The last event that was returned."""
        self.has_ended = False
        self.begin_stream()

    def begin_stream(self) -> None:
        """Another stream begins after `after`."""
        self._lines = LineReader(JobEvent, "A line of the events")

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Raises `ResponseNotUnderstood`: a line is not of the contract."""
        for event in self._lines.feed(chunk):
            if event.event > self.after:
                self.after = event.event
                self.has_ended = event.is_last
                yield event
