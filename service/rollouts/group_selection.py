"""Which rollouts of a request are needed: early stopping, and the groups that pass its `keep.where`. No I/O.

`EarlyStopping` says which rollouts can be cancelled because enough others have succeeded. `GroupSelection` selects the
groups that pass, and draws further ones ahead.

Guarantees of the selection: the groups that are kept are the first that pass, in the order of their samples; so they,
and those that were dropped before the last of them, depend on the verdicts alone and not on the order in which groups
end. A group is decided once, when it and all before it have ended. While further groups are needed and may be drawn,
some are in flight; never more than `most_at_once`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from statistics import mean, pstdev
from typing import Generic, TypeVar

from rollout_client.contract.rollouts import Keep, SampleResult
from rollout_client.contract.selection import Condition, GroupConditions, GroupCounts
from service.rollouts.metrics import STATUSES_WITH_FINAL_REWARD

PRIOR_VERDICTS = 4
"""Groups that count as passed before any has ended, so that the first verdicts do not double what is in flight."""
NOT_FULL = "not_full"


class GroupSelection:
    """The groups of one request. Each is known by the place of its sample among those that may be drawn."""

    def __init__(self, groups: int, most_drawn: int, most_at_once: int) -> None:
        """Begins with nothing drawn.

        Args:
            groups: how many are to be kept.
            most_drawn: how many may be drawn.
            most_at_once: how many may be in flight, at least `groups`.
        """
        self._groups = groups
        self._most_drawn = most_drawn
        self._most_at_once = most_at_once
        self._begun = 0
        self._ended = 0
        self._passed = 0
        self._verdicts: dict[int, str | None] = {}
        """By place, for groups that have ended and are not decided: why one is dropped, or `None` if it passes."""
        self.decided = 0
        """How many groups are decided: those of the first so many samples."""
        self._kept = 0
        self._dropped: Counter[str] = Counter()

    @property
    def is_done(self) -> bool:
        """Whether nothing that is drawn or in flight can change which groups are kept."""
        return self._kept == self._groups or self.decided == self._most_drawn

    @property
    def counts(self) -> GroupCounts:
        """The counts for the answer."""
        return GroupCounts(
            drawn=self.decided, kept=self._kept, dropped=dict(self._dropped), ahead=self._begun - self.decided
        )

    def draw(self, at_least: int = 0) -> range:
        """The places of the groups that begin now.

        As many are in flight as the share that has passed so far suggests: then those that fail have been replaced
        before they end.

        Args:
            at_least: begins this many, also if they are more than are in flight otherwise: those that another process
                has begun.
        """
        needed = self._groups - self._passed
        share = (self._passed + PRIOR_VERDICTS) / (self._ended + PRIOR_VERDICTS)
        wanted = min(math.ceil(needed / share), self._most_at_once) if needed > 0 else 0
        further = max(wanted - (self._begun - self._ended), at_least - self._begun, 0)
        begin = self._begun
        self._begun = min(begin + further, self._most_drawn)
        return range(begin, self._begun)

    def stop_drawing(self) -> None:
        """Draws no group any more."""
        self._most_drawn = self._begun

    def end(self, place: int, fault: str | None) -> list[tuple[int, bool]]:
        """Records that all rollouts of a group have ended. Returns the groups that are decided by it, in order.

        Each is the place of its sample, and whether it is kept.

        Args:
            fault: why the group is dropped; `None` if it passes.
        """
        self._ended += 1
        self._passed += fault is None
        self._verdicts[place] = fault
        decided: list[tuple[int, bool]] = []
        while self.decided in self._verdicts and not self.is_done:
            fault = self._verdicts.pop(self.decided)
            decided.append((self.decided, fault is None))
            self.decided += 1
            if fault is None:
                self._kept += 1
            else:
                self._dropped[fault] += 1
        return decided

    def unneeded(self) -> range:
        """The places of groups that were begun and cannot be kept: enough before them have passed."""
        if self._passed < self._groups:
            return range(0)
        passed = sorted(place for place, fault in self._verdicts.items() if fault is None)
        missing = self._groups - self._kept
        return range(passed[missing - 1] + 1 if missing else self.decided, self._begun)


def fault_of(results: Sequence[SampleResult], where: GroupConditions, full: int) -> str | None:
    """Why a group whose rollouts have all ended is dropped: the first condition that it fails; `None` if it passes.

    Args:
        full: how many of its rollouts must have been played to their ends.
    """
    played = [result for result in results if result.status in STATUSES_WITH_FINAL_REWARD]
    if len(played) < full:
        return NOT_FULL
    for condition in where.conditions():
        values = _values_of(condition, played)
        if not values:
            return f"rewards.{condition.reward}.missing"
        # Both compute with fractions: equal rewards have no spread by rounding, and are their own mean.
        value = mean(values) if condition.statistic == "mean" else pstdev(values)
        if (broken := condition.bounds.broken_by(value)) is not None:
            return f"{condition.path}.{broken}"
    return None


def _values_of(condition: Condition, played: Sequence[SampleResult]) -> list[float]:
    if condition.reward is None:
        return [result.total_reward for result in played if result.total_reward is not None]
    return [result.rewards[condition.reward] for result in played if condition.reward in result.rewards]


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
        for rollout, group in group_of.items():
            self._running.setdefault(group, set()).add(rollout)
        for group in set(group_of.values()):
            self._still_needed[group] = self._per_group or len(self._running[group])

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
        unneeded = list(self._running) if self._full_groups == self._groups_needed else [group]
        return {rollout for group in unneeded for rollout in self._running.pop(group, ())}
