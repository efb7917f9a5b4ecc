"""The columns of `include` as padded tensors, and the log-softmax over a sampling mask. Needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_client.contract.messages import COLUMN_FIELDS, Message
from rollout_client.tensors.padding import padded

Integers = NDArray[np.int64]
NO_TOKEN = -1
"""Fills the rows of a sampling mask."""


@dataclass(frozen=True, slots=True)
class IncludedRows:
    """One of the `COLUMN_FIELDS` of M messages: R rows, concatenated in order."""

    counts: Integers
    """[M]: number of rows of each message."""
    values: NDArray[Any]
    """[R, ...]"""


def listed_rows(messages: Sequence[Message]) -> dict[str, IncludedRows]:
    """The columns that any of the messages has, by field.

    Raises:
        ValueError: messages have rows of different shapes in one of them.
    """
    found: dict[str, IncludedRows] = {}
    for name in COLUMN_FIELDS & set().union(*(message.model_fields_set for message in messages)):
        columns = [getattr(message, name) for message in messages]
        given = [column for column in columns if column is not None]
        if given:
            counts = np.array([0 if column is None else column.shape[0] for column in columns], np.int64)
            arrays = [np.frombuffer(column.data, column.dtype).reshape(column.shape) for column in given]
            found[name] = IncludedRows(counts, np.concatenate(arrays))
    return found


def included_tensors(
    included: Mapping[str, IncludedRows], token_counts: Integers, mask: NDArray[np.bool_]
) -> dict[str, Tensor]:
    """The columns as tensors of [B, T, ...], by field; `RolloutTensors.included` says what fills them.

    Args:
        token_counts: [M]: number of tokens of each message.
        mask: [B, T]: True for a token, False for padding.
    """
    tensors: dict[str, Tensor] = {}
    for name, rows in included.items():
        if name == "sampling_mask":
            sizes = _aligned(included["sampling_mask_sizes"], token_counts).astype(np.int64)
            ids = np.full((len(sizes), int(sizes.max(initial=0))), NO_TOKEN, np.int32)
            ids[np.arange(ids.shape[1]) < sizes[:, None]] = rows.values
            tensors[name] = padded(ids, mask, NO_TOKEN, ids.dtype)
        elif name != "sampling_mask_sizes":
            flat = _aligned(rows, token_counts)
            tensors[name] = padded(flat, mask, 0, flat.dtype)
    return tensors


def _aligned(rows: IncludedRows, token_counts: Integers) -> NDArray[Any]:
    """[N, ...]: the row of each token; zeros for a token without one, which are the last ones of its message.

    torch computes with no unsigned numbers but bytes: others become int32.
    """
    ends = np.cumsum(token_counts)
    place_in_message = np.arange(int(token_counts.sum())) - np.repeat(ends - token_counts, token_counts)
    has_row = place_in_message < np.repeat(rows.counts, token_counts)
    dtype = np.int32 if rows.values.dtype == np.uint16 else rows.values.dtype
    flat = np.zeros((len(has_row), *rows.values.shape[1:]), dtype)
    flat[has_row] = rows.values
    return flat


def logprobs_within(logits: Tensor, token_ids: Tensor, sampling_mask: Tensor) -> Tensor:
    """[...]: the log-probability of each token among those that could be sampled in its place.

    It equals `generation_logprobs` where the weights are the ones that sampled, but for rounding. Without the mask the
    trainer's log-softmax is over the whole vocabulary, and the ratio of the two is far from 1 at once.

    Args:
        logits: [..., V]: what the model computes before each token, divided by the temperature.
        token_ids: [...], int64.
        sampling_mask: [..., K]: as `RolloutTensors.included` has it. In a place without any token the log-softmax is
            over the whole vocabulary.
    """
    could_be_sampled = sampling_mask != NO_TOKEN
    is_masked = could_be_sampled.any(-1)
    # A row of -inf alone would have a gradient of NaN, which `where` does not stop.
    left_out = is_masked[..., None] & ~could_be_sampled
    within = logits.gather(-1, sampling_mask.clamp(min=0).long()).masked_fill(left_out, -torch.inf).logsumexp(-1)
    norm = torch.where(is_masked, within, logits.logsumexp(-1))
    return logits.gather(-1, token_ids[..., None])[..., 0] - norm
