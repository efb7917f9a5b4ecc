"""`ArrowRollouts`: the rollouts of an Arrow answer, read as numpy arrays over Arrow's own buffers. Needs `arrow`."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter
from pydantic_core import from_json

from rollout_client.arrow.rows import values_of
from rollout_client.arrow.schema import FURTHER_FIELDS, ROLLOUTS, SPAN, row_of
from rollout_client.calls.arrow_bodies import ArrowResponse, included_fields, value_bytes
from rollout_client.contract.messages import Branch
from rollout_client.contract.training import may_be_trained
from rollout_client.results import FINAL_STATUSES
from rollout_client.tensors.included import IncludedRows
from rollout_client.tensors.rollouts import GroupOf, Integers, Rollouts, TokenColumns, idx_of

REWARDS = ROLLOUTS.field("rewards")
RANGES = '"mm_ranges":[{'
"""In the JSON of a message that shows images."""
UNTRAINED = '"constrained":|"sampled_with":'
"""In the JSON of a generated message that may not be trained; a regular expression."""
BRANCHES = TypeAdapter(list[Branch])


@dataclass(frozen=True, slots=True)
class ArrowRollouts(Rollouts):
    response: ArrowResponse

    def final_rewards(self) -> list[float | None]:
        rewards, statuses = (self.response.rollouts[name].to_pylist() for name in ("total_reward", "status"))
        return [reward if status in FINAL_STATUSES else None for reward, status in zip(rewards, statuses, strict=True)]

    def named_rewards(self) -> list[Mapping[str, float]]:
        return [rewards for chunk in self.response.rollouts["rewards"].chunks for rewards in values_of(chunk, REWARDS)]

    def turns_played(self) -> list[int]:
        counts: list[int] = pc.struct_field(self.response.rollouts["metrics"], "turn_count").to_pylist()
        return counts

    def groups(self, group_of: GroupOf) -> list[Hashable]:
        if group_of is idx_of:
            keys: list[Hashable] = self.response.rollouts["idx"].to_pylist()
            return keys
        return [group_of(sample) for sample in self.response.samples]

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        tokens, logs = self.response.tokens, self.response.rollouts["message_log"]
        versions = weight_versions(logs)
        columns = [
            tokens["token_ids"],
            tokens["generation_logprobs"],
            versions,
            clipped_messages(logs),
            rewards_of_messages(logs),
            trainable_messages(logs),
        ]
        included = included_fields(tokens.schema)
        columns += [tokens[field.name] for field in included]
        if len(positions) < len(versions):
            columns = [rows_at(positions, column) for column in columns]
        token_ids, logprobs = map(MessageNumbers.of, columns[:2])
        return TokenColumns(
            message_counts=token_ids.message_counts,
            token_counts=token_ids.counts,
            logprob_counts=np.where(logprobs.is_valid, logprobs.counts, -1),
            trained=logprobs.is_valid
            & joined_arrays([chunk.flatten().to_numpy(False) for chunk in columns[5].chunks], np.bool_),
            clipped=joined_arrays([chunk.flatten().to_numpy(False) for chunk in columns[3].chunks], np.bool_),
            rewards=joined_arrays([chunk.flatten().to_numpy(False) for chunk in columns[4].chunks], np.float64),
            token_ids=token_ids.values,
            generation_logprobs=logprobs.values,
            spans=spans_of(columns[2]),
            included={
                field.name: included_rows(column, field)
                for field, column in zip(included, columns[6:], strict=True)
                if any(len(part) > part.null_count for part in (chunk.flatten() for chunk in column.chunks))
            },
        )

    def rollout_ids(self) -> list[str | None]:
        texts = self.response.rollouts[FURTHER_FIELDS.name].to_pylist()
        return [from_json(text or "{}").get("rollout_id") for text in texts]

    def branches(self, positions: Sequence[int]) -> list[Sequence[Branch]]:
        column = self.response.rollouts[FURTHER_FIELDS.name]
        fields = [column[position].as_py() for position in positions]
        return [BRANCHES.validate_python(from_json(text or "{}").get("branches", [])) for text in fields]

    def with_images(self) -> set[int]:
        found, begin = set[int](), 0
        for log in self.response.rollouts["message_log"].chunks:
            texts = log.flatten().field(FURTHER_FIELDS.name)
            shown = pc.match_substring(texts, RANGES).fill_null(False)
            found.update(begin + position for position in pc.list_parent_indices(log).filter(shown).to_pylist())
            begin += len(log)
        return found


@dataclass(frozen=True, slots=True)
class MessageNumbers:
    """A column of B rollouts with a list of numbers for each of their M messages."""

    message_counts: Integers
    """[B]: number of messages of each rollout."""
    counts: Integers
    """[M]: number of values of each message; 0 where its list is null."""
    is_valid: NDArray[np.bool_]
    """[M]: whether the list is not null."""
    values: NDArray[Any]
    """All values, concatenated; a view of Arrow's memory where the column is one chunk."""

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "MessageNumbers":
        lists = [chunk.flatten() for chunk in column.chunks]
        return cls(
            joined_arrays([list_lengths(chunk) for chunk in column.chunks], np.int64),
            joined_arrays([list_lengths(part) for part in lists], np.int64),
            joined_arrays([part.is_valid().to_numpy(zero_copy_only=False) for part in lists], np.bool_),
            joined_arrays(
                [part.flatten().to_numpy() for part in lists], column.type.value_type.value_type.to_pandas_dtype()
            ),
        )


