"""Rollouts as the tensors of a training step. Needs the extra `torch`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from rollout_client.contract import RolloutResponse, SampleResult
from rollout_client.trainers.rows import (
    NO_VERSION,
    STD_EPSILON,
    final_reward,
    group_relative_advantages,
    token_row,
)

PaddingSide = Literal["right", "left"]
NotFinal = Literal["drop", "mask"]
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class RolloutTensors:
    """B rollouts, padded to the T tokens of the longest, all on the processor until `to` moves them."""

    input_ids: Tensor
    """int64 [B, T]: the concatenated `token_ids` of each log, in order, untouched."""
    attention_mask: Tensor
    """int64 [B, T]: 1 for a token, 0 for padding."""
    loss_mask: Tensor
    """int64 [B, T]: 1 for a token that the policy generated; all 0 in a row that `sample_mask` leaves out."""
    generation_logprobs: Tensor
    """float32 [B, T]: natural, under the distribution that was sampled from; 0 where nothing was generated."""
    weight_versions: Tensor
    """int64 [B, T]: -1 where nothing was generated."""
    prompt_lengths: Tensor
    """int64 [B]: tokens before the first generated one."""
    lengths: Tensor
    """int64 [B]: all tokens, without padding."""
    total_reward: Tensor
    """float32 [B]; NaN in a row that `sample_mask` leaves out."""
    rewards: Mapping[str, Tensor]
    """By name, float32 [B] each; NaN where a rollout has none of that name, or is left out."""
    advantages: Tensor
    """float32 [B]; 0 in a row that `sample_mask` leaves out."""
    groups: Tensor
    """int64 [B]: the group of each row, numbered from 0 in order of appearance."""
    positions: Tensor
    """int64 [B]: the place of each row among the samples that were given."""
    sample_mask: Tensor
    """int64 [B]: 1 for a rollout whose reward is final, 0 for one that failed or was cut off."""

    def to(self, device: torch.device | str) -> "RolloutTensors":
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return RolloutTensors(**moved, rewards={name: reward.to(device) for name, reward in self.rewards.items()})


def idx_of(sample: SampleResult) -> Hashable:
    return sample.idx


def to_tensors(
    samples: RolloutResponse | Sequence[SampleResult],
    *,
    pad_token_id: int,
    padding_side: PaddingSide = "right",
    pad_to_multiple_of: int = 1,
    not_final: NotFinal = "drop",
    scale_rewards: bool = True,
    epsilon: float = STD_EPSILON,
    group_of: Callable[[SampleResult], Hashable] = idx_of,
) -> RolloutTensors:
    """The tensors of `samples`, a row each, in their order.

    Args:
        samples: a response, or any rollouts, of one response or of several.
        pad_token_id: fills `input_ids`; the other tensors are padded with 0, `weight_versions` with -1.
        padding_side: where padding goes.
        pad_to_multiple_of: rounds T up, in tokens.
        not_final: what becomes of rollouts that failed or that a deadline or cancellation cut off. They are in no
            statistic of their group either way: `drop` leaves them out, `mask` keeps their rows with an advantage of 0
            and a loss mask of 0, for trainers that need batches of one size.
        scale_rewards: whether advantages are divided by the standard deviation of their group (GRPO) or not (Dr. GRPO).
        epsilon: added to that standard deviation.
        group_of: what the rollouts of one group have in common. By default their `idx`, which is that of the posted
            sample; rollouts of several requests, or samples that share an `idx`, need something that tells them apart.

    Raises `ValueError` if a message has other than one log-probability a token.
    """
    given = samples.samples if isinstance(samples, RolloutResponse) else samples
    finals = [final_reward(sample) for sample in given]
    positions = [place for place, final in enumerate(finals) if final is not None or not_final == "mask"]
    kept = [given[place] for place in positions]
    finals = [finals[place] for place in positions]
    groups = numbered([group_of(sample) for sample in kept])
    advantages = group_relative_advantages(finals, groups, scale_rewards=scale_rewards, epsilon=epsilon)
    return RolloutTensors(
        **token_tensors(kept, finals, Padding(pad_token_id, padding_side, pad_to_multiple_of)),
        total_reward=reward_tensor(finals),
        rewards=named_rewards(kept, finals),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        groups=torch.tensor(groups, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        sample_mask=torch.tensor([final is not None for final in finals], dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True)
class Padding:
    token_id: int
    side: PaddingSide
    to_multiple_of: int

    def stacked(self, rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        """The rows as one [B, T] tensor."""
        longest = max(map(len, rows), default=0)
        width = -(-longest // self.to_multiple_of) * self.to_multiple_of
        padded = torch.full((len(rows), width), fill, dtype=dtype)
        for place, row in enumerate(rows):
            start = width - len(row) if self.side == "left" else 0
            padded[place, start : start + len(row)] = torch.tensor(row, dtype=dtype)
        return padded


def token_tensors(
    samples: Sequence[SampleResult], finals: Sequence[float | None], padding: Padding
) -> dict[str, Tensor]:
    rows = [token_row(sample) for sample in samples]
    masks = [
        row.loss_mask if final is not None else [0] * len(row.loss_mask)
        for row, final in zip(rows, finals, strict=True)
    ]
    integers = torch.int64
    return {
        "input_ids": padding.stacked([row.token_ids for row in rows], padding.token_id, integers),
        "attention_mask": padding.stacked([[1] * len(row.token_ids) for row in rows], 0, integers),
        "loss_mask": padding.stacked(masks, 0, integers),
        "generation_logprobs": padding.stacked([row.generation_logprobs for row in rows], 0, torch.float32),
        "weight_versions": padding.stacked([row.weight_versions for row in rows], NO_VERSION, integers),
        "prompt_lengths": torch.tensor([row.prompt_length for row in rows], dtype=integers),
        "lengths": torch.tensor([len(row.token_ids) for row in rows], dtype=integers),
    }


def named_rewards(samples: Sequence[SampleResult], finals: Sequence[float | None]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for sample in samples for name in sample.rewards)
    return {
        name: reward_tensor(
            [None if final is None else sample.rewards.get(name) for sample, final in zip(samples, finals, strict=True)]
        )
        for name in names
    }


def reward_tensor(rewards: Sequence[float | None]) -> Tensor:
    return torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float32)


def numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
