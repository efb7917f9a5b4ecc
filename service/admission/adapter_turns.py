"""Which named policies have generations on one replica at a time. A state machine: no I/O, no clock, no Ray.

An engine holds at most `max_loras` different adapters in a batch, and passes over the generations of all others for as
long as those have further ones. So a replica gets generations of at most so many policies at once, and a policy for
whose sake others wait too long has its turn ended: no further generation of it starts until those that run have ended.

Other ingress replicas do the same. Where all together have more policies on the replica than its engine holds, each
ends the turns of its own after a while, so that the engine comes to those that it has passed over.

Guarantees: no replica has generations of more than `most` named policies from this ingress; a turn that was ended ends
with the generations that run; a policy whose last generation there has ended is no longer held back.
"""

import math
from collections import Counter
from collections.abc import Collection

UNNAMED = ""
"""Stands for the policy without a name."""


class AdapterTurns:
    """Those of one replica. Generations that name no policy need no adapter, unless one without a name is current."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._running: Counter[str] = Counter()
        """Generations by policy."""
        self._ending: set[str] = set()
        self._elsewhere: frozenset[str] = frozenset()
        """Policies that have generations there from other ingress replicas only."""
        self._unnamed_has_adapter = False
        self._served: Counter[str] = Counter()
        """By policy, what its flows were charged in this turn while others were there."""

    @property
    def ending(self) -> int:
        """How many policies have had their turn and still have generations there."""
        return len(self._ending)

    @property
    def _adapters(self) -> int:
        """How many the generations of this ingress need."""
        return len(self._running) - (UNNAMED in self._running and not self._unnamed_has_adapter)

    def needs_turn(self, policy: str | None) -> bool:
        """Whether its generations need an adapter."""
        return policy is not None or self._unnamed_has_adapter

    def may_start_without_end_of(self, policy: str | None) -> bool:
        """Whether another policy could start although this one goes on."""
        return (policy or UNNAMED) not in self._running or self._adapters < self.most

    def may_start(self, policy: str | None) -> bool:
        """Whether a generation of this policy may start."""
        name = policy or UNNAMED
        if not self.needs_turn(policy):
            return True
        if name in self._running:
            return name not in self._ending
        return self._adapters < self.most

    def observe(self, policies: Collection[str], unnamed_has_adapter: bool) -> None:
        """The replica has reported which policies have generations there, from all ingress replicas.

        Args:
            unnamed_has_adapter: whether an adapter without a name is current there.
        """
        self._unnamed_has_adapter = unnamed_has_adapter
        if not unnamed_has_adapter:
            self._ending.discard(UNNAMED)
        self._elsewhere = frozenset(policies) - self._running.keys()
        if not self._is_crowded:
            self._served.clear()

    @property
    def _is_crowded(self) -> bool:
        """Whether the engine passes over some, because other ingress replicas have further policies there."""
        return bool(self._elsewhere) and self._adapters + len(self._elsewhere) > self.most

    def passes_over_others(self, policy: str | None, turn: float) -> bool:
        """Whether the policy has had more than a turn while the engine passes over those of other ingress replicas."""
        return self._is_crowded and self._served[policy or UNNAMED] > turn

    def add(self, policy: str | None, cost: float = 0.0) -> None:
        """Args: `cost` is what the generation's flow is charged for it, divided by its weight."""
        name = policy or UNNAMED
        self._running[name] += 1
        if self._elsewhere:
            self._served[name] += int(cost)

    def remove(self, policy: str | None) -> None:
        name = policy or UNNAMED
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
            del self._served[name]
            self._ending.discard(name)

    def end_turn(self, policy: str | None) -> None:
        """No further generation of it starts until those that run have ended."""
        name = policy or UNNAMED
        if self.needs_turn(policy) and name in self._running:
            self._ending.add(name)
