"""The rollouts of one group as samples of TRL's rollout buffer. No I/O."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import (
    UNKNOWN_VERSION,
    TokenRow,
    final_reward,
    group_relative_advantages,
    sample_std,
    token_row,
)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelVersions:
    """Versions of the trainer's model, and the service's versions of the same weights."""

    current: int
    """The trainer's version now."""
    at_start: int
    """The trainer's version when the rollout began."""
    by_weight_version: Mapping[int, int]
    """The trainer's version by the service's version."""

    def oldest(self, tokens: TokenRow) -> int:
        """The trainer's version that generated the oldest token; `at_start` where it is not known."""
        known = [version for version in tokens.weight_versions if version != UNKNOWN_VERSION]
        return self.by_weight_version.get(min(known), self.at_start) if known else self.at_start


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """Samples of one group for the trainer, and counts of the others."""

    samples: list[RolloutSample]
    not_final: int
    """Rollouts without a final reward, except stale ones."""
    stale: int
    """Rollouts whose oldest token is too many versions old, including those that the service cut off."""


def group_samples(
    row: Mapping[str, Any],
    group_id: int,
    rollouts: Sequence[SampleResult],
    versions: ModelVersions,
    *,
    max_staleness: int,
    scale_rewards: bool,
) -> GroupSamples:
    """The rollouts of one group that can be trained on; the others count in the metrics only.

    Left out are rollouts without a final reward, without a generated token, and those whose oldest token is more than
    `max_staleness` of the trainer's versions old. Only rollouts with a final reward enter the group's statistics.
    """
    rewards = [final_reward(rollout) for rollout in rollouts]
    advantages = group_relative_advantages(rewards, [group_id] * len(rewards), scale_rewards=scale_rewards)
    reward_std = std_of(rewards)
    samples: list[RolloutSample] = []
    stale = cut_off = sum(rollout.status == "stale" for rollout in rollouts)
    for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
        tokens = token_row(rollout).without_tail()
        if reward is None or not any(tokens.loss_mask):
            continue
        oldest = versions.oldest(tokens)
        if versions.current - oldest > max_staleness:
            stale += 1
            continue
        named = {f"rewards/{name}": value for name, value in rollout.rewards.items()}
        samples.append(
            RolloutSample(
                prompt=row["prompt"],
                completion=completion_of(rollout),
                input_ids=np.asarray(tokens.token_ids, dtype=np.int64),
                completion_mask=np.asarray(tokens.loss_mask, dtype=np.int64),
                old_log_probs=np.asarray(tokens.generation_logprobs, dtype=np.float32),
                advantage=advantage,
                model_version=oldest,
                group_id=group_id,
                metrics={"reward": reward, "reward_std": reward_std, **named},
                enqueued_at=time.time(),
            )
        )
    return GroupSamples(samples, rewards.count(None) - cut_off, stale)


def completion_of(rollout: SampleResult) -> list[dict[str, str]]:
    """The messages from the first generated one on."""
    log = itertools.dropwhile(lambda message: message.generation_logprobs is None, rollout.message_log)
    return [{"role": message.role, "content": message.content} for message in log]


def std_of(rewards: Sequence[float | None]) -> float:
    final = [reward for reward in rewards if reward is not None]
    return sample_std(final, sum(final) / len(final)) if final else float("nan")
