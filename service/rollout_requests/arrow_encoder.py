"""Writes the Arrow answer of `POST /rollout`, which `rollout_client/calls/arrow_bodies.py` reads.

It is the two streams that `rollout_client.arrow.schema` defines.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate, chain
from struct import pack
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic_core import from_json

from rollout_client.arrow.rows import record_batch
from rollout_client.arrow.schema import ARROW, ROLLOUTS, SUMMARY, TOKENS, column_field
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, Message, PackedNumbers
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from service.rollout_requests.result_encoding import ResponseEncoder, json_of

ROWS_PER_STEP = 64
CHARACTERS_PER_STEP = 2**18
"""Rollouts that become columns in one step, and their text: one at a time costs several times as much, and more of them
would keep the event loop from other requests."""
CHARACTERS_PER_MESSAGE = 64
"""Characters of text that take as long as a message without any."""
ROWS_PER_BATCH = 1024
BYTES_PER_BATCH = 2**22
"""Size of a batch of the first stream. A column of strings has room for 2 GiB in one batch, and a response for any
number of batches: an answer is never in one array."""
NUMBERS_PER_BATCH = 2**22
"""Bytes of ids, log-probabilities and what was included: the memory that a response takes beside its rollouts while it
is being sent."""
TEXT_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
"""Level 3 takes 1.5 times as long and saves a thirtieth of the bytes."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end-of-stream marker of Arrow's streaming format."""
Item = TypeVar("Item")


_Numbers = dict[str, list[bytes | None]]
"""The numbers of one rollout: by field, the values of each message in the column's type; `None` for one without the
field. All rollouts have `TOKENS`, and some what was included."""


class ArrowResponseEncoder(ResponseEncoder):
    media_type = ARROW

    def __init__(self, echoed_bytes: int = 0) -> None:
        """Begins empty; `echoed_bytes` is about the size of what a rollout repeats of its sample."""
        self._echoed_bytes = echoed_bytes
        self._positions: list[int] = []
        """The position of each row, in the order of `add`."""
        self._rows: list[dict[str, Any]] = []
        """The latest rows, not yet columns, without their numbers."""
        self._characters = 0
        """About how much text they have."""
        self._batches: list[pa.RecordBatch] = []
        """The rows before them, as columns."""
        self._numbers: dict[int, _Numbers] = {}
        """Those of each rollout, by position."""
        self._included: dict[str, pa.Field] = {}
        """The columns of what was included, by their names."""

    def add(self, position: int, result: SampleResult) -> None:
        messages, self._numbers[position] = _without_numbers(result.message_log, self._included)
        self._positions.append(position)
        plain = {"branches": from_json(json_of(result.branches))} if result.branches else {}
        self._rows.append({**set_fields(result), "message_log": messages, **plain})
        text = sum(len(message.content) + CHARACTERS_PER_MESSAGE for message in result.message_log)
        self._characters += text + self._echoed_bytes
        if len(self._rows) == ROWS_PER_STEP or self._characters >= CHARACTERS_PER_STEP:
            self._make_columns()

    def body(self, summary: RolloutSummary) -> Iterator[memoryview]:
        self._make_columns()
        yield from _text_stream(_in_order(self._batches, self._positions), summary)
        # Each is freed when it was sent: freeing 1 GB at once takes long.
        schema = pa.schema([*TOKENS, *(self._included[name] for name in sorted(self._included))])
        yield from _number_stream((self._numbers.pop(position) for position in sorted(self._numbers)), schema)

    def _make_columns(self) -> None:
        if self._rows:
            self._batches.append(record_batch(self._rows, ROLLOUTS))
            self._rows.clear()
            self._characters = 0


def _without_numbers(
    messages: Iterable[Message], included: dict[str, pa.Field]
) -> tuple[Sequence[dict[str, Any]], _Numbers]:
    """The fields of `messages` without their numbers, and these. Adds the columns that they need to `included`."""
    fields = [set_fields(message) for message in messages]
    numbers: _Numbers = {"token_ids": _popped("token_ids", "i", fields)}
    numbers["generation_logprobs"] = _popped("generation_logprobs", "f", fields)
    for name in COLUMN_FIELDS.intersection(set().union(*fields)):
        given = next((message[name] for message in fields if message.get(name) is not None), None)
        if given is None:
            continue
        field = included.setdefault(name, column_field(name, given.dtype, given.shape[1:]))
        numbers[name] = [_popped_column(name, field, message) for message in fields]
    return fields, numbers


