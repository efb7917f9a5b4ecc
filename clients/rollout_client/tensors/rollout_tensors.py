"""`to_tensors`: rollouts as the padded tensors of a training step. Needs the extra `torch`."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_client.calls.rollouts import ReportColumns
from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from rollout_client.results import UNKNOWN_VERSION, group_relative_advantages
from rollout_client.tensors.credit import Credit, credited_tokens, turn_advantages, turns_of
from rollout_client.tensors.included import included_tensors
from rollout_client.tensors.padding import PaddingSide, padded, token_mask
from rollout_client.tensors.rollouts import GroupOf, Rollouts, TokenColumns, idx_of, listed_rollouts

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse

Value = TypeVar("Value")
NotFinal = Literal["drop", "mask"]
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class RolloutTensors:
    """B rollouts, padded to T tokens: the longest rollout, rounded up. All tensors are on the CPU until `to`."""

    input_ids: Tensor
    """int64 [B, T]: the concatenated `token_ids` of each message log, unchanged and in order."""
    attention_mask: Tensor
    """int64 [B, T]: 1 for a token, 0 for padding."""
    loss_mask: Tensor
    """int64 [B, T]: 1 for a token that the policy generated and that may be trained
    (`rollout_client.contract.messages.may_be_trained`); 0 everywhere in a row whose `sample_mask` is 0."""
    generation_logprobs: Tensor
    """float32 [B, T]: natural logarithms, under the distribution that was sampled from; 0 where the policy did not
    generate the token."""
    weight_versions: Tensor
    """int64 [B, T]: version of the weights that generated the token, the number alone where the policy has a name; -1
    where no policy generated it, or the version is not known."""
    prompt_lengths: Tensor
    """int64 [B]: number of tokens before the first generated token."""
    lengths: Tensor
    """int64 [B]: number of tokens, without padding."""
    total_reward: Tensor
    """float32 [B]; NaN in a row whose `sample_mask` is 0."""
    rewards: Mapping[str, Tensor]
    """float32 [B] by reward name; NaN where a rollout has no reward of that name, or its `sample_mask` is 0."""
    advantages: Tensor
    """float32 [B]; 0 in a row whose `sample_mask` is 0. With another `credit` than `total` it is [B, T]: the advantage
    of the turn of each token; 0 where `loss_mask` is 0."""
    groups: Tensor
    """int64 [B]: number of the rollout's group, counted from 0 in order of first appearance."""
    positions: Tensor
    """int64 [B]: index of the rollout in the samples that were given."""
    sample_mask: Tensor
    """int64 [B]: 1 for a rollout with a final reward, 0 for one that failed or was cut off."""
    included: Mapping[str, Tensor]
    """[B, T, ...] by the field of the messages, for what the request had in `include`; 0 for tokens without it.
    `routed_experts`: uint8 or int32 [B, T, layers, experts of a token]; `top_token_ids`: int32 [B, T, N];
    `top_logprobs`: float32 [B, T, N]; `entropy`: float32 [B, T]; `sampling_mask`: int32 [B, T, K], the tokens that
    could be sampled, then -1; `logprobs_within` takes it."""
    clipped_mask: Tensor
    """int64 [B]: 1 for a rollout whose last response was cut by its length (`finish_reason: length`). TRL takes those
    out of the loss with `mask_truncated_completions`: multiply `loss_mask` by `1 - clipped_mask[:, None]`."""
    rollout_ids: Sequence[str | None]
    """[B]: the service's name of the rollout; `None` for a seat of a game or a sample of a session."""

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {}
        for name in (field.name for field in fields(self) if field.name != "rollout_ids"):
            value = getattr(self, name)
            is_mapping = isinstance(value, Mapping)
            moved[name] = {key: each.to(device) for key, each in value.items()} if is_mapping else value.to(device)
        return replace(self, **moved)

    def report(self, logprobs: Tensor, *, rows: Tensor | None = None, mask: Tensor | None = None) -> ReportColumns:
        """Arguments of `client.report_logprobs`: what a trainer has computed for these rows.

        Rows without a `rollout_id` are left out.

        Args:
            logprobs: [R, T], of each token; or [R, T - 1], of each but the first, as `logits[:, :-1]` has them. At the
                temperature of the request; those of tokens that the policy did not generate are not read.
            rows: int64 [R]: the rows that they are of; by default all.
            mask: as `logprobs`: where the trainer's loss is; by default `loss_mask`.

        Raises:
            ValueError: the shape is another one, or no row has a `rollout_id`.
        """
        places = torch.arange(len(self.input_ids)) if rows is None else rows.cpu()
        count, width = len(places), self.input_ids.shape[1]
        if logprobs.shape not in {(count, width), (count, width - 1)}:
            raise ValueError(
                f"logprobs are {list(logprobs.shape)}: give [{count}, {width}], one for each token of these rows, or "
                f"[{count}, {width - 1}], without the first"
            )
        names = [self.rollout_ids[place] for place in places.tolist()]
        known = [name is not None for name in names]
        if not any(known):
            raise ValueError(
                "no row has a rollout_id: the service is older than this client, or the rows are of sessions"
            )
        is_token = self.attention_mask[places].bool()
        skipped = width - logprobs.shape[1]
        scored = is_token[:, 1:] & is_token[:, :-1] if skipped else is_token
        in_loss = self.loss_mask[places][:, skipped:] if mask is None else mask
        return {
            "rollouts": [name for name in names if name is not None],
            "logprobs": [*compress(unpadded(logprobs, scored), known)],
            "masks": [*compress(unpadded(in_loss, scored), known)],
            "token_ids": [*compress(unpadded(self.input_ids[places], is_token), known)],
        }


