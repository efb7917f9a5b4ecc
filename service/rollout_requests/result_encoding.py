"""Encodes the rollouts of a request beside other requests, large ones in threads: for answers, streams and jobs.

A stream (`application/x-ndjson`), which `rollout_client/calls/ndjson.py` reads, has one line per rollout, in the order
in which they end, then exactly one line with the summary or with the problem that ended the request. Each line is one
JSON object.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import TypeVar

from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from service.problems import SAMPLE_FAILED, RequestProblem
from service.rollout_requests.json_encoder import json_of
from service.rollout_requests.rollout_service import RunningRollout, SampleFailed
from service.rollouts.episode_records import Echo
from service.rollouts.progress import UNOBSERVED, RolloutObserver

NDJSON = "application/x-ndjson"


def sample_line(position: int, result: SampleResult) -> bytes:
    """The line of one rollout, with its index in the response."""
    return b'{"position":%d,"sample":%s}\n' % (position, json_of(result))


def summary_line(summary: RolloutSummary) -> bytes:
    return b'{"summary":%s}\n' % json_of(summary)


def problem_line(problem: RequestProblem, request_id: str) -> bytes:
    return b'{"problem":%s}\n' % json_of(problem.problem.model_copy(update={"request_id": request_id}))


MOST_TOKENS_INLINE = 8192
"""Encoding this many takes half a millisecond, several times the cost of handing them to a thread."""
BYTES_PER_TOKEN = 16
"""Bytes of text that take as long to encode as a token with its log-probability."""
MOST_ROLLOUTS_INLINE = 512
"""Computing the metrics of so many takes some milliseconds."""
Encoded = TypeVar("Encoded")


def is_small(size: int) -> bool:
    """Whether rollouts of this `size_of` are encoded at once."""
    return size <= MOST_TOKENS_INLINE


async def encode_beside_others(
    size: int, encode: Callable[[], Encoded], observer: RolloutObserver = UNOBSERVED
) -> Encoded:
    """Encodes one rollout; a large one in a thread, so that the event loop serves other requests meanwhile."""
    inline = is_small(size)
    if inline:
        await asyncio.sleep(0)
    began = monotonic()
    encoded = encode() if inline else await asyncio.to_thread(encode)
    observer.took("encode", monotonic() - began)
    return encoded


def size_of(result: SampleResult, echoed_bytes: int) -> int:
    """About how large a rollout is, in tokens."""
    text = sum(len(message.content) for message in result.message_log) + echoed_bytes
    return sum(len(message.token_ids) for message in result.message_log) + text // BYTES_PER_TOKEN


class EncodedRollouts:
    """The rollouts of a running request, each encoded when it ends."""

    def __init__(self, running: RunningRollout, echoed_bytes: int) -> None:
        """Plays nothing yet. `echoed_bytes` is about the size of what each rollout repeats of its sample."""
        self._running = running
        self._echoed_bytes = echoed_bytes
        self._count = 0
        self.size = 0
        """The sizes of the rollouts so far."""

    async def each(
        self, encode: Callable[[int, SampleResult, Echo | None], Encoded], skipped: Container[int] = ()
    ) -> AsyncGenerator[tuple[int, Encoded], None]:
        """Yields each rollout, encoded, with its position; those at the `skipped` positions count in the summary alone.

        Raises:
            RequestProblem: a sample failed, and the request has `on_error: fail`.
        """
        try:
            async with aclosing(self._running) as ended:
                async for position, result, echo in ended:
                    self._count += 1
                    if position in skipped:
                        continue
                    size = size_of(result, self._echoed_bytes)
                    self.size += size
                    work = partial(encode, position, result, echo)
                    yield position, await encode_beside_others(size, work, self._running.observer)
        except SampleFailed as failed:
            field = f"samples[{failed.sample_position}]"
            problem = FieldProblem(field=field, message=str(failed), value=failed.kind)
            raise RequestProblem(SAMPLE_FAILED, [problem]) from failed

    def lines(self, skipped: Container[int] = ()) -> AsyncGenerator[tuple[int, bytes], None]:
        """`each` as the lines of a stream."""
        return self.each(lambda position, result, _: sample_line(position, result), skipped)

    async def summary(self) -> RolloutSummary:
        """The summary after the last rollout; that of many is computed in a thread."""
        if self._count > MOST_ROLLOUTS_INLINE:
            return await asyncio.to_thread(self._running.final_summary)
        return self._running.summary
