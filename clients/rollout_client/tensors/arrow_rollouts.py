"""`arrow_rollouts`: the rollouts of an Arrow answer, read as numpy arrays over Arrow's own buffers. Needs `arrow`."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic_core import from_json

from rollout_client.arrow.rows import values_of
from rollout_client.arrow.schema import FURTHER_FIELDS, ROLLOUTS, SPAN, row_of
from rollout_client.calls.arrow_bodies import ArrowResponse, included_fields, value_bytes
from rollout_client.contract.messages import may_be_trained
from rollout_client.results import FINAL_STATUSES
from rollout_client.tensors.included import IncludedRows
from rollout_client.tensors.rollouts import GroupOf, Integers, Rollouts, TokenColumns, idx_of

REWARDS = ROLLOUTS.field("rewards")
UNTRAINED = '"constrained":|"sampled_with":'
"""In the JSON of a generated message that may not be trained; a regular expression."""


def arrow_rollouts(response: ArrowResponse, group_of: GroupOf) -> Rollouts:
    table = response.rollouts
    rewards, statuses = (table[name].to_pylist() for name in ("total_reward", "status"))
    further = [from_json(text or "{}") for text in table[FURTHER_FIELDS.name].to_pylist()]
    is_by_idx = group_of is idx_of
    return Rollouts(
        final_rewards=[
            reward if status in FINAL_STATUSES else None for reward, status in zip(rewards, statuses, strict=True)
        ],
        named_rewards=[named for chunk in table["rewards"].chunks for named in values_of(chunk, REWARDS)],
        turns_played=pc.struct_field(table["metrics"], "turn_count").to_pylist(),
        groups=table["idx"].to_pylist() if is_by_idx else [group_of(sample) for sample in response.samples],
        rollout_ids=[fields.get("rollout_id") for fields in further],
        columns=lambda positions: _columns_at(response, positions),
    )


def _columns_at(response: ArrowResponse, positions: Sequence[int]) -> TokenColumns:
    tokens, logs = response.tokens, response.rollouts["message_log"]
    included = included_fields(tokens.schema)
    # Without the text: selecting rollouts joins chunks, and one array of strings has no room for more than 2 GiB.
    columns = {
        "token_ids": tokens["token_ids"],
        "generation_logprobs": tokens["generation_logprobs"],
        "spans": _message_column(logs, pa.list_(SPAN), lambda messages: messages.field("weight_versions")),
        "clipped": _message_column(logs, pa.bool_(), _is_clipped),
        "rewards": _message_column(logs, pa.float64(), lambda messages: messages.field("reward")),
        "trainable": _message_column(logs, pa.bool_(), _is_trainable),
        **{field.name: tokens[field.name] for field in included},
    }
    if len(positions) < len(logs):
        columns = {name: rows_at(positions, column) for name, column in columns.items()}
    token_ids, logprobs = columns["token_ids"], columns["generation_logprobs"]
    valid = [part.is_valid().to_numpy(zero_copy_only=False) for part in _messages_of(logprobs)]
    is_generated = _joined_arrays(valid, np.bool_)
    return TokenColumns(
        message_counts=_joined_arrays([_list_lengths(chunk) for chunk in token_ids.chunks], np.int64),
        token_counts=_counts_of(token_ids),
        logprob_counts=np.where(is_generated, _counts_of(logprobs), -1),
        trained=is_generated & _of_messages(columns["trainable"], np.bool_),
        clipped=_of_messages(columns["clipped"], np.bool_),
        rewards=_of_messages(columns["rewards"], np.float64),
        token_ids=_numbers_of(token_ids),
        generation_logprobs=_numbers_of(logprobs),
        spans=_spans_of(columns["spans"]),
        included={
            field.name: _included_rows(columns[field.name], field)
            for field in included
            if any(len(part) > part.null_count for part in _messages_of(columns[field.name]))
        },
    )


def _counts_of(column: pa.ChunkedArray) -> Integers:
    """[M]: number of values in the list of each message; 0 where its list is null."""
    return _joined_arrays([_list_lengths(part) for part in _messages_of(column)], np.int64)


def _numbers_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """The numbers of all messages, concatenated; a view of Arrow's memory where the column is one chunk."""
    dtype = column.type.value_type.value_type.to_pandas_dtype()
    return _joined_arrays([part.flatten().to_numpy() for part in _messages_of(column)], dtype)


