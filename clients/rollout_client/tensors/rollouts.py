"""The rollouts of a training step as flat numpy arrays of tokens, whatever form they came in. Needs numpy.

`to_tensors` reads `Rollouts`: `listed_rollouts` of Python lists, or `arrow_rollouts` of an Arrow answer. Both give
`TokenColumns`, from which padded tensors are made.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollout_client.contract.base import read_label
from rollout_client.contract.messages import Message, may_be_trained
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import UNKNOWN_VERSION, final_reward
from rollout_client.tensors.included import IncludedRows, listed_rows

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The N tokens of the M messages of B rollouts, concatenated in order."""

    message_counts: Integers
    """[B]: number of messages of each rollout."""
    token_counts: Integers
    """[M]: number of `token_ids` of each message."""
    logprob_counts: Integers
    """[M]: number of `generation_logprobs` of each message; -1 for a message without them."""
    trained: NDArray[np.bool_]
    """[M]: whether the message may be trained."""
    clipped: NDArray[np.bool_]
    """[M]: whether the message's `finish_reason` is `length`."""
    rewards: NDArray[np.float64]
    """[M]: the message's own reward; NaN for a message without one."""
    token_ids: NDArray[Any]
    """[N], int32 or int64."""
    generation_logprobs: NDArray[Any]
    """The log-probabilities of the generated messages only, concatenated; floats."""
    spans: Sequence[tuple[int, int, int, int]]
    """The `weight_versions` of all messages as (message, version, start, end). `message` is an index into [M]; `start`
    and `end` count tokens within that message."""
    included: Mapping[str, IncludedRows]
    """The columns of the request's `include`, by the field of its messages."""

    @property
    def lengths(self) -> Integers:
        """[B]: number of tokens of each rollout."""
        return np.diff(boundaries(self.token_counts)[boundaries(self.message_counts)])

    @property
    def rollout_of_message(self) -> Integers:
        """[M]: the rollout that has the message."""
        return np.repeat(np.arange(len(self.message_counts)), self.message_counts)

    @property
    def is_generated(self) -> NDArray[np.bool_]:
        """[N]: whether the policy generated the token."""
        return np.repeat(self.logprob_counts >= 0, self.token_counts)

    @property
    def turn_counts(self) -> Integers:
        """[B]: number of messages that the policy generated."""
        return np.bincount(self.rollout_of_message[self.logprob_counts >= 0], minlength=len(self.message_counts))

    @property
    def prompt_lengths(self) -> Integers:
        """[B]: number of tokens before the first generated token; all tokens where none was generated."""
        prompts = self.lengths
        rollout = self.rollout_of_message
        message_begins = boundaries(self.token_counts)
        rollout_begins = message_begins[boundaries(self.message_counts)[:-1]]
        begins_in_rollout = message_begins[:-1] - rollout_begins[rollout]
        generated = self.logprob_counts > 0
        np.minimum.at(prompts, rollout[generated], begins_in_rollout[generated])
        return prompts

    @property
    def clipped_rollouts(self) -> NDArray[np.bool_]:
        """[B]: whether its length has cut the last generated message of the rollout."""
        clipped = np.zeros(len(self.message_counts), np.bool_)
        is_generated = self.logprob_counts >= 0
        # Of several values for one place numpy keeps the last.
        clipped[self.rollout_of_message[is_generated]] = self.clipped[is_generated]
        return clipped

    @property
    def aligned_logprobs(self) -> NDArray[np.float32]:
        """[N]: the log-probability of each token; 0 for a token that the policy did not generate."""
        aligned = np.zeros(len(self.token_ids), np.float32)
        aligned[self.is_generated] = self.generation_logprobs
        return aligned

    @property
    def weight_versions(self) -> Integers:
        """[N]: -1 for a token that the policy did not generate, or whose version is not known."""
        versions = np.full(len(self.token_ids), UNKNOWN_VERSION, np.int64)
        begins = boundaries(self.token_counts).tolist()
        for message, version, start, end in self.spans:
            if self.logprob_counts[message] >= 0:
                versions[begins[message] + start : min(begins[message] + end, begins[message + 1])] = version
        return versions

    def check(self) -> None:
        """Raises `ValueError` if a generated message does not have one log-probability per token."""
        for message in np.flatnonzero((self.logprob_counts >= 0) & (self.logprob_counts != self.token_counts)):
            raise ValueError(
                f"A message has {self.token_counts[message]} token_ids and {self.logprob_counts[message]} "
                "generation_logprobs; there must be one for each token."
            )


def boundaries(counts: Integers) -> Integers:
    """The index at which each run of `counts` begins, then the index after the last; one longer than `counts`."""
    return np.concatenate(([0], np.cumsum(counts)))


GroupOf = Callable[[SampleResult], Hashable]


def idx_of(sample: SampleResult) -> Hashable:
    return sample.idx


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts as `to_tensors` reads them; each sequence has one entry per rollout, in order."""

    final_rewards: Sequence[float | None]
    """The total rewards; `None` where one is not final."""
    named_rewards: Sequence[Mapping[str, float]]
    turns_played: Sequence[int]
    """The number of turns that each total reward is of: those before them were in a posted log."""
    groups: Sequence[Hashable]
    rollout_ids: Sequence[str | None]
    """The service's names."""
    columns: Callable[[Sequence[int]], TokenColumns]
    """Reads the tokens of the rollouts at some positions, which ascend."""


def listed_rollouts(samples: Sequence[SampleResult], group_of: GroupOf) -> Rollouts:
    return Rollouts(
        final_rewards=[final_reward(sample) for sample in samples],
        named_rewards=[sample.rewards for sample in samples],
        turns_played=[sample.metrics.turn_count for sample in samples],
        groups=[group_of(sample) for sample in samples],
        rollout_ids=[sample.rollout_id for sample in samples],
        columns=lambda positions: _columns_of([samples[position].message_log for position in positions]),
    )


def _columns_of(logs: Sequence[Sequence[Message]]) -> TokenColumns:
    messages = list(chain.from_iterable(logs))
    logprobs = [message.generation_logprobs for message in messages]
    return TokenColumns(
        message_counts=_lengths_of(logs),
        token_counts=_lengths_of([message.token_ids for message in messages]),
        logprob_counts=np.array([-1 if given is None else len(given) for given in logprobs], np.int64),
        trained=np.array([may_be_trained(message) for message in messages], np.bool_),
        clipped=np.array([message.finish_reason == "length" for message in messages], np.bool_),
        rewards=np.array([message.reward for message in messages], np.float64),
        token_ids=_flattened([message.token_ids for message in messages], np.int64),
        generation_logprobs=_flattened([given or [] for given in logprobs], np.float32),
        spans=[
            (place, read_label(span.version).number, span.start, span.end)
            for place, message in enumerate(messages)
            for span in message.weight_versions or ()
        ],
        included=listed_rows(messages),
    )


def _flattened(lists: Sequence[Sequence[float]], dtype: DTypeLike) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


def _lengths_of(lists: Sequence[Sequence[object]]) -> Integers:
    return np.fromiter(map(len, lists), np.int64, len(lists))
