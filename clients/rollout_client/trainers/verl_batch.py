"""The rows of rollouts as the tensors and columns of a `DataProto` of verl."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_client.contract.messages import JsonObject
from rollout_client.contract.rollouts import SampleResult
from rollout_client.contract.training import may_be_trained
from rollout_client.results import (
    UNKNOWN_VERSION,
    TokenRow,
    filled_in,
    last_finish_reason,
    prompt_length,
)
from rollout_client.turn_rewards import turn_rewards

EMPTY_COLUMNS = ("tool_rewards", "min_global_steps", "max_global_steps", "extras")
"""Columns that verl's own manager always has. `*_global_steps` count verl's steps; the service knows its versions."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout, as verl's batch holds it."""

    prompt: list[int]
    response: TokenRow
    """Without the prompt. Empty for a rollout without a final reward: verl counts it as aborted."""
    reward: float | None
    sample: SampleResult


def tensors_of(rows: Sequence[Row], rollout_config: Any, pad_id: int) -> dict[str, torch.Tensor]:
    longest_prompt, longest = rollout_config.prompt_length, rollout_config.response_length
    responses = [row.response for row in rows]
    prompt_mask = right_padded([[1] * len(row.prompt) for row in rows], longest_prompt, 0).flip(1)
    response_attention = right_padded([[1] * len(response.token_ids) for response in responses], longest, 0)
    prompts = right_padded([row.prompt[::-1] for row in rows], longest_prompt, pad_id).flip(1)
    response_ids = right_padded([response.token_ids for response in responses], longest, pad_id)
    attention_mask = torch.cat([prompt_mask, response_attention], dim=1)
    return {
        "prompts": prompts,
        "responses": response_ids,
        "response_mask": right_padded([response.loss_mask for response in responses], longest, 0),
        "input_ids": torch.cat([prompts, response_ids], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clip(min=0),
        "rollout_log_probs": right_padded([response.generation_logprobs for response in responses], longest, 0.0),
    }


def score_tensor(rows: Sequence[Row], scores: Sequence[float], rollout_config: Any, by_turn: bool) -> torch.Tensor:
    """float32 [B, R]: the scores at the last tokens of what they score; each row sums to its score."""
    rm_scores = torch.zeros(len(rows), rollout_config.response_length)
    for place, (row, score) in enumerate(zip(rows, scores, strict=True)):
        ends = turn_ends(row) if by_turn and row.reward is not None else []
        if not ends:
            # In an empty response it is at the last place, as verl has it.
            rm_scores[place, len(row.response.token_ids) - 1] = score
            continue
        for end, reward in zip(ends, turn_rewards(row.sample, row.reward), strict=True):
            rm_scores[place, end - 1] += reward
    return rm_scores


def turn_ends(row: Row) -> list[int]:
    """The index after the last token of each turn that may be trained, in the response; the response's end for a turn
    that was cut away."""
    ends, end = [], -prompt_length(row.sample.message_log)
    for message in row.sample.message_log:
        end += len(message.token_ids)
        if may_be_trained(message):
            # One without tokens has none before it if it is the first.
            ends.append(max(min(end, len(row.response.token_ids)), 1))
    return ends


def right_padded(rows: Sequence[Sequence[float]], width: int, fill: float) -> torch.Tensor:
    """[len(rows), width]; float32 if `fill` is a float, int64 otherwise."""
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def columns_of(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    versions = [[each for each in row.response.weight_versions if each != UNKNOWN_VERSION] for row in rows]
    return {
        "__num_turns__": np.array([chat_turns(row.sample) for row in rows], dtype=np.int32),
        "multi_modal_inputs": objects([{} for _ in rows]),
        "turn_scores": objects([turn_scores(row.sample) for row in rows]),
        **{name: objects([None] * len(rows)) for name in EMPTY_COLUMNS},
        "weight_versions": objects([list(version_spans(row.response)) for row in rows]),
        "min_weight_version": np.array([min(each, default=UNKNOWN_VERSION) for each in versions], dtype=np.int64),
        "max_weight_version": np.array([max(each, default=UNKNOWN_VERSION) for each in versions], dtype=np.int64),
        "status": objects([row.sample.status for row in rows]),
        "rewards": objects([row.sample.rewards for row in rows]),
        "answer": objects([row.sample.answer for row in rows]),
        "finish_reason": objects([last_finish_reason(row.sample) for row in rows]),
        "rollout_id": objects([row.sample.rollout_id for row in rows]),
    }


def reward_columns(rows: Sequence[Row], groups: Sequence[Any], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    return {
        name: np.array(
            with_group_means([None if row.reward is None else row.sample.rewards.get(name) for row in rows], groups)
        )
        for name in names
    }


def with_group_means(rewards: Sequence[float | None], groups: Sequence[Any]) -> list[float]:
    """A missing reward is the mean of its group, or of all rows; NaN if no row has one."""
    known = [reward for reward in rewards if reward is not None]
    return filled_in(rewards, groups, sum(known) / len(known) if known else float("nan"))


def objects(values: Sequence[Any]) -> NDArray[Any]:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def chat_turns(sample: SampleResult) -> int:
    """Turns as verl counts them: each generation, and the messages before it."""
    return 2 * sum(message.generation_logprobs is not None for message in sample.message_log)


def turn_scores(sample: SampleResult) -> list[float]:
    return [message.reward for message in sample.message_log if message.reward is not None]


def version_spans(response: TokenRow) -> Iterator[JsonObject]:
    place = 0
    for version, run in groupby(response.weight_versions):
        start, place = place, place + len(list(run))
        if version != UNKNOWN_VERSION:
            yield {"version": version, "start": start, "end": place}
