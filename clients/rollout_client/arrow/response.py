"""The answer of `POST /rollout` as it comes in Arrow: numbers stay where they arrived until somebody asks for lists."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pydantic import PrivateAttr, ValidationError, computed_field

from rollout_client.arrow.rows import rows_of
from rollout_client.arrow.schema import ROLLOUTS, SUMMARY, TOKENS
from rollout_client.contract import RolloutResponse, RolloutSummary, SampleResult
from rollout_client.errors import AnswerNotUnderstood, StreamBroken, not_understood

WHAT = "The Arrow answer of POST /rollout"


class ArrowResponse(RolloutSummary):
    """`RolloutResponse`, its rollouts in Arrow tables: `samples` are made when they are first asked for.

    `to_tensors` of `rollout_client.tensors` reads the tables, and makes no samples.
    """

    _rollouts: pa.Table = PrivateAttr()
    _tokens: pa.Table = PrivateAttr()

    @classmethod
    def of(cls, summary: RolloutSummary, rollouts: pa.Table, tokens: pa.Table) -> Self:
        response = cls(**dict(summary))
        response._rollouts, response._tokens = rollouts, tokens
        return response

    @property
    def rollouts(self) -> pa.Table:
        """A row a rollout, in input order; the columns of `rollout_client.arrow.schema.ROLLOUTS`."""
        return self._rollouts

    @property
    def tokens(self) -> pa.Table:
        """Row for row the numbers of `rollouts`, `rollout_client.arrow.schema.TOKENS`, where they arrived."""
        return self._tokens

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def samples(self) -> list[SampleResult]:
        """In input order, the rollouts of one sample next to each other.

        Raises `AnswerNotUnderstood` if a row is no `SampleResult`.
        """
        try:
            rows = rows_of(self._rollouts, self._rollouts.schema)
            numbers = rows_of(self._tokens, TOKENS)
            return [SampleResult.model_validate(with_numbers(*both)) for both in zip(rows, numbers, strict=True)]
        except ValidationError as error:
            raise not_understood(WHAT, error) from error
        except ValueError as error:
            raise AnswerNotUnderstood(f"{WHAT} is not what this client knows: {error}.") from error

    def to_response(self) -> RolloutResponse:
        """The same as the JSON answer would have been."""
        return RolloutResponse(**self.model_dump(exclude={"samples"}, exclude_unset=True), samples=self.samples)


def read_response(body: bytes | memoryview) -> ArrowResponse:
    """Reads the two streams of an answer; token ids and log-probabilities are not copied.

    Raises:
        StreamBroken: the body ends early.
        AnswerNotUnderstood: it is something else.
    """
    try:
        source = pa.BufferReader(body)
        rollouts = read_table(source)
        tokens = read_table(source)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise AnswerNotUnderstood(
            f"{WHAT} is no Arrow stream, or not a whole one: {error}. "
            "Check that the URL is a rollout service's and that client and service have matching versions."
        ) from error
    check(rollouts, tokens)
    try:
        summary = RolloutSummary.model_validate_json(rollouts.schema.metadata[SUMMARY])
    except ValidationError as error:
        raise not_understood(WHAT, error) from error
    return ArrowResponse.of(summary, rollouts, tokens)


def in_one_place(pieces: Sequence[bytes]) -> memoryview:
    """The pieces end to end, in memory that numpy has asked the system to map in large pages: a third of the time."""
    arrived = [np.frombuffer(piece, np.uint8) for piece in pieces]
    return memoryview(np.concatenate([np.empty(0, np.uint8), *arrived]))


def read_table(source: pa.NativeFile) -> pa.Table:
    table = pa.ipc.open_stream(source).read_all()
    # Offsets that point out of their buffers would be read all the same.
    table.validate(full=True)
    return table


def check(rollouts: pa.Table, tokens: pa.Table) -> None:
    """Raises `StreamBroken` or `AnswerNotUnderstood` unless both tables are of the contract and of each other."""
    schema = rollouts.schema
    # Columns that a newer service has beside these are read as fields that it has learnt to say.
    has_columns = all(
        schema.get_field_index(field.name) >= 0 and schema.field(field.name).type == field.type for field in ROLLOUTS
    )
    if not has_columns or tokens.schema != TOKENS or SUMMARY not in (schema.metadata or {}):
        raise AnswerNotUnderstood(
            f"{WHAT} has other columns than this client knows. Check that client and service have matching versions."
        )
    if rollouts.num_rows != tokens.num_rows:
        raise StreamBroken(f"The answer ended after the tokens of {tokens.num_rows} of {rollouts.num_rows} rollouts.")
    messages = message_counts(rollouts["message_log"])
    if None in messages or any(message_counts(tokens[name]) != messages for name in TOKENS.names):
        raise AnswerNotUnderstood(f"{WHAT} has tokens of other messages than those of its logs.")


def message_counts(lists: pa.ChunkedArray) -> list[int | None]:
    """Of each row; `None` for one that has no list."""
    counts: list[int | None] = pa.compute.list_value_length(lists).to_pylist()
    return counts


def with_numbers(row: dict[str, Any], numbers: dict[str, list[Any]]) -> dict[str, Any]:
    """`row` with those of `numbers` in each message that it has."""
    for name, of_messages in numbers.items():
        for message, values in zip(row["message_log"], of_messages, strict=True):
            if values is not None:
                message[name] = values
    return row
