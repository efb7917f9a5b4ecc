"""Reads the events of a job from the store, as they come, and writes them for the caller.

An event of the store is what `service/jobs/entries.py` says. The readers of what goes out are `JobEvent` of
`rollout_client/jobs_contract.py` and, for the answer of `POST /rollout`, `rollout_client/ndjson.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from deployments.failures import StoreLost
from deployments.jobs.failures import run_suspended
from deployments.jobs.records import EventsPage
from deployments.jobs.store_client import JobStoreClient
from deployments.storage.storage import StorageFailed
from service.http.streaming import EMPTY_LINE

PAGE_BYTES = 2**21
WAIT_S = 10.0
"""How long one call of the store waits for an event."""
STORE_BACK_WITHIN_S = 30.0
"""A store that was lost is asked again for so long."""
RETRY_S = 0.2
SAMPLE = b',"sample":'


async def pages_of(
    store: JobStoreClient, job_id: str, namespace: str, after: int, follow: bool = True
) -> AsyncGenerator[EventsPage, None]:
    """Pages of the events after `after`, to the last one that comes; a page may have none.

    Args:
        follow: waits for those that are not there yet.

    Raises:
        JobFailure: the job is not known, its events are not kept, or it is suspended and there are none.
        StoreLost: the store was lost and did not come back, or its database fails before the first page.
    """
    # The first page does not wait: an answer begins at once.
    wait_s = 0.0
    while True:
        page = await page_of(store, job_id, namespace, after, wait_s)
        is_suspended = follow and page.record.state == "suspended"
        if is_suspended and wait_s == 0 and not page.events:
            raise run_suspended(job_id)
        yield page
        wait_s = WAIT_S
        after = page.events[-1][0] if page.events else after
        is_at_end = after >= page.record.last_event
        if is_at_end and (page.record.has_ended or is_suspended or not follow):
            return


async def page_of(store: JobStoreClient, job_id: str, namespace: str, after: int, wait_s: float) -> EventsPage:
    """Args: `wait_s` is 0 for the first page, which somebody waits for who was sent nothing yet."""
    deadline = asyncio.get_running_loop().time() + STORE_BACK_WITHIN_S
    while True:
        try:
            return await store.events(job_id, namespace, after, PAGE_BYTES, wait_s)
        except StoreLost as lost:
            # A store that restarts is there again in seconds; one that says that its database fails has waited for it.
            says_so_at_once = wait_s == 0 and isinstance(lost, StorageFailed)
            if says_so_at_once or asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(RETRY_S)


def is_last(page: EventsPage, number: int) -> bool:
    """Whether the event is the summary or the problem."""
    return page.record.has_ended and number == page.record.last_event


def lines_of(event: bytes) -> Iterator[bytes]:
    """The lines of the rollouts of a group, without their ends. No newline is within one: JSON escapes it."""
    return (line for line in event.split(EMPTY_LINE) if line)


def sample_in(line: bytes) -> tuple[int, bytes]:
    """The position of a rollout, and its JSON."""
    head, _, rest = line.partition(SAMPLE)
    return int(head.partition(b":")[2]), rest[:-1]


def event_line(number: int, event: bytes, is_end: bool) -> bytes:
    """The JSON of a `JobEvent`, without the end of its line."""
    if is_end:
        return b'{"event":%d,' % number + event[1:].rstrip(EMPTY_LINE)
    return b'{"event":%d,"samples":[' % number + b",".join(lines_of(event)) + b"]}"


async def job_event_lines(
    first: EventsPage, pages: AsyncGenerator[EventsPage, None], accepts_sse: bool
) -> AsyncGenerator[bytes, None]:
    """A stream of job events: one JSON object a line, or server-sent events with their numbers as ids.

    Args:
        first: the page before `pages`.
    """
    page: EventsPage | None = first
    while page is not None:
        for number, event in page.events:
            line = event_line(number, event, is_last(page, number))
            yield b"id: %d\ndata: %s\n\n" % (number, line) if accepts_sse else line + EMPTY_LINE
        page = await anext(pages, None)