def unpadded(values: Tensor, is_token: Tensor) -> list[Tensor]:
    """The rows of `values` [B, T] without padding: where `is_token` [B, T] is not 0."""
    return [row[kept] for row, kept in zip(values.detach().cpu(), is_token.bool().cpu(), strict=True)]


def to_tensors(
    samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]",
    *,
    pad_token_id: int,
    padding_side: PaddingSide = "right",
    pad_to_multiple_of: int = 1,
    not_final: NotFinal = "drop",
    scale_rewards: bool = True,
    group_of: GroupOf = idx_of,
    credit: Credit = "total",
    discount: float = 1.0,
) -> RolloutTensors:
    """The tensors of `samples`: one row per rollout, in their order.

    Args:
        samples: a response, or rollouts of any number of responses. The tokens of an `ArrowResponse` are read from
            Arrow's buffers, and no Python object is made per token.
        pad_token_id: fills the padding of `input_ids`. `weight_versions` is padded with -1, all others with 0.
        padding_side: the side on which padding is added.
        pad_to_multiple_of: T is rounded up to a multiple of this; at least 1.
        not_final: what happens to rollouts that failed, or were cut off by a deadline or a cancellation. They enter no
            statistic of their group in either case. `drop` leaves them out; `mask` keeps their rows with advantage 0
            and loss mask 0, for trainers that need batches of a fixed size.
        scale_rewards: divide advantages by the standard deviation of their group (GRPO), or not (Dr. GRPO).
        group_of: the group of a rollout; equal values are one group. The default is `idx`: the sample's place in its
            request, unless the sample brought its own. So samples with equal `idx` are one group whatever their prompts
            are, and so are rollouts of several requests, each of which counts from 0: pass a function that tells them
            apart.
        credit: what makes the advantages. `total`: the total reward of the rollout against the others of its group.
            `turn`: each turn by the rewards from it on, against all turns of its group (`turn_advantages`). A function:
            gets the rewards of the turns of one group, by rollout and turn, and returns the advantages of these turns.
            The rewards of a rollout's turns are those of its messages; the last turn has what `total_reward` has
            beyond them.
        discount: for `credit="turn"`, the factor of a reward for each turn that it lies ahead; from 0 to 1.

    Raises:
        ValueError: a generated message does not have one log-probability per token, or the credit function does not
            return one advantage per turn.
    """
    given = _rollouts_of(samples, group_of)
    kept = [place for place, final in enumerate(given.final_rewards) if final is not None or not_final == "mask"]
    finals, groups = _at(kept, given.final_rewards), _numbered(_at(kept, given.groups))
    named, columns = _at(kept, given.named_rewards), given.columns(kept)
    # The total is not of all turns where the rollout was continued from a posted log.
    are_whole = (columns.turn_counts <= np.array(_at(kept, given.turns_played), np.int64)).tolist()
    mask = token_mask(columns.lengths, padding_side, pad_to_multiple_of)
    is_final = [final is not None for final in finals]
    if credit == "total":
        of_rollouts = group_relative_advantages(finals, groups, scale_rewards=scale_rewards)
        advantages = torch.tensor(of_rollouts, dtype=torch.float32)
    else:
        if credit == "turn":
            credit = partial(turn_advantages, discount=discount, scale_rewards=scale_rewards)
        turns = turns_of(columns, finals, are_whole)
        advantages = padded(credited_tokens(columns, turns, groups, is_final, credit), mask, 0, np.float32)
    return RolloutTensors(
        **_token_tensors(columns, is_final, pad_token_id, mask),
        included=included_tensors(columns.included, columns.token_counts, mask),
        clipped_mask=torch.from_numpy(columns.clipped_rollouts.astype(np.int64)),
        total_reward=_reward_tensor(finals),
        rewards={
            name: _reward_tensor(
                [None if final is None else of.get(name) for of, final in zip(named, finals, strict=True)]
            )
            for name in dict.fromkeys(chain.from_iterable(named))
        },
        advantages=advantages,
        groups=torch.tensor(groups, dtype=torch.int64),
        positions=torch.tensor(kept, dtype=torch.int64),
        sample_mask=torch.tensor(is_final, dtype=torch.int64),
        rollout_ids=_at(kept, given.rollout_ids),
    )


