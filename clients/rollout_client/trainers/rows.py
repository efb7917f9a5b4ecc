"""A rollout as one row of tokens, and what its reward is worth beside those of its group. Needs nothing heavy."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from rollout_client.contract import Message, SampleResult, SampleStatus
from rollout_client.errors import RolloutError

FINAL_STATUSES: frozenset[SampleStatus] = frozenset({"completed", "truncated", "max_turns"})
NO_VERSION = -1
STD_EPSILON = 1e-4
"""What TRL's GRPOTrainer adds to the standard deviation."""


class RolloutsNotFinal(RolloutError):
    """Rollouts failed or were cut off, and the caller wants all or none; `samples` are those."""

    def __init__(self, samples: Sequence[SampleResult], of: int) -> None:
        super().__init__(f"{len(samples)} of {of} rollouts have no final reward; {why_not_final(samples[0])}")
        self.samples = samples


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The messages of one log end to end, untouched; all lists have one entry a token."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 for a token that the policy generated, 0 for one that it was given."""
    generation_logprobs: list[float]
    """Natural; 0 for a token that was given."""
    weight_versions: list[int]
    """-1 for a token that was given, or whose version the service did not say."""
    prompt_length: int
    """Tokens before the first generated one; all of them where none was generated."""

    def without_tail(self) -> "TokenRow":
        """Up to the last generated token: what the environment said after it was seen by no generation."""
        generated = [place for place, is_generated in enumerate(self.loss_mask) if is_generated]
        end = generated[-1] + 1 if generated else len(self.token_ids)
        return TokenRow(
            self.token_ids[:end],
            self.loss_mask[:end],
            self.generation_logprobs[:end],
            self.weight_versions[:end],
            self.prompt_length,
        )


def token_row(sample: SampleResult) -> TokenRow:
    """Raises `ValueError` if a message has other than one log-probability a token."""
    row = TokenRow([], [], [], [], prompt_length(sample.message_log))
    for message in sample.message_log:
        count = len(message.token_ids)
        row.token_ids.extend(message.token_ids)
        row.loss_mask.extend([int(message.generation_logprobs is not None)] * count)
        row.generation_logprobs.extend(logprobs_of(message))
        row.weight_versions.extend(versions_of(message))
    return row


def prompt_length(message_log: Iterable[Message]) -> int:
    length = 0
    for message in message_log:
        if message.generation_logprobs:
            break
        length += len(message.token_ids)
    return length


def logprobs_of(message: Message) -> list[float]:
    if message.generation_logprobs is None:
        return [0.0] * len(message.token_ids)
    if len(message.generation_logprobs) != len(message.token_ids):
        raise ValueError(
            f"A message has {len(message.token_ids)} token_ids and {len(message.generation_logprobs)} "
            "generation_logprobs; there must be one for each token."
        )
    return message.generation_logprobs


def versions_of(message: Message) -> list[int]:
    versions = [NO_VERSION] * len(message.token_ids)
    if message.generation_logprobs is None:
        return versions
    for span in message.weight_versions or ():
        end = min(span.end, len(versions))
        versions[span.start : end] = [int(span.version)] * (end - span.start)
    return versions


def final_reward(sample: SampleResult) -> float | None:
    """`total_reward`, if it is final: null for a sample that failed, or that a deadline or a cancellation cut off."""
    return sample.total_reward if sample.status in FINAL_STATUSES else None


def why_not_final(sample: SampleResult) -> str:
    why = sample.status if sample.error is None else f"{sample.error.kind} error: {sample.error.message}"
    return f"idx {sample.idx} of task {sample.task_name}, generation {sample.generation_index}: {why}"


def group_relative_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    scale_rewards: bool = True,
    epsilon: float = STD_EPSILON,
) -> list[float]:
    """`(reward - mean) / (std + epsilon)` over the rewards of the same group, as in GRPO (arXiv:2402.03300).

    The standard deviation is that of a sample (n - 1), as in TRL's GRPOTrainer. Without `scale_rewards` it is left out,
    as in Dr. GRPO (arXiv:2503.20783). A reward that is `None` is in no statistic, and its advantage is 0; so is that of
    a group of one.
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    means = {group: math.fsum(found) / len(found) for group, found in members.items()}
    scales = {
        group: sample_std(found, means[group]) + epsilon if scale_rewards else 1.0 for group, found in members.items()
    }
    return [
        0.0 if reward is None else (reward - means[group]) / scales[group]
        for reward, group in zip(rewards, groups, strict=True)
    ]


def sample_std(values: Sequence[float], mean: float) -> float:
    """With n - 1 degrees of freedom; 0 for a single value."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
