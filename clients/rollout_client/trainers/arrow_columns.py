"""Rollouts that came as Arrow, for tensors: numpy arrays over Arrow's own buffers. Needs the extra `arrow`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout_client.arrow.response import ArrowResponse
from rollout_client.arrow.rows import values_of
from rollout_client.arrow.schema import ROLLOUTS, SPAN
from rollout_client.contract import SampleResult
from rollout_client.trainers.columns import Integers, TokenColumns, idx_of
from rollout_client.trainers.rows import FINAL_STATUSES

REWARDS = ROLLOUTS.field("rewards")


@dataclass(frozen=True, slots=True)
class ArrowRollouts:
    """Implements `Rollouts`."""

    response: ArrowResponse

    def finals(self) -> list[float | None]:
        said = zip(*(self.response.rollouts[name].to_pylist() for name in ("total_reward", "status")), strict=True)
        return [reward if status in FINAL_STATUSES else None for reward, status in said]

    def rewards(self) -> list[Mapping[str, float]]:
        return [named for chunk in self.response.rollouts["rewards"].chunks for named in values_of(chunk, REWARDS)]

    def groups(self, group_of: Callable[[SampleResult], Hashable]) -> list[Hashable]:
        if group_of is idx_of:
            keys: list[Hashable] = self.response.rollouts["idx"].to_pylist()
            return keys
        return [group_of(sample) for sample in self.response.samples]

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        tokens, logs = self.response.tokens, self.response.rollouts["message_log"]
        if len(positions) < len(logs):
            places = pa.array(positions, pa.int64())
            tokens, logs = tokens.take(places), logs.take(places)
        token_ids, logprobs = (Messages.of(tokens[name]) for name in ("token_ids", "generation_logprobs"))
        return TokenColumns(
            messages=token_ids.per_rollout,
            tokens=token_ids.counts,
            logprobs=np.where(logprobs.are_there, logprobs.counts, -1),
            token_ids=token_ids.values,
            generation_logprobs=logprobs.values,
            spans=spans_of(logs),
        )


@dataclass(frozen=True, slots=True)
class Messages:
    """A column with a list of numbers for each message of each rollout."""

    per_rollout: Integers
    """[B]: messages."""
    counts: Integers
    """[M]: numbers, 0 where there is no list."""
    are_there: NDArray[np.bool_]
    """[M]"""
    values: NDArray[Any]
    """All numbers, end to end; in the memory of Arrow where they came in one batch."""

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "Messages":
        lists = [chunk.flatten() for chunk in column.chunks]
        return cls(
            joined([lengths(chunk) for chunk in column.chunks], np.int64),
            joined([lengths(part) for part in lists], np.int64),
            joined([part.is_valid().to_numpy(zero_copy_only=False) for part in lists], np.bool_),
            joined([part.flatten().to_numpy() for part in lists], column.type.value_type.value_type.to_pandas_dtype()),
        )


def lengths(lists: pa.ListArray) -> NDArray[np.int32]:
    of_each: NDArray[np.int32] = pa.compute.list_value_length(lists).fill_null(0).to_numpy()
    return of_each


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def spans_of(logs: pa.ChunkedArray) -> list[tuple[int, int, int, int]]:
    """As `TokenColumns` has them."""
    said = [log.flatten().field("weight_versions") for log in logs.chunks]
    weight_versions = pa.chunked_array(said, pa.list_(SPAN)).combine_chunks()
    spans = weight_versions.flatten()
    message = pa.compute.list_parent_indices(weight_versions)
    version = spans.field("version").cast(pa.int64())
    return list(
        zip(*(part.to_pylist() for part in (message, version, spans.field("start"), spans.field("end"))), strict=True)
    )