def _at(positions: Sequence[int], of_all: Sequence[Value]) -> list[Value]:
    return [of_all[position] for position in positions]


def _rollouts_of(samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]", group_of: GroupOf) -> Rollouts:
    if isinstance(samples, RolloutResponse):
        return listed_rollouts(samples.samples, group_of)
    if isinstance(samples, Sequence):
        return listed_rollouts(samples, group_of)
    # pyarrow is optional: it is installed where an ArrowResponse exists, and is not imported otherwise.
    from rollout_client.tensors.arrow_rollouts import arrow_rollouts

    return arrow_rollouts(samples, group_of)


def _token_tensors(
    columns: TokenColumns, is_final: Sequence[bool], pad_token_id: int, mask: NDArray[np.bool_]
) -> dict[str, Tensor]:
    """Raises `ValueError` if a generated message does not have one log-probability per token."""
    columns.check()
    lengths = columns.lengths
    is_trained = np.repeat(columns.trained, columns.token_counts) & np.repeat(np.array(is_final, np.bool_), lengths)
    return {
        "input_ids": padded(columns.token_ids, mask, pad_token_id, np.int64),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "loss_mask": padded(is_trained, mask, 0, np.int64),
        "generation_logprobs": padded(columns.aligned_logprobs, mask, 0, np.float32),
        "weight_versions": padded(columns.weight_versions, mask, UNKNOWN_VERSION, np.int64),
        "prompt_lengths": torch.from_numpy(columns.prompt_lengths),
        "lengths": torch.from_numpy(lengths),
    }


def _reward_tensor(rewards: Sequence[float | None]) -> Tensor:
    return torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float32)


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """Each key as a number; equal keys have equal numbers, counted from 0 in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
