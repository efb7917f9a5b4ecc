"""Reads the Arrow answer of `POST /rollout`.

Token ids and log-probabilities are not copied out of the body; Python objects are made when `samples` is first read.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PrivateAttr, ValidationError, computed_field

from rollout_client.arrow.rows import rows_of
from rollout_client.arrow.schema import ROLLOUTS, SUMMARY, TOKENS, column_field, row_of
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, PackedNumbers
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.errors import ResponseNotUnderstood, StreamBroken, not_understood
from rollout_client.responses import DataOut, PlayedRollouts

WHAT = "The Arrow answer of POST /rollout"


class ArrowResponse(DataOut, RolloutSummary):
    """A `RolloutResponse` whose rollouts are Arrow tables; `samples` is made from them when it is first read.

    `rollout_client.tensors.to_tensors` reads the tables and does not make `samples`.
    """

    _rollouts: pa.Table = PrivateAttr()
    _tokens: pa.Table = PrivateAttr()

    @classmethod
    def of(cls, summary: RolloutSummary, rollouts: pa.Table, tokens: pa.Table) -> Self:
        response = cls(**set_fields(summary))
        response._rollouts, response._tokens = rollouts, tokens
        return response

    @property
    def rollouts(self) -> pa.Table:
        """One row per rollout, in input order; its columns are `rollout_client.arrow.schema.ROLLOUTS`."""
        return self._rollouts

    @property
    def tokens(self) -> pa.Table:
        """The numbers of each row of `rollouts`, in the memory of the body: `rollout_client.arrow.schema.TOKENS`."""
        return self._tokens

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def samples(self) -> list[SampleResult]:
        """In input order; the rollouts of one sample are adjacent.

        Raises:
            ResponseNotUnderstood: a row is not a `SampleResult`.
        """
        try:
            rows = rows_of(self._rollouts, self._rollouts.schema)
            numbers = rows_of(self._tokens, TOKENS)
            for field in included_fields(self._tokens.schema):
                for row, columns in zip(numbers, packed_numbers(self._tokens[field.name], field), strict=True):
                    row[field.name] = columns
            return [SampleResult.model_validate(with_numbers(*both)) for both in zip(rows, numbers, strict=True)]
        except ValidationError as error:
            raise not_understood(WHAT, error) from error
        except ValueError as error:
            raise ResponseNotUnderstood(f"{WHAT} is not what this client knows: {error}.") from error

    def to_response(self) -> PlayedRollouts:
        """The same response as the JSON answer gives."""
        return PlayedRollouts(**self.model_dump(exclude={"samples"}, exclude_unset=True), samples=self.samples)


def read_response(body: bytes | memoryview) -> ArrowResponse:
    """Reads the two streams of an answer. The tables refer to the memory of `body`.

    Raises:
        StreamBroken: the tokens end before the rollouts do.
        ResponseNotUnderstood: `body` is not a complete Arrow answer of this contract.
    """
    try:
        source = pa.BufferReader(body)
        rollouts = read_table(source)
        tokens = read_table(source)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ResponseNotUnderstood(
            f"{WHAT} is not an Arrow stream, or not a whole one: {error}. "
            "Check that the URL is a rollout service's and that client and service have matching versions."
        ) from error
    check_tables(rollouts, tokens)
    try:
        summary = RolloutSummary.model_validate_json(rollouts.schema.metadata[SUMMARY])
    except ValidationError as error:
        raise not_understood(WHAT, error) from error
    return ArrowResponse.of(summary, rollouts, tokens)


def joined_body(parts: Sequence[bytes]) -> memoryview:
    """The parts of a body, concatenated. numpy asks the system for large pages, which takes a third of the time."""
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    return memoryview(np.concatenate([np.empty(0, np.uint8), *arrays]))


def read_table(source: pa.NativeFile) -> pa.Table:
    table = pa.ipc.open_stream(source).read_all()
    # Without a full validation Arrow would follow offsets that point outside their buffers.
    table.validate(full=True)
    return table


def check_tables(rollouts: pa.Table, tokens: pa.Table) -> None:
    """Raises `StreamBroken` or `ResponseNotUnderstood` unless both tables have the contract's columns and match."""
    schema = rollouts.schema
    # Further columns of a newer service are allowed.
    has_columns = all(
        schema.get_field_index(field.name) >= 0 and schema.field(field.name).type == field.type for field in ROLLOUTS
    )
    included = included_fields(tokens.schema)
    has_tokens = tokens.schema == pa.schema([*TOKENS, *included]) and all(map(is_column_field, included))
    has_tokens &= len(set(tokens.schema.names)) == len(tokens.schema)
    if not has_columns or not has_tokens or SUMMARY not in (schema.metadata or {}):
        raise ResponseNotUnderstood(
            f"{WHAT} has other columns than this client knows. Check that client and service have matching versions."
        )
    if rollouts.num_rows != tokens.num_rows:
        raise StreamBroken(f"The answer ended after the tokens of {tokens.num_rows} of {rollouts.num_rows} rollouts.")
    messages = message_counts(rollouts["message_log"])
    if None in messages or any(message_counts(tokens[name]) != messages for name in tokens.schema.names):
        raise ResponseNotUnderstood(f"{WHAT} has tokens of other messages than those of its logs.")


def included_fields(tokens: pa.Schema) -> list[pa.Field]:
    """The columns of the second stream that hold what `include` has asked for."""
    return [field for field in tokens if field.name in COLUMN_FIELDS]


def is_column_field(field: pa.Field) -> bool:
    """Whether the numbers are of the type and the shape that the metadata say."""
    try:
        return bool(column_field(field.name, *row_of(field)).type == field.type)
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def packed_numbers(column: pa.ChunkedArray, field: pa.Field) -> Iterator[list[PackedNumbers | None]]:
    """For each row the numbers of its messages."""
    dtype, row = row_of(field)
    for messages in column:
        numbers = [message.values for message in messages.values]
        yield [
            None
            if values is None
            else PackedNumbers(dtype=dtype, shape=[len(values), *row], data=bytes(value_bytes(values)))
            for values in numbers
        ]


def value_bytes(values: pa.Array) -> memoryview:
    """The memory of numbers, or of binary values of fixed size."""
    width, data = values.type.byte_width, values.buffers()[1]
    return memoryview(data or b"")[values.offset * width : (values.offset + len(values)) * width]


def message_counts(lists: pa.ChunkedArray) -> list[int | None]:
    """The length of each row's list; `None` where it is null."""
    return cast(list[int | None], pc.list_value_length(lists).to_pylist())


def with_numbers(row: dict[str, Any], numbers: dict[str, list[Any]]) -> dict[str, Any]:
    """`row`, whose messages get their numbers; it is changed in place."""
    for name, lists in numbers.items():
        for message, values in zip(row["message_log"], lists, strict=True):
            if values is not None:
                message[name] = values
    return row
