"""Replica affinity: the turns of a rollout go to the replica that has its prefix cached. No I/O, no clock, no Ray.

A rollout that may play a further turn leases the tokens of its prefix in the KV cache of its replica, from the end of
a generation to the start of the next one. One whose lease has ended before is parked: its prefix counts as lost.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

GROUP_SLACK = 8
"""Rollouts that a replica may have more than the least loaded one before a group is split.

A group that stays together has its prompt computed once, but a large group must not overload one replica."""
NO_LOAD: Mapping[str, int] = {}


@dataclass(slots=True, eq=False)
class Assignment:
    """The replica of one rollout, `None` while it has none. The `avoided` replica failed its last call."""

    replica: str | None
    group: str
    avoided: str | None = None
    cached_tokens: int = 0
    """Tokens of the rollout that the replica has computed already: those of its last turn, or its group's prompt."""
    shared_tokens: int = 0
    """Tokens at the beginning of its prompt that another rollout of its group holds in the KV cache of the replica."""
    leased_tokens: int = 0
    """Tokens of the KV cache of the replica that are kept for its next turn; 0 while it generates or is parked."""
    computed_tokens: int = 0
    """Tokens of its last turn, wherever they were computed; 0 before the end of its first one."""


class ReplicaAffinity:
    """Assigns rollouts to replicas: the first turn to a least loaded one, later turns to the same one.

    Guarantees: a rollout keeps its replica while that one is listed, has not failed it, and the rollout is not moved;
    it begins on the replica of its group, or on a least loaded one if the group has none or that one has `GROUP_SLACK`
    more. The method is that of prime-rl's orchestrator: sticky to the least loaded replica, with an explicit release.
    """

    def __init__(self, choose: random.Random | None = None) -> None:
        """Begins without rollouts; `choose` breaks ties at random, so that ingress replicas do not all begin alike."""
        self._choose = choose or random.Random()
        self._assignments: dict[str, Assignment] = {}
        self._group_replicas: dict[str, tuple[str, int]] = {}
        """The replica on which a group began last, and the length of the prompt with which it began there."""
        self._group_sizes: Counter[str] = Counter()
        self._load: Counter[str] = Counter()
        self.leased: Counter[str] = Counter()
        """Tokens of all leases by replica."""
        self._idle: dict[str, dict[Assignment, int]] = {}
        """By replica, the rollouts with a lease that do not wait, the longest idle one first, each with the number of
        `note_time` since when."""
        self._times = 0

    def assignment_of(
        self,
        rollout_id: str,
        group: str,
        replicas: Collection[str],
        prompt_tokens: int = 0,
        load_of_others: Mapping[str, int] = NO_LOAD,
    ) -> Assignment:
        """The assignment of the rollout's next turn to one of `replicas`; to `None` if there are none.

        An unknown rollout becomes known, until it is released.

        Args:
            prompt_tokens: length of the turn's prompt.
            load_of_others: generations by replica that count as load beside the rollouts that are assigned here.
        """
        assignment = self._assignments.get(rollout_id)
        if assignment is None:
            assignment = self._assignments[rollout_id] = Assignment(None, group)
            self._group_sizes[group] += 1
        if assignment.replica not in replicas:
            self._unassign(assignment)
            self._assign(assignment, replicas, prompt_tokens, load_of_others)
        return assignment

    def move(self, rollout_id: str, replica: str) -> None:
        """Assigns a known rollout to another replica, where nothing of it is cached."""
        assignment = self._assignments[rollout_id]
        self._unassign(assignment)
        assignment.replica = replica
        self._load[replica] += 1

    def mark_failed(self, rollout_id: str) -> None:
        """Avoids the rollout's replica, which failed a call, for the next turn. Ignores unknown ids."""
        assignment = self._assignments.get(rollout_id)
        if assignment is not None:
            assignment.avoided = assignment.replica
            self._unassign(assignment)

    def release(self, rollout_id: str) -> None:
        """Forgets the rollout, which has ended. Ignores unknown ids."""
        assignment = self._assignments.pop(rollout_id, None)
        if assignment is None:
            return
        self._unassign(assignment)
        self._group_sizes[assignment.group] -= 1
        if not self._group_sizes[assignment.group]:
            del self._group_sizes[assignment.group]
            self._group_replicas.pop(assignment.group, None)

    def lease(self, assignment: Assignment, tokens: int | None = None) -> None:
        """Keeps so many tokens for the next turn of a rollout that is idle now; as many as before without a number."""
        tokens = assignment.leased_tokens if tokens is None else tokens
        self.end_lease(assignment)
        if assignment.replica is not None and tokens > 0:
            assignment.leased_tokens = tokens
            self.leased[assignment.replica] += tokens
            self._idle.setdefault(assignment.replica, {})[assignment] = self._times

    def end_idleness(self, assignment: Assignment) -> None:
        """Its next turn waits: it is not parked any more."""
        if assignment.replica in self._idle:
            self._idle[assignment.replica].pop(assignment, None)
            if not self._idle[assignment.replica]:
                del self._idle[assignment.replica]

    def end_lease(self, assignment: Assignment) -> None:
        """Its next turn starts, or never comes. Ignored without a lease."""
        self.end_idleness(assignment)
        if assignment.replica is not None and assignment.leased_tokens:
            self.leased -= Counter({assignment.replica: assignment.leased_tokens})
            assignment.leased_tokens = 0

    def park(self, replica: str, idle_times: int = 0) -> bool:
        """Ends the lease of the rollout that is idle longest. Returns whether there was one.

        Args:
            idle_times: it must have been idle for so many `note_time`.
        """
        longest = next(iter(self._idle.get(replica, ())), None)
        if longest is None or self._times - self._idle[replica][longest] < idle_times:
            return False
        self.end_lease(longest)
        longest.cached_tokens = longest.shared_tokens
        return True

    def idle_at(self, replica: str) -> int:
        """How many rollouts have a lease there and do not wait."""
        return len(self._idle.get(replica, ()))

    def note_time(self) -> None:
        self._times += 1

    def end_leases(self, replicas: Collection[str]) -> None:
        """Ends all leases of these replicas, whose caches are lost."""
        for assignment in self._assignments.values() if replicas else ():
            if assignment.replica in replicas:
                self.end_lease(assignment)
                assignment.cached_tokens = 0

    def _assign(
        self, assignment: Assignment, replicas: Collection[str], prompt_tokens: int, load_of_others: Mapping[str, int]
    ) -> None:
        candidates = [replica for replica in replicas if replica != assignment.avoided] or list(replicas)
        if not candidates:
            return
        load = {replica: self._load[replica] + load_of_others.get(replica, 0) for replica in candidates}
        least = min(load.values())
        replica, shared_tokens = self._group_replicas.get(assignment.group, ("", 0))
        if replica not in load or load[replica] > least + GROUP_SLACK:
            replica = self._choose.choice([candidate for candidate in candidates if load[candidate] == least])
            self._group_replicas[assignment.group] = (replica, prompt_tokens)
            shared_tokens = 0
        assignment.replica = replica
        assignment.cached_tokens = assignment.shared_tokens = min(shared_tokens, prompt_tokens)
        self._load[replica] += 1

    def _unassign(self, assignment: Assignment) -> None:
        self.end_lease(assignment)
        assignment.cached_tokens = assignment.shared_tokens = 0
        if assignment.replica is None:
            return
        self._load[assignment.replica] -= 1
        if not self._load[assignment.replica]:
            del self._load[assignment.replica]
        assignment.replica = None
