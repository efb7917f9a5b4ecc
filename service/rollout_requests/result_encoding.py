"""Encodes the rollouts of a request beside other requests, large ones in threads: for answers, streams and jobs.

A whole answer is JSON here or Arrow (`arrow_encoder.py`): only fields that were set are serialized; explicit nulls
survive. A stream (`application/x-ndjson`), which `rollout_client/calls/ndjson.py` reads, has one line per rollout, in
the order in which they end, then exactly one line with the summary or with the problem that ended the request. Each
line is one JSON object.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel
from pydantic_core import to_json

from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, encoded_base64
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.results import logs_of
from service.problems import RequestProblem
from service.rollouts.progress import UNOBSERVED, RolloutObserver


class ResponseEncoder(Protocol):
    """Encodes each rollout as soon as it has ended, so that little work is left after the last one.

    `add` is called once per position, in any order; then `body` is called once.
    """

    media_type: str

    def add(self, position: int, result: SampleResult) -> None:
        """Encodes one rollout; `position` is its index in the response."""
        ...

    def body(self, summary: RolloutSummary) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the response, the rollouts in order of their positions."""
        ...


JSON = "application/json"
PART_BYTES = 2**20
"""Large enough that passing a part on costs nothing, small enough that the next one is made while it is being sent."""


class JsonResponseEncoder(ResponseEncoder):
    media_type = JSON

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}
        """JSON of each rollout, by position."""

    def add(self, position: int, result: SampleResult) -> None:
        self._encoded[position] = json_of(result)

    def body(self, summary: RolloutSummary) -> Iterator[bytes]:
        # Each is freed when it was sent: freeing 1 GB at once takes long.
        rollouts = (self._encoded.pop(position) for position in sorted(self._encoded))
        yield from document_in_parts(json_of(summary), b"samples", rollouts)


def pieces(data: bytes | bytearray) -> Iterator[bytes]:
    """`data` in parts of at most `PART_BYTES`: sending more at once would keep the event loop from other requests."""
    for begin in range(0, len(data), PART_BYTES):
        yield bytes(data[begin : begin + PART_BYTES])


def document_in_parts(head: bytes, name: bytes, items: Iterable[bytes]) -> Iterator[bytes]:
    """The JSON object `head` with one more field, the list of these items."""
    part = bytearray(head.removesuffix(b"}") + b',"%s":[' % name)
    for place, item in enumerate(items):
        part += b"," + item if place else item
        if len(part) >= PART_BYTES:
            yield from pieces(part)
            part.clear()
    yield bytes(part + b"]}")


def json_of(value: Any) -> bytes:
    """Encodes with orjson, in half of pydantic's time; with pydantic if an integer has more than 64 bits."""
    try:
        return orjson.dumps(value, default=_plain)
    except orjson.JSONEncodeError:
        if isinstance(value, BaseModel):
            return value.model_dump_json(exclude_unset=True, fallback=_plain, warnings=False).encode()
        return to_json(value)


def _plain(value: object) -> object:
    """A JSON form of `value`, for an encoder; raises `TypeError` if there is none."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, BaseModel):
        return set_fields(value)
    if isinstance(value, bytes):
        return encoded_base64(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


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
    messages = [*chain.from_iterable(logs_of(result))]
    text = sum(len(message.content) for message in messages) + echoed_bytes
    tokens = 0
    for message in messages:
        tokens += len(message.token_ids)
        columns = [getattr(message, name) for name in COLUMN_FIELDS & message.model_fields_set]
        text += sum(len(column.data) for column in columns if column is not None)
    return tokens + text // BYTES_PER_TOKEN
