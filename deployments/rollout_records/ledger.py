"""The mismatch ledger: what trainers' log-probabilities say about the service's, as a state machine without I/O.

Guarantees: its memory is bounded for each owner, whatever is reported, so that what one owner reports pushes out
nothing of another one; causes are looked for in the rollouts of one owner and policy alone, which are one trainer's,
and told to that owner, but for replicas that are at fault.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from deployments.rollout_records.comparison import ComparedRollout, Sums, totals_by
from deployments.rollout_records.findings import MismatchFinding, findings_of, suspect_of
from deployments.rollout_records.trials import MadeRollout, ReplicaTrials, Vote, keep_newest

RECENT_ROLLOUTS = 256
"""Reported rollouts of a trainer in which patterns are looked for."""
MOST_TRAINERS = 8
"""Policies of one owner whose trainers are told apart."""
MOST_VALUES = 256
"""Values of one attribute, such as versions, that are told apart for an owner; and replicas that were at fault."""
MOST_WORST = 20
NEW_AFTER_S = 7200.0
"""A cause that was not found for so long is new again."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A replica whose rollouts part from the trainer more than those of its siblings."""

    replica: str
    rollouts: tuple[MadeRollout, ...]
    """Rollouts of its own to score again: on the replica, and on two others."""


@dataclass(slots=True)
class _OwnedReports:
    """The reports of one owner."""

    by: defaultdict[str, dict[str, Sums]] = field(default_factory=lambda: defaultdict(dict))
    """By attribute and value."""
    windows: dict[str, deque[ComparedRollout]] = field(default_factory=dict)
    """By policy, the recent rollouts."""
    worst: dict[str, Sums] = field(default_factory=dict)
    """By rollout, the worst first."""
    findings: dict[str, MismatchFinding] = field(default_factory=dict)
    """By kind."""


class MismatchLedger:
    """Collects compared rollouts.

    Args:
        most_mean_ratio: trainer and service part if the mean ratio of their probabilities is above this.
    """

    def __init__(self, most_mean_ratio: float) -> None:
        self._most_mean_ratio = most_mean_ratio
        self.all = Sums()
        self.rollouts = 0
        self._owners: defaultdict[str, _OwnedReports] = defaultdict(_OwnedReports)
        self._changed: dict[tuple[str, str], None] = {}
        """Owners and policies to which rollouts were added since the last look."""
        self._convicted: dict[str, MismatchFinding] = {}
        """By replica."""
        self._trials = ReplicaTrials()

    @property
    def by(self) -> dict[str, dict[str, Sums]]:
        """By attribute and value, of all owners."""
        of_owners = [owned.by for owned in self._owners.values()]
        attributes = dict.fromkeys(chain.from_iterable(of_owners))
        return {name: totals_by(chain.from_iterable(by[name].items() for by in of_owners)) for name in attributes}

    def add(self, rollout: ComparedRollout, owner: str) -> None:
        if not rollout.sums.tokens:
            return
        self.rollouts += 1
        self.all += rollout.sums
        owned = self._owners[owner]
        for attribute, values in {**rollout.by, "policy": {rollout.policy: rollout.sums}}.items():
            kept = owned.by[attribute]
            for value, sums in values.items():
                keep_newest(kept, value, kept.get(value, Sums()) + sums, MOST_VALUES)
        window = owned.windows.get(rollout.policy) or deque(maxlen=RECENT_ROLLOUTS)
        window.append(rollout)
        keep_newest(owned.windows, rollout.policy, window, MOST_TRAINERS)
        self._changed[owner, rollout.policy] = None
        worst = owned.worst | {rollout.rollout_id: rollout.sums}
        by_ratio = sorted(worst.items(), key=lambda one: one[1].mean_ratio, reverse=True)
        owned.worst = dict(by_ratio[:MOST_WORST])

    def look(self, now: float) -> tuple[list[MismatchFinding], Suspicion | None]:
        """Looks for patterns in the recent rollouts of those who have reported since the last call.

        Returns:
            The findings that are new, and a replica that parts from its siblings, if there are rollouts of it that are
            to be scored again.
        """
        changed, self._changed = self._changed, {}
        new, suspicion = list[MismatchFinding](), None
        for owner, policy in changed:
            owned = self._owners[owner]
            window: Sequence[ComparedRollout] = owned.windows.get(policy) or ()
            suspect = suspect_of(window)
            made = [one for one in window if suspect in one.replicas]
            # The rollouts of a replica that is suspected have a pattern of their own.
            sound = [one for one in window if suspect not in one.replicas]
            for finding in findings_of(sound, self._most_mean_ratio):
                before = owned.findings.get(finding.kind)
                if before is None or now - before.last > NEW_AFTER_S:
                    new.append(finding)
                owned.findings[finding.kind] = replace(finding, last=now)
            if suspect is not None and suspicion is None:
                rollouts = [MadeRollout(owner, one.rollout_id, one.group) for one in reversed(made)]
                if to_check := self._trials.to_check(suspect, rollouts, now):
                    suspicion = Suspicion(suspect, tuple(to_check))
        return new, suspicion

    def vote(self, replica: str, vote: Vote, now: float) -> str | None:
        """A rollout of a suspicion was scored, and says this. Returns why the replica is at fault, if it is by this.

        What it made is then looked at no more.
        """
        if (reason := self._trials.vote(replica, vote, now)) is None:
            return None
        for owned in self._owners.values():
            for policy, window in owned.windows.items():
                kept = [one for one in window if replica not in one.replicas]
                owned.windows[policy] = deque(kept, maxlen=RECENT_ROLLOUTS)
        finding = MismatchFinding("replica", f"{reason} It was taken out of service.", replica, now)
        keep_newest(self._convicted, replica, finding, MOST_VALUES)
        return reason

    def findings(self, owner: str) -> list[MismatchFinding]:
        """Those about trainers of this owner, or replicas; the latest first."""
        told = [*self._owners[owner].findings.values(), *self._convicted.values()]
        return sorted(told, key=lambda finding: finding.last, reverse=True)

    def worst(self, owner: str) -> Mapping[str, Sums]:
        """The rollouts of this owner that part the most from their trainer, by id, the worst first."""
        return self._owners[owner].worst
