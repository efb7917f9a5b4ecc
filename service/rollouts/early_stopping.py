"""Early stopping: which rollouts of a request can be cancelled because enough others have succeeded. No I/O."""

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Generic, TypeVar

from rollout_client.contract.rollouts import Keep

Rollout = TypeVar("Rollout", bound=Hashable)


class EarlyStopping(Generic[Rollout]):
    """Decides, each time that a rollout ends, which of the running ones are no longer needed.

    A group is full when `keep.per_group` of its rollouts have succeeded, by default all of them. The request is
    complete when `keep.groups` groups are full; by default it runs to the end of its last rollout. Each rollout is
    named as unneeded at most once, and never after its own end.
    """

    def __init__(self, keep: Keep, group_of: Mapping[Rollout, int]) -> None:
        """Begins with these rollouts running, each mapped to its group.

        With `keep.where` no number of full groups ends the request: `GroupSelection` does.
        """
        self._groups_needed = None if keep.where is not None else keep.groups
        self._per_group = keep.per_group
        self._group_of: dict[Rollout, int] = {}
        """The groups of the rollouts that have not ended: those that have are not kept in memory."""
        self._full_groups = 0
        self._running: dict[int, set[Rollout]] = {}
        self._still_needed: dict[int, int] = {}
        self.add(group_of)

    def add(self, group_of: Mapping[Rollout, int]) -> None:
        """Further groups run, with all their rollouts."""
        self._group_of.update(group_of)
        added: dict[int, set[Rollout]] = {}
        for rollout, group in group_of.items():
            added.setdefault(group, set()).add(rollout)
        self._running.update(added)
        self._still_needed |= {group: self._per_group or len(rollouts) for group, rollouts in added.items()}

    def unneeded_after(self, ended: Rollout, succeeded: bool) -> Set[Rollout]:
        """The running rollouts that nobody needs, now that this one has ended. A rollout ends once: later calls for it
        change nothing."""
        group = self._group_of.pop(ended, None)
        if group is None:
            return frozenset()
        running = self._running.get(group, set())
        running.discard(ended)
        if not running:
            self._running.pop(group, None)
        if not succeeded or self._still_needed[group] == 0:
            return frozenset()
        self._still_needed[group] -= 1
        if self._still_needed[group] > 0:
            return frozenset()
        self._full_groups += 1
        return self._take_running(self._running if self._full_groups == self._groups_needed else (group,))

    def _take_running(self, groups: Iterable[int]) -> Set[Rollout]:
        return {rollout for group in tuple(groups) for rollout in self._running.pop(group, ())}
