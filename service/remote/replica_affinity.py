"""Replica affinity: every turn of a rollout goes to the replica that has its prefix cached. No I/O, no Ray."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_SLACK = 8
"""How many more rollouts than the least loaded replica a replica may have before a group is split.

A group that stays together has its prompt computed once, but a large group must not overload one replica."""


@dataclass(slots=True)
class Assignment:
    """The replica of one rollout, `None` while it has none. The `avoided` replica failed its last call."""

    replica: str | None
    group: str
    avoided: str | None = None


class ReplicaAffinity:
    """Assigns rollouts to replicas: the first turn to a least loaded one, later turns to the same one.

    Guarantees: a rollout keeps its replica while that one is listed and has not failed it; it begins on the replica of
    its group, or on one with the fewest rollouts if the group has none or that one has `GROUP_SLACK` more. The method
    is that of prime-rl's orchestrator: sticky to the least loaded replica, with an explicit release.
    """

    def __init__(self, choose: random.Random | None = None) -> None:
        """Args: `choose` breaks ties at random, so that not all ingress replicas begin with the same generator."""
        self._choose = choose or random.Random()
        self._assignments: dict[str, Assignment] = {}
        self._group_replicas: dict[str, str] = {}
        self._group_sizes: Counter[str] = Counter()
        self._load: Counter[str] = Counter()

    def load_of(self, replica: str) -> int:
        """How many rollouts are assigned to the replica."""
        return self._load[replica]

    def replica_for(self, rollout_id: str, group: str, replicas: Sequence[str]) -> str | None:
        """The replica, out of `replicas`, for the rollout's next turn; `None` if there are none.

        An unknown rollout becomes known, until it is released.
        """
        assignment = self._assignments.get(rollout_id)
        if assignment is None:
            assignment = self._assignments[rollout_id] = Assignment(None, group)
            self._group_sizes[group] += 1
        if assignment.replica not in replicas:
            self._unassign(assignment)
            self._assign(assignment, replicas)
        return assignment.replica

    def mark_failed(self, rollout_id: str) -> None:
        """The rollout's replica failed a call: the next turn goes to another, if there is one. Ignores unknown ids."""
        assignment = self._assignments.get(rollout_id)
        if assignment is not None:
            assignment.avoided = assignment.replica
            self._unassign(assignment)

    def release(self, rollout_id: str) -> None:
        """Forgets the rollout, which has ended. Unknown ids are ignored."""
        assignment = self._assignments.pop(rollout_id, None)
        if assignment is None:
            return
        self._unassign(assignment)
        self._group_sizes[assignment.group] -= 1
        if not self._group_sizes[assignment.group]:
            del self._group_sizes[assignment.group]
            self._group_replicas.pop(assignment.group, None)

    def _assign(self, assignment: Assignment, replicas: Sequence[str]) -> None:
        candidates = [replica for replica in replicas if replica != assignment.avoided] or replicas
        if not candidates:
            return
        least = min(self._load[replica] for replica in candidates)
        replica = self._group_replicas.get(assignment.group, "")
        if replica not in candidates or self._load[replica] > least + GROUP_SLACK:
            replica = self._choose.choice([candidate for candidate in candidates if self._load[candidate] == least])
            self._group_replicas[assignment.group] = replica
        assignment.replica = replica
        self._load[replica] += 1

    def _unassign(self, assignment: Assignment) -> None:
        if assignment.replica is None:
            return
        self._load[assignment.replica] -= 1
        if not self._load[assignment.replica]:
            del self._load[assignment.replica]
        assignment.replica = None
