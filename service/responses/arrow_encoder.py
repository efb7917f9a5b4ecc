"""The answer of `POST /rollout` as Arrow, two streams as `rollout_client.arrow.schema` has them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import pack
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_client.arrow.rows import record_batch
from rollout_client.arrow.schema import ARROW, LOGPROBS, ROLLOUTS, SUMMARY, TOKEN_IDS, TOKENS
from rollout_client.contract import RolloutSummary, SampleResult
from rollout_client.set_fields import set_fields
from service.responses.encoder import ResponseEncoder

ROWS_A_TIME = 64
"""So many rollouts become columns together: one by one would cost several times as much, and more of them would keep
other requests waiting."""
TOKENS_A_BATCH = 2**19
"""4 MiB of ids and log-probabilities: what is in memory beside the rollouts themselves, for each answer being sent."""
TEXT = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
"""Level 3 takes half as long again, for a thirtieth less."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""As the streaming format has it."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """`token_ids` or `generation_logprobs` of the messages of one rollout, their bytes end to end."""

    counts: Sequence[int | None]
    """One a message; `None` for a message that has none."""
    data: bytes


class ArrowResponseEncoder(ResponseEncoder):
    """Turns rollouts into columns as they end, so that after the last token little is left to do."""

    media_type = ARROW

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._waiting: list[dict[str, Any]] = []
        """Rows without their numbers, the last to have ended."""
        self._columns: list[pa.RecordBatch] = []
        """Those that ended before."""
        self._numbers: dict[int, tuple[Numbers, Numbers]] = {}
        """`token_ids` and `generation_logprobs` by position."""

    def add(self, position: int, result: SampleResult) -> None:
        messages = [set_fields(message) for message in result.message_log]
        self._positions.append(position)
        self._numbers[position] = (taken("token_ids", "i", messages), taken("generation_logprobs", "f", messages))
        self._waiting.append({**set_fields(result), "message_log": messages})
        if len(self._waiting) == ROWS_A_TIME:
            self._make_columns()

    def body(self, summary: RolloutSummary) -> Iterator[memoryview]:
        """The bytes of the answer, piece by piece; once, when every position was added."""
        self._make_columns()
        rollouts = pa.Table.from_batches(self._columns, ROLLOUTS)
        yield text_stream(rollouts.take(np.argsort(self._positions)), summary)
        yield from number_stream([self._numbers[position] for position in sorted(self._numbers)])

    def _make_columns(self) -> None:
        self._columns.append(record_batch(self._waiting, ROLLOUTS))
        self._waiting.clear()


def taken(name: str, code: str, messages: Sequence[dict[str, Any]]) -> Numbers:
    """Takes the lists called `name` out of `messages`."""
    return numbers([None if message.get(name) is None else message.pop(name) for message in messages], code)


def numbers(lists: Sequence[Sequence[float] | None], code: str) -> Numbers:
    """`code` is what `array` calls the type."""
    return Numbers(
        [None if items is None else len(items) for items in lists],
        b"".join(packed(items, code) for items in lists if items is not None),
    )


def packed(items: Sequence[float], code: str) -> bytes:
    if isinstance(items, array) and items.typecode == code:
        return items.tobytes()
    # A third of the time that numpy takes for a list.
    return pack(f"<{len(items)}{code}", *items)


def batches(rollouts: Sequence[tuple[Numbers, Numbers]]) -> Iterator[Sequence[tuple[Numbers, Numbers]]]:
    """Neighbours together, `TOKENS_A_BATCH` or a few more at a time."""
    first = tokens = 0
    for end, (token_ids, _) in enumerate(rollouts, 1):
        tokens += len(token_ids.data) // TOKEN_IDS.value_type.byte_width
        if tokens >= TOKENS_A_BATCH or end == len(rollouts):
            yield rollouts[first:end]
            first, tokens = end, 0


def token_batch(rollouts: Sequence[tuple[Numbers, Numbers]]) -> pa.RecordBatch:
    token_ids, logprobs = zip(*rollouts, strict=True)
    columns = [numbers_column(token_ids, TOKEN_IDS), numbers_column(logprobs, LOGPROBS)]
    return pa.RecordBatch.from_arrays(columns, schema=TOKENS)


def numbers_column(parts: Sequence[Numbers], type_: pa.ListType) -> pa.ListArray:
    """One row a rollout, one list a message, the values all in one buffer."""
    counts = [count for part in parts for count in part.counts]
    data = pa.py_buffer(b"".join(part.data for part in parts))
    values = pa.Array.from_buffers(type_.value_type, data.size // type_.value_type.byte_width, [None, data])
    nulls = pa.array([count is None for count in counts], pa.bool_())
    messages = pa.ListArray.from_arrays(ends(count or 0 for count in counts), values, type=type_, mask=nulls)
    return pa.ListArray.from_arrays(ends(len(part.counts) for part in parts), messages, type=pa.list_(type_))


def ends(counts: Iterable[int]) -> pa.Array:
    return pa.array(accumulate(counts, initial=0), pa.int32())


def text_stream(rollouts: pa.Table, summary: RolloutSummary) -> memoryview:
    """In one piece: it holds no numbers, and what it holds is compressed."""
    schema = ROLLOUTS.with_metadata({SUMMARY: summary.model_dump_json(exclude_unset=True)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=TEXT) as writer:
        writer.write_table(rollouts.replace_schema_metadata(schema.metadata))
    return memoryview(sink.getvalue())


def number_stream(rollouts: Sequence[tuple[Numbers, Numbers]]) -> Iterator[memoryview]:
    """A batch at a time: what was sent need not stay in memory."""
    yield memoryview(TOKENS.serialize())
    for batch in batches(rollouts):
        yield memoryview(token_batch(batch).serialize())
    yield memoryview(END_OF_STREAM)