def included_rows(column: pa.ChunkedArray, field: pa.Field) -> IncludedRows:
    """The rows of a column of `include`; their values are a view of Arrow's memory where the column is one chunk."""
    dtype, row = row_of(field)
    messages = [chunk.flatten() for chunk in column.chunks]
    arrays = [np.frombuffer(value_bytes(part.flatten()), dtype) for part in messages]
    return IncludedRows(
        joined_arrays([list_lengths(part) for part in messages], np.int64),
        joined_arrays(arrays, np.dtype(dtype)).reshape(-1, *row),
    )


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


def list_lengths(lists: pa.ListArray) -> NDArray[np.int32]:
    lengths: NDArray[np.int32] = pc.list_value_length(lists).fill_null(0).to_numpy()
    return lengths


def joined_arrays(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """`parts` as one array of `dtype`; a single part of that dtype is not copied."""
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def weight_versions(logs: pa.ChunkedArray) -> pa.ChunkedArray:
    """The `weight_versions` of each message of each rollout, without the text: selecting rollouts joins the chunks, and
    one array of strings has no room for more than 2 GiB."""
    lists = pa.list_(pa.list_(SPAN))
    chunks = [pa.ListArray.from_arrays(log.offsets, log.values.field("weight_versions"), lists) for log in logs.chunks]
    return pa.chunked_array(chunks, lists)


def clipped_messages(logs: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether `finish_reason` is `length`, of each message of each rollout."""
    lists = pa.list_(pa.bool_())
    chunks = [
        pa.ListArray.from_arrays(
            log.offsets, pc.equal(log.values.field("finish_reason"), "length").fill_null(False), lists
        )
        for log in logs.chunks
    ]
    return pa.chunked_array(chunks, lists)


def rewards_of_messages(logs: pa.ChunkedArray) -> pa.ChunkedArray:
    """The `reward` of each message of each rollout."""
    lists = pa.list_(pa.float64())
    return pa.chunked_array(
        [pa.ListArray.from_arrays(log.offsets, log.values.field("reward"), lists) for log in logs.chunks], lists
    )


def trainable_messages(logs: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each message of each rollout may be trained if it was generated."""
    lists = pa.list_(pa.bool_())
    return pa.chunked_array(
        [
            pa.ListArray.from_arrays(log.offsets, pa.array(trainable(log.values.field(FURTHER_FIELDS.name))), lists)
            for log in logs.chunks
        ],
        lists,
    )


def trainable(texts: pa.StringArray) -> NDArray[np.bool_]:
    """Whether a generated message with these further fields may be trained. Few say something about it."""
    found = np.ones(len(texts), np.bool_)
    says = pc.match_substring_regex(texts, UNTRAINED).fill_null(False).to_numpy(zero_copy_only=False)
    for place in np.flatnonzero(says).tolist():
        found[place] = may_be_trained({"generation_logprobs": (), **from_json(texts[place].as_py())})
    return found


def spans_of(versions: pa.ChunkedArray) -> list[tuple[int, int, int, int]]:
    """The `weight_versions` of all messages, as `TokenColumns.spans` holds them."""
    by_message = pa.chunked_array([chunk.flatten() for chunk in versions.chunks], pa.list_(SPAN)).combine_chunks()
    spans = by_message.flatten()
    message = pc.list_parent_indices(by_message)
    # Of a named policy the name comes before the number: run-b/7.
    version = pc.replace_substring_regex(spans.field("version"), "^.*/", "").cast(pa.int64())
    columns = (message, version, spans.field("start"), spans.field("end"))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
