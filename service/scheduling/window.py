"""Limits of the generations of this ingress on one generator replica. State machines: no I/O, no clock, no Ray.

`ReplicaWindow` bounds the generations there. A call of a model server's API that asks for several choices counts as so
many generations.

`AdapterTurns` bounds the named policies that have generations there. An engine holds at most `max_loras` different
adapters in a batch, and passes over the generations of all others for as long as those have further ones. So a replica
gets generations of at most so many policies at once, and a policy for whose sake others wait too long has its turn
ended: no further generation of it starts until those that run have ended. Other ingress replicas do the same. Where all
together have more policies on the replica than its engine holds, each ends the turns of its own after a while, so that
the engine comes to those that it has passed over. Guarantees: no replica has generations of more than `most` named
policies from this ingress; a turn that was ended ends with the generations that run; a policy whose last generation
there has ended is no longer held back.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad


class AdapterTurns:
    """The turns on one replica. Generations of the policy without a name, `None`, need no adapter, unless its weights
    are one."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._running: Counter[str | None] = Counter()
        """Generations by policy."""
        self._ending: set[str | None] = set()
        self._elsewhere: frozenset[str | None] = frozenset()
        """Policies that have generations there from other ingress replicas only."""
        self._unnamed_has_adapter = False
        self._served: Counter[str | None] = Counter()
        """Charges to the flows of each policy in this turn while others were there."""

    @property
    def ending(self) -> int:
        """The number of policies that have had their turn and still have generations there."""
        return len(self._ending)

    @property
    def _adapters(self) -> int:
        """The number of adapters that the generations of this ingress need."""
        return len(self._running) - (None in self._running and not self._unnamed_has_adapter)

    def needs_turn(self, policy: str | None) -> bool:
        """Whether its generations need an adapter."""
        return policy is not None or self._unnamed_has_adapter

    def may_start_without_end_of(self, policy: str | None) -> bool:
        """Whether another policy could start although this one goes on."""
        return policy not in self._running or self._adapters < self.most

    def may_start(self, policy: str | None) -> bool:
        """Whether a generation of this policy may start."""
        if not self.needs_turn(policy):
            return True
        if policy in self._running:
            return policy not in self._ending
        return self._adapters < self.most

    def observe(self, policies: Collection[str], unnamed_has_adapter: bool) -> None:
        """Records the policies that have generations there, from all ingress replicas.

        Args:
            unnamed_has_adapter: whether an adapter without a name is current there.
        """
        self._unnamed_has_adapter = unnamed_has_adapter
        if not unnamed_has_adapter:
            self._ending.discard(None)
        self._elsewhere = frozenset(policies) - self._running.keys()
        if not self._is_crowded:
            self._served.clear()

    @property
    def _is_crowded(self) -> bool:
        """Whether the engine passes over some, because other ingress replicas have further policies there."""
        return bool(self._elsewhere) and self._adapters + len(self._elsewhere) > self.most

    def passes_over_others(self, policy: str | None, turn: float) -> bool:
        """Whether the policy has had more than a turn while the engine passes over those of other ingress replicas."""
        return self._is_crowded and self._served[policy] > turn

    def add(self, policy: str | None, cost: float = 0.0) -> None:
        """Counts a generation; `cost` is the charge to its flow, divided by the flow's weight."""
        self._running[policy] += 1
        if self._elsewhere:
            self._served[policy] += int(cost)

    def remove(self, policy: str | None) -> None:
        self._running[policy] -= 1
        if not self._running[policy]:
            del self._running[policy]
            del self._served[policy]
            self._ending.discard(policy)

    def end_turn(self, policy: str | None) -> None:
        """Lets no further generation of the policy start until those that run have ended."""
        if self.needs_turn(policy) and policy in self._running:
            self._ending.add(policy)


LARGEST_PART = 1 / 2
"""Part of the window, in generations and in tokens: a call of several choices that takes more starts when this is free.
"""
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
        """Begins empty; `factor` None lets every generation in."""
        self._capacity = capacity
        self._factor = math.inf if factor is None else factor
        self.turns = AdapterTurns(capacity.adapters)
        """Turns of the named policies whose generations are there."""
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
        self._shared_tokens = 0.0
        """Tokens that were counted once in place of several times."""
        self._unexpected_tokens = 0.0
        """Tokens by which the generations are longer than was expected, as far as known."""
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
        """Counts a call that starts.

        Args:
            tokens: tokens of the KV cache that the call needs at its end.
            shared_tokens: tokens that it needs besides and another generation has there already.
            policy: the named policy that generates.
            cost: the charge to its flow, divided by the flow's weight.
            sequences: the choices of the call.
        """
        self.turns.add(policy, cost)
        self.generations += sequences
        self._tokens += tokens
        self._shared_tokens += shared_tokens

    def remove(self, tokens: float, shared_tokens: float = 0.0, policy: str | None = None, sequences: int = 1) -> None:
        """Takes out a call, with the arguments of its `add`."""
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
        """Records a reported load. Returns whether the share of this ingress has changed.

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