def _included_rows(column: pa.ChunkedArray, field: pa.Field) -> IncludedRows:
    """The rows of a column of `include`; their values are a view of Arrow's memory where the column is one chunk."""
    dtype, row = row_of(field)
    arrays = [np.frombuffer(value_bytes(part.flatten()), dtype) for part in _messages_of(column)]
    return IncludedRows(_counts_of(column), _joined_arrays(arrays, np.dtype(dtype)).reshape(-1, *row))


def rows_at(positions: Sequence[int], column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of `column` at `positions`, which ascend, taken from one chunk at a time.

    `ChunkedArray.take` joins the chunks, and one array of lists has no room for more than 2^31 numbers.
    """
    offsets = np.cumsum([0, *map(len, column.chunks)])
    rows = np.asarray(positions, np.int64)
    runs = pairwise(np.searchsorted(rows, offsets))
    parts = [
        chunk.take(pa.array(rows[first:last] - offset))
        for chunk, offset, (first, last) in zip(column.chunks, offsets[:-1], runs, strict=True)
    ]
    return pa.chunked_array(parts, column.type)


def _list_lengths(lists: pa.ListArray) -> NDArray[np.int32]:
    return cast(NDArray[np.int32], pc.list_value_length(lists).fill_null(0).to_numpy())


def _joined_arrays(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """`parts` as one array of `dtype`; a single part of that dtype is not copied."""
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _message_column(
    logs: pa.ChunkedArray, value_type: pa.DataType, values: Callable[[pa.StructArray], pa.Array]
) -> pa.ChunkedArray:
    """A column with one value for each message of each rollout, made by `values`."""
    lists = pa.list_(value_type)
    chunks = [pa.ListArray.from_arrays(log.offsets, values(log.values), lists) for log in logs.chunks]
    return pa.chunked_array(chunks, lists)


def _is_clipped(messages: pa.StructArray) -> pa.BooleanArray:
    return pc.equal(messages.field("finish_reason"), "length").fill_null(False)


def _is_trainable(messages: pa.StructArray) -> pa.BooleanArray:
    """Whether each message may be trained if it was generated. Few say something about it."""
    texts = messages.field(FURTHER_FIELDS.name)
    found = np.ones(len(texts), np.bool_)
    says = pc.match_substring_regex(texts, UNTRAINED).fill_null(False).to_numpy(zero_copy_only=False)
    for place in np.flatnonzero(says).tolist():
        found[place] = may_be_trained({"generation_logprobs": (), **from_json(texts[place].as_py())})
    return pa.array(found)


def _messages_of(column: pa.ChunkedArray) -> list[pa.Array]:
    """The values of all messages, chunk by chunk."""
    return [chunk.flatten() for chunk in column.chunks]


def _of_messages(column: pa.ChunkedArray, dtype: Any) -> NDArray[Any]:
    """[M]: the value of each message."""
    return _joined_arrays([part.to_numpy(zero_copy_only=False) for part in _messages_of(column)], dtype)


def _spans_of(versions: pa.ChunkedArray) -> list[tuple[int, int, int, int]]:
    """The `weight_versions` of all messages as `TokenColumns.spans`."""
    by_message = pa.chunked_array(_messages_of(versions), pa.list_(SPAN)).combine_chunks()
    spans = by_message.flatten()
    message = pc.list_parent_indices(by_message)
    # Of a named policy the name comes before the number: run-b/7.
    version = pc.replace_substring_regex(spans.field("version"), "^.*/", "").cast(pa.int64())
    columns = (message, version, spans.field("start"), spans.field("end"))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