def _popped_column(name: str, field: pa.Field, message: dict[str, Any]) -> bytes | None:
    """Removes the column from the message. One of another form, which came with a posted log, stays there as JSON."""
    column: PackedNumbers | None = message.get(name)
    if column is None or not column_field(name, column.dtype, column.shape[1:]).equals(field, check_metadata=True):
        return None
    del message[name]
    return column.data


def _in_order(batches: Sequence[pa.RecordBatch], positions: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The rows of `batches`, which have these positions, in the order of the positions, as batches of bounded size."""

    def share_of(run: pa.RecordBatch) -> float:
        return float(max(run.num_rows / ROWS_PER_BATCH, run.nbytes / BYTES_PER_BATCH))

    for runs in _chunks(_runs_in_order(batches, positions), share_of, 1):
        [batch] = pa.Table.from_batches(runs).combine_chunks().to_batches()
        yield batch


def _runs_in_order(batches: Sequence[pa.RecordBatch], positions: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Slices of `batches` in the order of the positions; rows that stand next to each other stay together."""
    if not batches:
        return
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    order = np.argsort(positions)
    owners = np.searchsorted(starts, order, side="right") - 1
    # A run ends where the next row is not the next one of the same batch.
    is_end = (np.diff(order, append=-1) != 1) | (np.diff(owners, append=-1) != 0)
    first = 0
    for end in (np.flatnonzero(is_end) + 1).tolist():
        owner = int(owners[first])
        yield batches[owner].slice(int(order[first] - starts[owner]), end - first)
        first = end


def _popped(name: str, code: str, messages: Sequence[dict[str, Any]]) -> list[bytes | None]:
    """Removes the lists called `name` from `messages` and packs them; null lists stay there.

    Args:
        code: the type code of `array`.
    """
    return [None if message.get(name) is None else _packed(message.pop(name), code) for message in messages]


def _packed(items: Sequence[float], code: str) -> bytes:
    if isinstance(items, array) and items.typecode == code:
        return items.tobytes()
    # For a list, `pack` takes a third of numpy's time.
    return pack(f"<{len(items)}{code}", *items)


def _chunks(items: Iterable[Item], size_of: Callable[[Item], float], full: float) -> Iterator[list[Item]]:
    """Splits `items` in order; each chunk ends with the item that brings its size to `full`."""
    chunk, size = list[Item](), 0.0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if size >= full:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _numbers_column(rollouts: Sequence[_Numbers], name: str, type_: pa.ListType) -> pa.ListArray:
    """One row per rollout, one list per message, all values in one buffer."""
    lengths = [len(rollout["token_ids"]) for rollout in rollouts]
    missing: list[bytes | None] = [None]
    of_rollouts = (rollout.get(name, missing * length) for rollout, length in zip(rollouts, lengths, strict=True))
    parts = list(chain.from_iterable(of_rollouts))
    data, width = pa.py_buffer(b"".join(part or b"" for part in parts)), type_.value_type.byte_width
    values = pa.Array.from_buffers(type_.value_type, data.size // width, [None, data])
    nulls = pa.array([part is None for part in parts], pa.bool_())
    offsets = _offsets(len(part or b"") // width for part in parts)
    messages = pa.ListArray.from_arrays(offsets, values, type=type_, mask=nulls)
    return pa.ListArray.from_arrays(_offsets(lengths), messages, type=pa.list_(type_))


def _offsets(counts: Iterable[int]) -> pa.Array:
    """The offsets of lists of these lengths."""
    return pa.array(accumulate(counts, initial=0), pa.int32())


def _text_stream(rollouts: Iterable[pa.RecordBatch], summary: RolloutSummary) -> Iterator[memoryview]:
    """The first stream, batch by batch."""
    schema = ROLLOUTS.with_metadata({SUMMARY: summary.model_dump_json(exclude_unset=True)})
    written = BytesIO()
    with pa.ipc.new_stream(written, schema, options=TEXT_OPTIONS) as writer:
        for batch in rollouts:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
            yield memoryview(written.getvalue())
            written.seek(0)
            written.truncate()
    yield memoryview(written.getvalue())


def _bytes_of(rollout: _Numbers) -> int:
    return sum(len(part or b"") for parts in rollout.values() for part in parts)


def _number_stream(rollouts: Iterable[_Numbers], schema: pa.Schema) -> Iterator[memoryview]:
    """The second stream, batch by batch: a batch that was sent can leave the memory."""
    yield memoryview(schema.serialize())
    for batch in _chunks(rollouts, _bytes_of, NUMBERS_PER_BATCH):
        columns = [_numbers_column(batch, field.name, field.type.value_type) for field in schema]
        yield memoryview(pa.RecordBatch.from_arrays(columns, schema=schema).serialize())
    yield memoryview(END_OF_STREAM)
