"""Which replica a rollout_id plays on: the one that has its prefix. No I/O, no Ray."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_SLACK = 8
"""A prompt is computed once where its group stays together, but a group may be larger than what one replica should get:
it stays together while that replica has at most this many conversations more than the least loaded."""


@dataclass(slots=True)
class Home:
    """`replica` is `None` once it was lost; it is then `avoided`, if there is another."""

    replica: str | None
    group: str
    avoided: str | None = None


class ReplicaAffinity:
    """Conversations stay where they began, until they end; new ones go to the least loaded replica.

    Guarantees: a rollout_id keeps its replica as long as that one is there and has not been `lost`; a new one that
    shares its prompt with no other goes to a replica that has the fewest. After "sticky to the least loaded, with an
    explicit release" in prime-rl's orchestrator.
    """

    def __init__(self, choose: random.Random | None = None) -> None:
        """`choose` breaks ties, so that several ingress replicas do not all begin with the same generator."""
        self._choose = choose or random.Random()
        self._homes: dict[str, Home] = {}
        self._group_homes: dict[str, str] = {}
        self._group_sizes: Counter[str] = Counter()
        self._load: Counter[str] = Counter()

    def load_of(self, replica: str) -> int:
        """Conversations at home there."""
        return self._load[replica]

    def home_of(self, rollout_id: str, group: str, replicas: Sequence[str]) -> str | None:
        """The replica for its next turn, of those that there are; `None` if there are none.

        Conversations that are not known become so and stay until they are released.
        """
        home = self._homes.get(rollout_id)
        if home is None:
            home = self._homes[rollout_id] = Home(None, group)
            self._group_sizes[group] += 1
        if home.replica not in replicas:
            self._leave(home)
            self._settle(home, replicas)
        return home.replica

    def lost(self, rollout_id: str) -> None:
        """Its replica broke under it: the next turn is played on another, if there is one."""
        home = self._homes.get(rollout_id)
        if home is not None:
            home.avoided = home.replica
            self._leave(home)

    def release(self, rollout_id: str) -> None:
        """The rollout_id has ended; one that is not known is none."""
        home = self._homes.pop(rollout_id, None)
        if home is None:
            return
        self._leave(home)
        self._group_sizes[home.group] -= 1
        if not self._group_sizes[home.group]:
            del self._group_sizes[home.group]
            self._group_homes.pop(home.group, None)

    def _settle(self, home: Home, replicas: Sequence[str]) -> None:
        candidates = [replica for replica in replicas if replica != home.avoided] or replicas
        if not candidates:
            return
        least = min(self._load[replica] for replica in candidates)
        replica = self._group_homes.get(home.group, "")
        if replica not in candidates or self._load[replica] > least + GROUP_SLACK:
            replica = self._choose.choice([candidate for candidate in candidates if self._load[candidate] == least])
            self._group_homes[home.group] = replica
        home.replica = replica
        self._load[replica] += 1

    def _leave(self, home: Home) -> None:
        if home.replica is None:
            return
        self._load[home.replica] -= 1
        if not self._load[home.replica]:
            del self._load[home.replica]
        home.replica = None
