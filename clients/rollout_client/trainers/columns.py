"""What tensors are made of: the tokens of rollouts end to end, from lists or from Arrow's buffers. Needs numpy."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollout_client.contract import SampleResult
from rollout_client.trainers.rows import NO_VERSION, final_reward

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The N tokens of the M messages of B rollouts, one after another."""

    messages: Integers
    """[B]: messages of each rollout."""
    tokens: Integers
    """[M]: `token_ids` of each message."""
    logprobs: Integers
    """[M]: `generation_logprobs` of each message, -1 for one that has none."""
    token_ids: NDArray[Any]
    """[N], int32 or int64."""
    generation_logprobs: NDArray[Any]
    """Of the generated messages alone, floats."""
    spans: Sequence[tuple[int, int, int, int]]
    """Message, version, start and end of what `weight_versions` say; tokens counted within the message."""

    @property
    def lengths(self) -> Integers:
        """[B]: tokens of each rollout."""
        return np.diff(ends(self.tokens)[ends(self.messages)])

    @property
    def is_generated(self) -> NDArray[np.bool_]:
        """[N]"""
        return np.repeat(self.logprobs >= 0, self.tokens)

    @property
    def prompt_lengths(self) -> Integers:
        """[B]: tokens before the first generated one; all of them where none was generated."""
        prompts = self.lengths
        rollout = np.repeat(np.arange(len(self.messages)), self.messages)
        begins = ends(self.tokens)[:-1] - ends(self.tokens)[ends(self.messages)[:-1]][rollout]
        generated = self.logprobs > 0
        np.minimum.at(prompts, rollout[generated], begins[generated])
        return prompts

    @property
    def aligned_logprobs(self) -> NDArray[np.float32]:
        """[N]: 0 for a token that was given."""
        aligned = np.zeros(len(self.token_ids), np.float32)
        aligned[self.is_generated] = self.generation_logprobs
        return aligned

    @property
    def weight_versions(self) -> Integers:
        """[N]: -1 for a token that was given, or whose version is not known."""
        versions = np.full(len(self.token_ids), NO_VERSION, np.int64)
        begins = ends(self.tokens).tolist()
        for message, version, start, end in self.spans:
            if self.logprobs[message] >= 0:
                versions[begins[message] + start : min(begins[message] + end, begins[message + 1])] = version
        return versions

    def check(self) -> None:
        """Raises `ValueError` if a message has other than one log-probability a token."""
        for message in np.flatnonzero((self.logprobs >= 0) & (self.logprobs != self.tokens)):
            raise ValueError(
                f"A message has {self.tokens[message]} token_ids and {self.logprobs[message]} "
                "generation_logprobs; there must be one for each token."
            )


def idx_of(sample: SampleResult) -> Hashable:
    return sample.idx


class Rollouts(Protocol):
    """What a training step asks of rollouts."""

    def finals(self) -> list[float | None]:
        """The reward of each, `None` where it is not final."""
        ...

    def rewards(self) -> list[Mapping[str, float]]:
        """Those of each, by name."""
        ...

    def groups(self, group_of: Callable[[SampleResult], Hashable]) -> list[Hashable]:
        """What `group_of` says of each."""
        ...

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        """The tokens of those at `positions`."""
        ...


@dataclass(frozen=True, slots=True)
class ListedRollouts:
    samples: Sequence[SampleResult]

    def finals(self) -> list[float | None]:
        return [final_reward(sample) for sample in self.samples]

    def rewards(self) -> list[Mapping[str, float]]:
        return [sample.rewards for sample in self.samples]

    def groups(self, group_of: Callable[[SampleResult], Hashable]) -> list[Hashable]:
        return [group_of(sample) for sample in self.samples]

    def columns(self, positions: Sequence[int]) -> TokenColumns:
        logs = [self.samples[position].message_log for position in positions]
        messages = list(chain.from_iterable(logs))
        logprobs = [message.generation_logprobs for message in messages]
        return TokenColumns(
            messages=counts(logs),
            tokens=counts([message.token_ids for message in messages]),
            logprobs=np.array([-1 if said is None else len(said) for said in logprobs], np.int64),
            token_ids=flat([message.token_ids for message in messages], np.int64),
            generation_logprobs=flat([said or [] for said in logprobs], np.float32),
            spans=[
                (place, int(span.version), span.start, span.end)
                for place, message in enumerate(messages)
                for span in message.weight_versions or ()
            ],
        )


def flat(lists: Sequence[Sequence[float]], dtype: DTypeLike) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


def counts(lists: Sequence[Sequence[object]]) -> Integers:
    return np.fromiter(map(len, lists), np.int64, len(lists))


def ends(counts: Integers) -> Integers:
    """Where each begins, and at last where all end: one longer than `counts`."""
    return np.concatenate(([0], np.cumsum(counts)))
