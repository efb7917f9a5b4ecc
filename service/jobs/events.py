"""Reads the events of a job from the store, as they come, and writes them for the caller.

An event of the store is what `service/jobs/journal.py` says. `job_event_lines` streams them as `JobEvent` of
`rollout_client/contract/jobs.py`. `answer_of` makes the response to a `POST /rollout` of them, to the caller that began
the job and to each that posts it again; its reader is `rollout_client/calls/ndjson.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fastapi.responses import Response, StreamingResponse
from pydantic_core import from_json

from deployments.failures import JobStoreLost, StoreLost
from deployments.jobs.records import EventsPage
from deployments.storage.storage import StoreReplaced, attempts
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.ndjson import StreamLine
from rollout_client.contract.base import Problem
from service.http.streaming import EMPTY_LINE, response_in_parts, with_heartbeats
from service.problems import TYPE_PREFIX, ProblemType, RequestProblem
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.result_encoding import JSON, NDJSON, document_in_parts

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

PAGE_BYTES = 2**21
WAIT_S = 10.0
"""Longest wait of one call of the store for an event."""
STORE_BACK_WITHIN_S = 30.0
"""Time for which a lost store is asked again."""
SAMPLE = b',"sample":'


Events = AsyncGenerator[tuple[int, bytes, bool], None]
"""The number of each event, its bytes, and whether it is the last one: the summary or the problem."""


async def events_after(store: "JobStore", job_id: str, namespace: str, after: int, follow: bool = True) -> Events:
    """The events after `after`, to the last one that comes. What refuses them is raised before the first one is read.

    Args:
        follow: waits for those that are not there yet.

    Raises:
        StoreFailure: the job is not known, or its events are not kept.
        StoreLost: the store was lost and did not come back, or its database fails.
    """
    # The caller was sent nothing yet: it gets the refusal of a database that fails, and does not wait for an event.
    first: EventsPage = await attempts((JobStoreLost, StoreReplaced), STORE_BACK_WITHIN_S)(
        store.events, job_id, namespace, after, PAGE_BYTES, 0.0
    )
    return _events_from(first, store, job_id, namespace, after, follow)


async def _events_from(
    page: EventsPage, store: "JobStore", job_id: str, namespace: str, after: int, follow: bool
) -> Events:
    while True:
        for number, event in page.events:
            yield number, event, page.record.has_ended and number == page.record.last_event
            after = number
        if after >= page.record.last_event and (page.record.has_ended or not follow):
            return
        page = await attempts(StoreLost, STORE_BACK_WITHIN_S)(
            store.events, job_id, namespace, after, PAGE_BYTES, WAIT_S
        )


def _lines_of(event: bytes) -> Iterator[bytes]:
    """The lines of the rollouts of a group, without their ends. No newline is within one: JSON escapes it."""
    return (line for line in event.split(EMPTY_LINE) if line)


def _sample_in(line: bytes) -> tuple[int, bytes]:
    """The position of a rollout, and its JSON."""
    head, _, rest = line.partition(SAMPLE)
    return int(head.partition(b":")[2]), rest[:-1]


async def job_event_lines(events: Events) -> AsyncGenerator[bytes, None]:
    """A stream of `JobEvent`, one JSON object a line."""
    async for number, event, is_end in events:
        if is_end:
            yield b'{"event":%d,' % number + event[1:].rstrip(EMPTY_LINE) + EMPTY_LINE
        else:
            yield b'{"event":%d,"samples":[' % number + b",".join(_lines_of(event)) + b"]}" + EMPTY_LINE


async def answer_of(
    events: Events, accepted: str, heartbeat_s: float | None, gathering: AbstractContextManager[None]
) -> Response:
    """Raises `RequestProblem` with which the job has ended, unless the answer is a stream, which says it as its last
    line.

    Args:
        accepted: the caller's `Accept`.
        gathering: what bounds the callers that hold a whole answer; not entered for a stream.
    """
    if NDJSON in accepted:
        events_bytes = (event async for _, event, _ in events)
        return StreamingResponse(with_heartbeats(events_bytes, heartbeat_s), media_type=NDJSON)
    with gathering:
        *groups, last = [event async for _, event, _ in events]
    end = StreamLine.model_validate_json(last)
    if end.problem is not None:
        raise _stored_problem(end.problem)
    if ARROW in accepted and end.summary is not None:
        encoder = await asyncio.to_thread(_arrow_of, groups)
        return await response_in_parts(encoder.body(end.summary), encoder.media_type)
    return await response_in_parts(_json_parts(groups, last), JSON)


def _json_parts(groups: list[bytes], last: bytes) -> Iterator[bytes]:
    """As `JsonResponseEncoder.body` has it: the summary's fields, then the rollouts in order of their positions."""
    samples = dict(_sample_in(line) for event in groups for line in _lines_of(event))
    summary = last.rstrip().removeprefix(b'{"summary":')[:-1]
    yield from document_in_parts(summary, b"samples", (samples.pop(position) for position in sorted(samples)))


def _arrow_of(groups: list[bytes]) -> ArrowResponseEncoder:
    encoder = ArrowResponseEncoder()
    for line in (line for event in groups for line in _lines_of(event)):
        read = StreamLine.model_validate(from_json(line))
        if read.position is not None and read.sample is not None:
            encoder.add(read.position, read.sample)
    return encoder


def _stored_problem(problem: Problem) -> RequestProblem:
    """The problem as a route raises it, which gives it the id of its own request."""
    type_ = ProblemType(problem.type.removeprefix(TYPE_PREFIX), problem.status, problem.title)
    return RequestProblem(type_, problem.errors)
