"""Rollouts as the tensors of a training step. Needs the extra `torch`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from rollout_client.contract import RolloutResponse, SampleResult
from rollout_client.trainers.columns import Integers, ListedRollouts, Rollouts, TokenColumns, idx_of
from rollout_client.trainers.rows import NO_VERSION, STD_EPSILON, group_relative_advantages

if TYPE_CHECKING:
    from rollout_client.arrow.response import ArrowResponse

PaddingSide = Literal["right", "left"]
Value = TypeVar("Value")
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


def to_tensors(
    samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]",
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
        samples: a response, or any rollouts, of one response or of several. Of a response that came as Arrow, the
            tokens are read where they lie, without a Python object for any of them.
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
    given = rollouts_of(samples)
    finals = given.finals()
    positions = [place for place, final in enumerate(finals) if final is not None or not_final == "mask"]
    finals = at(positions, finals)
    groups = numbered(at(positions, given.groups(group_of)))
    advantages = group_relative_advantages(finals, groups, scale_rewards=scale_rewards, epsilon=epsilon)
    is_final = [final is not None for final in finals]
    padding = Padding(pad_token_id, padding_side, pad_to_multiple_of)
    return RolloutTensors(
        **token_tensors(given.columns(positions), is_final, padding),
        total_reward=reward_tensor(finals),
        rewards=named_rewards(at(positions, given.rewards()), finals),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        groups=torch.tensor(groups, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        sample_mask=torch.tensor(is_final, dtype=torch.int64),
    )


def at(positions: Sequence[int], of_all: Sequence[Value]) -> list[Value]:
    return [of_all[position] for position in positions]


def rollouts_of(samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]") -> Rollouts:
    if isinstance(samples, RolloutResponse):
        return ListedRollouts(samples.samples)
    if isinstance(samples, Sequence):
        return ListedRollouts(samples)
    # Only who has such an answer has pyarrow.
    from rollout_client.trainers.arrow_columns import ArrowRollouts

    return ArrowRollouts(samples)


@dataclass(frozen=True, slots=True)
class Padding:
    token_id: int
    side: PaddingSide
    to_multiple_of: int

    def mask(self, lengths: Integers) -> NDArray[np.bool_]:
        """[B, T]: where there is a token."""
        longest = int(lengths.max(initial=0))
        places = np.arange(-(-longest // self.to_multiple_of) * self.to_multiple_of)
        from_start = places if self.side == "right" else places[::-1]
        return from_start < lengths[:, None]


def padded(flat: NDArray[Any], mask: NDArray[np.bool_], fill: int, dtype: DTypeLike) -> Tensor:
    """[B, T]: the tokens' values where `mask` has them, row by row."""
    # Zeros come from the system without being written, which halves the time of a large tensor.
    values = np.full(mask.shape, fill, dtype) if fill else np.zeros(mask.shape, dtype)
    values[mask] = flat
    return torch.from_numpy(values)


def token_tensors(columns: TokenColumns, is_final: Sequence[bool], padding: Padding) -> dict[str, Tensor]:
    """Raises `ValueError` if a message has other than one log-probability a token."""
    columns.check()
    lengths = columns.lengths
    mask = padding.mask(lengths)
    is_trained = columns.is_generated & np.repeat(np.array(is_final, np.bool_), lengths)
    return {
        "input_ids": padded(columns.token_ids, mask, padding.token_id, np.int64),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "loss_mask": padded(is_trained, mask, 0, np.int64),
        "generation_logprobs": padded(columns.aligned_logprobs, mask, 0, np.float32),
        "weight_versions": padded(columns.weight_versions, mask, NO_VERSION, np.int64),
        "prompt_lengths": torch.from_numpy(columns.prompt_lengths),
        "lengths": torch.from_numpy(lengths),
    }


def named_rewards(rewards: Sequence[Mapping[str, float]], finals: Sequence[float | None]) -> dict[str, Tensor]:
    names = dict.fromkeys(chain.from_iterable(rewards))
    return {
        name: reward_tensor(
            [None if final is None else named.get(name) for named, final in zip(rewards, finals, strict=True)]
        )
        for name in names
    }


def reward_tensor(rewards: Sequence[float | None]) -> Tensor:
    return torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float32)


def numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
