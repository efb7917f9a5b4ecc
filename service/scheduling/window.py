"""Limits of the generations of this ingress on one generator replica. A state machine: no I/O, no clock, no Ray.

A call of a model server's API that asks for several choices counts as so many generations. An engine holds at most
`max_loras` different adapters in a batch, and passes over the generations of others: no replica gets generations of
more named policies from this ingress.
"""

import math
from collections import Counter
from dataclasses import dataclass

from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad

_LARGEST_PART = 1 / 2
"""Part of the window, in generations and in tokens: a call of several choices that takes more starts when this is free.
"""
_LEAST_BUSY = 1 / 10
"""Where fewer tokens run for each leased one, an engine idles for the sake of rollouts that wait for their tools."""
SUSPECT_AFTER = 3
"""Failures of a replica without a success between them."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Limits of one engine's batch. Unknown capacities are infinite."""

    sequences: float = math.inf
    """Generations that one batch of the engine holds."""
    kv_tokens: float = math.inf
    """Tokens that its KV cache holds."""
    adapters: float = math.inf
    """Different adapters that one batch of the engine holds."""
    block_tokens: int = 1
    """Tokens of one block of the KV cache."""

    @classmethod
    def of(cls, description: GeneratorDescription) -> "EngineCapacity":
        return cls(
            description.max_num_seqs or math.inf,
            description.kv_cache_size_tokens or math.inf,
            description.max_loras or math.inf,
            description.kv_block_tokens,
        )


class ReplicaWindow:
    """Counts the generations of this ingress on one replica against its share of the replica's window.

    The window holds `factor` times as many generations as the engine's batch, so that the engine never waits for the
    ingress, and no more tokens than its KV cache holds, because an engine that runs out of it computes prompts twice.
    One generation always fits, and one call where half of the window is free: waiting for room for all of its choices
    would let the engine run empty. The ingress replicas share the window: each has what the others leave, and at least
    the same part as each of the others.
    """

    def __init__(self, capacity: EngineCapacity, factor: float | None) -> None:
        """Begins empty; `factor` None lets every generation in."""
        self._capacity = capacity
        self._factor = math.inf if factor is None else factor
        self._policies: Counter[str] = Counter()
        """Calls of this ingress by the named policies that need an adapter."""
        self.generations = 0
        """Generations of this ingress, running or waiting in the engine."""
        self.of_others = 0
        """Generations of other ingress replicas, as far as known."""
        self.is_suspect = False
        """Whether the last `SUSPECT_AFTER` calls failed: one generation at a time tries it until one succeeds; while
        another replica works, every few seconds."""
        self._failures = 0
        self._tokens = 0.0
        """Tokens of the generations of this ingress; those that a group shares count once."""
        self._ingresses = 1
        self._set_share()

    @property
    def ongoing(self) -> int:
        """Generations of all ingress replicas that run or wait in the engine, as far as known."""
        return self.generations + self.of_others

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of the engine's KV cache."""
        return self._capacity.block_tokens

    @property
    def has_free_sequence(self) -> bool:
        """Whether the engine can run one more generation at once."""
        return self.generations + self.of_others < self._capacity.sequences and not self.is_suspect

    def has_room(self, tokens: float, sequences: int = 1) -> bool:
        """Whether a call of so many choices that needs `tokens` tokens of KV cache in all may start."""
        if self.generations == 0:
            return True
        places: float = sequences
        if sequences > 1:
            places = min(sequences, max(self._max_generations * _LARGEST_PART, 1))
            tokens = min(tokens, self._max_tokens * _LARGEST_PART)
        has_tokens = self._tokens + tokens <= self._max_tokens
        return self.generations + places - 1 < self._max_generations and has_tokens

    def tokens_beside(self, leased: float) -> float:
        """How many tokens fit beside those that run and the `leased` ones of idle rollouts: below 0 if too many are.

        Each ingress replica leases in its part of the cache.
        """
        return min(self._max_tokens, self._capacity.kv_tokens / self._ingresses) - self._tokens - leased

    def has_place(self, tokens: float, leased: float, sequences: int = 1) -> bool:
        """Whether a generation that needs a place for `tokens` tokens beside the leases may start.

        It does not wait where nothing is leased, or where next to nothing runs beside what is leased.
        """
        if sequences > 1:
            tokens = min(tokens, self._max_tokens * _LARGEST_PART)
        return not leased or self._tokens < _LEAST_BUSY * leased or tokens <= self.tokens_beside(leased)

    def may_start(self, policy: str | None) -> bool:
        """Whether the engine has, or can take, the adapter of this policy."""
        return policy is None or policy in self._policies or len(self._policies) < self._capacity.adapters

    def add(self, tokens: float, policy: str | None = None, sequences: int = 1) -> None:
        """Counts a call that starts.

        Args:
            tokens: tokens of the KV cache that the call needs at its end, without those that are there already.
            policy: the named policy that generates.
            sequences: the choices of the call.
        """
        self._policies.update([policy] if policy else ())
        self.generations += sequences
        self._tokens += tokens

    def remove(self, tokens: float, policy: str | None = None, sequences: int = 1) -> None:
        """Takes out a call, with the arguments of its `add`."""
        self._policies -= Counter([policy] if policy else ())
        self.generations -= sequences
        # Sums of floats leave a rest.
        self._tokens = self._tokens - tokens if self.generations else 0.0

    def note_success(self) -> None:
        self._failures = 0
        if self.is_suspect:
            self.is_suspect = False
            self._set_share()

    def note_failure(self) -> None:
        self._failures += 1
        if self._failures == SUSPECT_AFTER:
            self.is_suspect = True
            self._set_share()

    def observe(self, load: ReplicaLoad, ended: int) -> bool:
        """Records a reported load. Returns whether the share of this ingress has changed.

        Args:
            ended: generations that are counted here and not in `load`, because they have ended.
        """
        ingresses = max(load.ingresses, 1)
        of_others = max(load.ongoing_generations - self.generations + ended, 0) if ingresses > 1 else 0
        if (ingresses, of_others) == (self._ingresses, self.of_others):
            return False
        self._ingresses, self.of_others = ingresses, of_others
        self._set_share()
        return True

    def resize(self, capacity: EngineCapacity) -> None:
        self._capacity = capacity
        self._set_share()

    def _set_share(self) -> None:
        if math.isinf(self._factor):
            self._max_generations = self._max_tokens = math.inf
            return
        window = self._factor * self._capacity.sequences
        share = max(window - self.of_others, window / self._ingresses)
        self._max_generations = 1.0 if self.is_suspect else max(share, 1.0)
        self._max_tokens = self._capacity.kv_tokens * (1.0 if math.isinf(window) else share / window)
