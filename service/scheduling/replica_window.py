"""The window of one generator replica: how many generations this ingress may have there at once. No I/O, no Ray.

A call of a model server's API that asks for several choices counts as so many generations.
"""

import math
from dataclasses import dataclass

from deployments.protocols.generation import GeneratorDescription, ReplicaLoad
from service.admission.adapter_turns import AdapterTurns

LARGEST_PART = 1 / 2
"""Of the window, in generations and in tokens: a call of several choices that takes more starts when this is free."""
SUSPECT_AFTER = 3
"""Failures of a replica without a success between them."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What one engine can run at once. Unknown capacities are infinite."""

    sequences: float = math.inf
    """Generations that one batch of the engine holds."""
    kv_tokens: float = math.inf
    """Tokens that its KV cache holds."""
    adapters: float = math.inf
    """Different adapters that one batch of the engine holds."""

    @classmethod
    def of(cls, description: GeneratorDescription) -> "EngineCapacity":
        return cls(
            description.max_num_seqs or math.inf,
            description.kv_cache_size_tokens or math.inf,
            description.max_loras or math.inf,
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
        """Args: `factor` None lets every generation in."""
        self._capacity = capacity
        self._factor = math.inf if factor is None else factor
        self.turns = AdapterTurns(capacity.adapters)
        """Of the named policies whose generations are there."""
        self.generations = 0
        """Of this ingress, running or waiting in the engine."""
        self.of_others = 0
        """Generations of other ingress replicas, as far as known."""
        self.is_suspect = False
        """Whether the last `SUSPECT_AFTER` calls failed: one generation at a time tries it until one succeeds; while
        another replica works, every few seconds."""
        self._failures = 0
        self._tokens = 0.0
        """Of the generations of this ingress, what a group shares counted once."""
        self._shared_tokens = 0.0
        """What was counted once in place of several times."""
        self._unexpected_tokens = 0.0
        """By how much the generations are longer than was expected, as far as known."""
        self._ingresses = 1
        self._set_share()

    @property
    def ongoing(self) -> int:
        """Generations of all ingress replicas that run or wait in the engine, as far as known."""
        return self.generations + self.of_others

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
            places = min(sequences, max(self._max_generations * LARGEST_PART, 1))
            tokens = min(tokens, self._max_tokens * LARGEST_PART)
        has_tokens = self._tokens + self._unexpected_tokens + tokens <= self._max_tokens
        return self.generations + places - 1 < self._max_generations and has_tokens

    def add(
        self,
        tokens: float,
        shared_tokens: float = 0.0,
        policy: str | None = None,
        cost: float = 0.0,
        sequences: int = 1,
    ) -> None:
        """Args:
        tokens: what the call needs of the KV cache at its end.
        shared_tokens: what it needs besides and another generation has there already.
        policy: the named policy that generates.
        cost: what its flow is charged, divided by its weight.
        sequences: the choices of the call.
        """
        self.turns.add(policy, cost)
        self.generations += sequences
        self._tokens += tokens
        self._shared_tokens += shared_tokens

    def remove(self, tokens: float, shared_tokens: float = 0.0, policy: str | None = None, sequences: int = 1) -> None:
        """With what `add` was called for it."""
        self.turns.remove(policy)
        self.generations -= sequences
        self._tokens -= tokens
        self._shared_tokens -= shared_tokens
        if not self.generations:
            self._tokens = self._shared_tokens = self._unexpected_tokens = 0.0

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
        """Whether the share of this ingress has changed.

        Args:
            ended: generations that are counted here and not in `load`, because they have ended.
        """
        self.turns.observe(load.policies, load.unnamed_has_adapter)
        ingresses = max(load.ingresses, 1)
        expected_tokens = self._tokens + self._shared_tokens
        self._unexpected_tokens = max(load.kv_tokens - expected_tokens, 0.0) if ingresses == 1 else 0.0
        of_others = max(load.ongoing_generations - self.generations + ended, 0) if ingresses > 1 else 0
        if (ingresses, of_others) == (self._ingresses, self.of_others):
            return False
        self._ingresses, self.of_others = ingresses, of_others
        self._set_share()
        return True

    def resize(self, capacity: EngineCapacity) -> None:
        self._capacity = capacity
        self.turns.most = capacity.adapters
        self._set_share()

    def _set_share(self) -> None:
        if math.isinf(self._factor):
            self._max_generations = self._max_tokens = math.inf
            return
        window = self._factor * self._capacity.sequences
        share = max(window - self.of_others, window / self._ingresses)
        self._max_generations = 1.0 if self.is_suspect else max(share, 1.0)
        self._max_tokens = self._capacity.kv_tokens * (1.0 if math.isinf(window) else share / window)
