"""The rollouts of a training step, whatever form they came in: `Rollouts`, and `ListedRollouts` over Python lists.

`ArrowRollouts` in `arrow_rollouts.py` reads the same from an Arrow answer. Needs numpy.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollout_client.contract.rollouts import SampleResult
from rollout_client.policy_names import read_label
from rollout_client.results.final_rewards import final_reward
from rollout_client.tensors.token_columns import Integers, TokenColumns

GroupOf = Callable[[SampleResult], Hashable]


def idx_of(sample: SampleResult) -> Hashable:
    return sample.idx


class Rollouts(Protocol):
    """What `to_tensors` reads from a sequence of rollouts; each list has one entry per rollout, in order."""

    def final_rewards(self) -> list[float | None]:
        """The total reward; `None` where it is not final."""
        ...

    def named_rewards(self) -> list[Mapping[str, float]]:
        """The rewards by name."""
        ...

    def groups(self, group_of: GroupOf) -> list[Hashable]:
        """The group that `group_of` names."""
        ...

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        """The tokens of the rollouts at `positions`, which ascend."""
        ...


@dataclass(frozen=True, slots=True)
class ListedRollouts(Rollouts):
    samples: Sequence[SampleResult]

    def final_rewards(self) -> list[float | None]:
        return [final_reward(sample) for sample in self.samples]

    def named_rewards(self) -> list[Mapping[str, float]]:
        return [sample.rewards for sample in self.samples]

    def groups(self, group_of: GroupOf) -> list[Hashable]:
        return [group_of(sample) for sample in self.samples]

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        logs = [self.samples[position].message_log for position in positions]
        messages = list(chain.from_iterable(logs))
        logprobs = [message.generation_logprobs for message in messages]
        return TokenColumns(
            message_counts=lengths_of(logs),
            token_counts=lengths_of([message.token_ids for message in messages]),
            logprob_counts=np.array([-1 if given is None else len(given) for given in logprobs], np.int64),
            clipped=np.array([message.finish_reason == "length" for message in messages], np.bool_),
            token_ids=flattened([message.token_ids for message in messages], np.int64),
            generation_logprobs=flattened([given or [] for given in logprobs], np.float32),
            spans=[
                (place, read_label(span.version).number, span.start, span.end)
                for place, message in enumerate(messages)
                for span in message.weight_versions or ()
            ],
        )


def flattened(lists: Sequence[Sequence[float]], dtype: DTypeLike) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


def lengths_of(lists: Sequence[Sequence[object]]) -> Integers:
    return np.fromiter(map(len, lists), np.int64, len(lists))
