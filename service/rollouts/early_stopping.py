"""When enough of a request is done: who of those that still run can go."""

from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Generic, TypeVar

from rollout_client.contract import Keep

Rollout = TypeVar("Rollout", bound=Hashable)


class EarlyStopping(Generic[Rollout]):
    """Says, rollout by rollout, whom nobody needs any more.

    A group is full once `keep.per_group` of its rollouts have ended without error (by default all of them), and the
    request is done once `keep.groups` groups are full (by default never before its last rollout).
    """

    def __init__(self, keep: Keep, group_of: Mapping[Rollout, int]) -> None:
        self._groups = keep.groups
        self._group_of = group_of
        self._full_groups = 0
        self._running: dict[int, set[Rollout]] = {}
        for rollout, group in group_of.items():
            self._running.setdefault(group, set()).add(rollout)
        self._still_needed = {group: keep.per_group or len(rollouts) for group, rollouts in self._running.items()}

    def after(self, ended: Rollout, without_error: bool) -> Set[Rollout]:
        """Those that can be cancelled, now that this one has ended."""
        group = self._group_of[ended]
        self._running[group].discard(ended)
        if not without_error or self._still_needed[group] == 0:
            return frozenset()
        self._still_needed[group] -= 1
        if self._still_needed[group] > 0:
            return frozenset()
        self._full_groups += 1
        return self._release(self._running if self._full_groups == self._groups else (group,))

    def _release(self, groups: Iterable[int]) -> Set[Rollout]:
        released = {rollout for group in groups for rollout in self._running[group]}
        for group in groups:
            self._running[group].clear()
        return released
