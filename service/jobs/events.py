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
from deployments.storage.storage import attempts
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.ndjson import StreamLine
from rollout_client.contract.problems import Problem
from rollout_client.contract.rollouts import RolloutSummary
from service.http.streaming import EMPTY_LINE, response_in_parts, with_heartbeats
from service.problems import TYPE_PREFIX, ProblemType, RequestProblem
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.result_encoding import JSON, NDJSON, PART_BYTES, document_in_parts

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

PAGE_BYTES = 2**21
WAIT_S = 10.0
"""Longest wait of one call of the store for an event."""
STORE_BACK_WITHIN_S = 30.0
"""Time for which a lost store is asked again."""
SAMPLE = b',"sample":'


async def pages_of(
    store: "JobStore", job_id: str, namespace: str, after: int, follow: bool = True
) -> AsyncGenerator[EventsPage, None]:
    """Pages of the events after `after`, to the last one that comes; a page may have none.

    Args:
        follow: waits for those that are not there yet.

    Raises:
        JobFailure: the job is not known, or its events are not kept.
        StoreLost: the store was lost and did not come back, or its database fails before the first page.
    """
    # The first page does not wait: an answer begins at once.
    wait_s = 0.0
    while True:
        # The caller of the first page was sent nothing yet: it gets the refusal of a database that fails.
        lost = StoreLost if wait_s else JobStoreLost
        page: EventsPage = await attempts(lost, STORE_BACK_WITHIN_S)(
            store.events, job_id, namespace, after, PAGE_BYTES, wait_s
        )
        yield page
        wait_s = WAIT_S
        after = page.events[-1][0] if page.events else after
        is_at_end = after >= page.record.last_event
        if is_at_end and (page.record.has_ended or not follow):
            return


Pages = AsyncGenerator[EventsPage, None]


async def _events_in(pages: Pages, first: EventsPage | None = None) -> AsyncGenerator[tuple[int, bytes, bool], None]:
    """The number of each event, its bytes, and whether it is the last one: the summary or the problem.

    Args:
        first: the page before `pages`, if it was read already.
    """
    page = first or await anext(pages, None)
    while page is not None:
        for number, event in page.events:
            yield number, event, page.record.has_ended and number == page.record.last_event
        page = await anext(pages, None)


def _lines_of(event: bytes) -> Iterator[bytes]:
    """The lines of the rollouts of a group, without their ends. No newline is within one: JSON escapes it."""
    return (line for line in event.split(EMPTY_LINE) if line)


def _sample_in(line: bytes) -> tuple[int, bytes]:
    """The position of a rollout, and its JSON."""
    head, _, rest = line.partition(SAMPLE)
    return int(head.partition(b":")[2]), rest[:-1]


def _event_line(number: int, event: bytes, is_end: bool) -> bytes:
    """The JSON of a `JobEvent`, without the end of its line."""
    if is_end:
        return b'{"event":%d,' % number + event[1:].rstrip(EMPTY_LINE)
    return b'{"event":%d,"samples":[' % number + b",".join(_lines_of(event)) + b"]}"


async def job_event_lines(first: EventsPage, pages: Pages) -> AsyncGenerator[bytes, None]:
    """A stream of job events, one JSON object a line.

    Args:
        first: the page before `pages`.
    """
    async for number, event, is_last in _events_in(pages, first):
        yield _event_line(number, event, is_last) + EMPTY_LINE


async def answer_of(
    pages: Pages, accepted: str, heartbeat_s: float | None, gathering: AbstractContextManager[None]
) -> Response:
    """Raises `RequestProblem` with which the job has ended, unless the answer is a stream, which says it as its last
    line.

    Args:
        accepted: the caller's `Accept`.
        gathering: what bounds the callers that hold a whole answer; not entered for a stream.
    """
    if NDJSON in accepted:
        # Before the status is sent: a job that is not known is a problem document.
        events_bytes = (event async for _, event, _ in _events_in(pages, await anext(pages)))
        return StreamingResponse(with_heartbeats(events_bytes, heartbeat_s), media_type=NDJSON)
    with gathering:
        *events, last = [event async for _, event, _ in _events_in(pages)]
    end = StreamLine.model_validate_json(last)
    if end.problem is not None:
        raise _stored_problem(end.problem)
    if ARROW in accepted and end.summary is not None:
        return await _arrow_answer(events, end.summary)
    return await _json_answer(events, last)


async def _json_answer(events: list[bytes], last: bytes) -> Response:
    parts = _json_parts(events, last)
    if sum(map(len, events)) <= PART_BYTES:
        return Response(b"".join(parts), media_type=JSON)
    return await response_in_parts(parts, JSON)


def _json_parts(events: list[bytes], last: bytes) -> Iterator[bytes]:
    """As `JsonResponseEncoder.body` has it: the summary's fields, then the rollouts in order of their positions."""
    samples = dict(_sample_in(line) for event in events for line in _lines_of(event))
    summary = last.rstrip().removeprefix(b'{"summary":')[:-1]
    yield from document_in_parts(summary, b"samples", (samples.pop(position) for position in sorted(samples)))


async def _arrow_answer(events: list[bytes], summary: RolloutSummary) -> Response:
    encoder = ArrowResponseEncoder()
    for event in events:
        await asyncio.to_thread(_add_to, encoder, event)
    return await response_in_parts(encoder.body(summary), encoder.media_type)


def _add_to(encoder: ArrowResponseEncoder, event: bytes) -> None:
    for line in _lines_of(event):
        read = StreamLine.model_validate(from_json(line))
        if read.position is not None and read.sample is not None:
            encoder.add(read.position, read.sample)


def _stored_problem(problem: Problem) -> RequestProblem:
    """The problem as a route raises it, which gives it the id of its own request."""
    type_ = ProblemType(problem.type.removeprefix(TYPE_PREFIX), problem.status, problem.title)
    return RequestProblem(type_, problem.errors)
