"""Encodes the results of a request beside other requests, large ones in threads, and the lines of a stream.

A stream (`application/x-ndjson`), which `rollout_client/calls/ndjson.py` reads, has one line per rollout, in the order
in which they end, then exactly one line with the summary or with the problem that ended the request. Each line is one
JSON object.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from rollout_client.contract.problems import FieldProblem, Problem
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from service.problems import SAMPLE_FAILED, RequestProblem
from service.rollout_requests.json_encoder import json_of
from service.rollout_requests.rollout_service import RunningRollout, SampleFailed
from service.rollouts.progress import UNOBSERVED, RolloutObserver

NDJSON = "application/x-ndjson"


def sample_line(position: int, result: SampleResult) -> bytes:
    """One rollout with its index in the response."""
    return b'{"position":%d,"sample":%s}\n' % (position, json_of(result))


def summary_line(summary: RolloutSummary) -> bytes:
    return b'{"summary":%s}\n' % json_of(summary)


def problem_line(problem: Problem) -> bytes:
    return b'{"problem":%s}\n' % json_of(problem)


MOST_TOKENS_INLINE = 8192
"""Encoding this many takes half a millisecond, several times the cost of handing them to a thread."""
BYTES_PER_TOKEN = 16
"""Bytes of text that take as long as a token with its log-probability."""
MOST_ROLLOUTS_INLINE = 512
"""Of a summary: their metrics take some milliseconds."""
Encoded = TypeVar("Encoded")


def is_small(size: int) -> bool:
    """Args: `size` is that of rollouts by `size_of`."""
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


async def summary_of(running: RunningRollout, count: int) -> RolloutSummary:
    """The summary of `count` rollouts; that of many is computed in a thread."""
    if count > MOST_ROLLOUTS_INLINE:
        return await asyncio.to_thread(running.final_summary)
    return running.summary


def size_of(result: SampleResult, echoed_bytes: int) -> int:
    """About how large a rollout is, in tokens."""
    text = sum(len(message.content) for message in result.message_log) + echoed_bytes
    return sum(len(message.token_ids) for message in result.message_log) + text // BYTES_PER_TOKEN


def sample_failed(failed: SampleFailed) -> RequestProblem:
    field = f"samples[{failed.sample_position}]"
    return RequestProblem(SAMPLE_FAILED, [FieldProblem(field=field, message=str(failed), value=failed.kind)])
