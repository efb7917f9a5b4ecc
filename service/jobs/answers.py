"""The answer of `POST /rollout` from the events of its job: to the caller that began it, and to each that posts it
again."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager

from fastapi.responses import Response, StreamingResponse
from pydantic_core import from_json

from deployments.jobs.records import EventsPage
from rollout_client.arrow.schema import ARROW
from rollout_client.contract import RolloutSummary
from rollout_client.ndjson import StreamLine
from rollout_client.problem_contract import Problem
from service.http.streaming import response_in_parts, with_heartbeats
from service.jobs.events import is_last, lines_of, sample_in
from service.problems import TYPE_PREFIX, ProblemType, RequestProblem
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.json_encoder import JSON, PART_BYTES, pieces
from service.rollout_requests.result_encoding import NDJSON

Pages = AsyncGenerator[EventsPage, None]


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
        first = await anext(pages)
        return StreamingResponse(with_heartbeats(event_bytes(first, pages), heartbeat_s), media_type=NDJSON)
    with gathering:
        events, last = await all_events(pages)
    end = StreamLine.model_validate_json(last)
    if end.problem is not None:
        raise stored_problem(end.problem)
    if ARROW in accepted and end.summary is not None:
        return await arrow_answer(events, end.summary)
    return await json_answer(events, last)


async def event_bytes(first: EventsPage, pages: Pages) -> AsyncGenerator[bytes, None]:
    for _, event in first.events:
        yield event
    async for page in pages:
        for _, event in page.events:
            yield event


async def all_events(pages: Pages) -> tuple[list[bytes], bytes]:
    """The groups, and the last event."""
    events: list[bytes] = []
    async for page in pages:
        for number, event in page.events:
            if is_last(page, number):
                return events, event
            events.append(event)
    raise AssertionError("A job's pages end with its last event.")


async def json_answer(events: list[bytes], last: bytes) -> Response:
    parts = json_parts(events, last)
    if sum(map(len, events)) <= PART_BYTES:
        return Response(b"".join(parts), media_type=JSON)
    return await response_in_parts(parts, JSON)


def json_parts(events: list[bytes], last: bytes) -> Iterator[bytes]:
    """As `JsonResponseEncoder.body` has it: the summary's fields, then the rollouts in order of their positions."""
    samples = dict(sample_in(line) for event in events for line in lines_of(event))
    summary = last.rstrip().removeprefix(b'{"summary":')[:-1]
    part = bytearray(summary.removesuffix(b"}") + b',"samples":[')
    for place, position in enumerate(sorted(samples)):
        part += b"," if place else b""
        part += samples.pop(position)
        if len(part) >= PART_BYTES:
            yield from pieces(part)
            part.clear()
    yield bytes(part + b"]}")


async def arrow_answer(events: list[bytes], summary: RolloutSummary) -> Response:
    per_group = max((sum(1 for _ in lines_of(event)) for event in events), default=1)
    encoder = ArrowResponseEncoder(0, per_group, len(events))
    for event in events:
        await asyncio.to_thread(add_to, encoder, event)
    return await response_in_parts(encoder.body(summary), encoder.media_type)


def add_to(encoder: ArrowResponseEncoder, event: bytes) -> None:
    for line in lines_of(event):
        read = StreamLine.model_validate(from_json(line))
        if read.position is not None and read.sample is not None:
            encoder.add(read.position, read.sample)


def stored_problem(problem: Problem) -> RequestProblem:
    """The problem as a route raises it, which gives it the id of its own request."""
    type_ = ProblemType(problem.type.removeprefix(TYPE_PREFIX), problem.status, problem.title)
    return RequestProblem(type_, problem.errors)
