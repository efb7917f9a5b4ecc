"""The mismatch ledger: what trainers' log-probabilities say about the service's, as a state machine without I/O.

Guarantees: its memory is bounded, whatever is reported, and what one owner reports pushes out that owner's alone, as
long as the others have less; causes are looked for in the rollouts of one owner and policy alone, which are one
trainer's, and told to that owner, but for replicas that are at fault.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from deployments.rollout_records.book import OwnedValues
from deployments.rollout_records.comparison import ComparedRollout
from deployments.rollout_records.findings import (
    MismatchFinding,
    MismatchKind,
    RolloutPattern,
    findings_of,
    pattern_of,
    suspect_of,
)
from deployments.rollout_records.ratios import Sums, TokenLabels, sums_by, totals_by
from deployments.rollout_records.trials import MadeRollout, ReplicaTrials, Vote

NO_TOKENS = Sums()

RECENT_ROLLOUTS = 256
"""Reported rollouts of a trainer in which patterns are looked for."""
MOST_TRAINERS = 64
"""Trainers that are told apart."""
PERIOD_S = 60.0
MOST_PERIODS = 120
MOST_VALUES = 256
"""Values of one attribute, such as versions, that are told apart, of all owners together."""
MOST_HISTORY = MOST_PERIODS * MOST_VALUES
"""Periods of a replica and version, of all owners together."""
MOST_WORST = 20
MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A replica whose rollouts part from the trainer more than those of its siblings."""

    replica: str
    rollouts: tuple[MadeRollout, ...]
    """Rollouts of its own to score again: on the replica, and on two others."""


class MismatchLedger:
    """Collects compared rollouts.

    Args:
        most_mean_ratio: trainer and service part if the mean ratio of their probabilities is above this.
    """

    def __init__(self, most_mean_ratio: float) -> None:
        self._most_mean_ratio = most_mean_ratio
        self.all = NO_TOKENS
        self.rollouts = 0
        self._by: dict[str, OwnedValues[str, Sums]] = {}
        """By attribute; by owner and value."""
        self._history = OwnedValues[tuple[float, str, str], Sums](MOST_HISTORY)
        """By owner; by the beginning of the period, replica and version."""
        self._windows = OwnedValues[str, deque[RolloutPattern]](MOST_TRAINERS)
        """By owner and policy, the recent rollouts."""
        self._changed: dict[tuple[str, str], None] = {}
        """Those to which rollouts were added since the last look."""
        self._worst: dict[str, dict[str, Sums]] = {}
        """By owner and rollout, the worst first."""
        self._findings: dict[tuple[MismatchKind, str | None, str | None], MismatchFinding] = {}
        """By kind, replica and owner, who is `None` if it is about a replica."""
        self._trials = ReplicaTrials()

    @property
    def by(self) -> dict[str, dict[str, Sums]]:
        """By attribute and value."""
        return {attribute: totals_by(of_owner[1:] for of_owner in values) for attribute, values in self._by.items()}

    @property
    def history(self) -> dict[tuple[float, str, str], Sums]:
        """By the beginning of the period, replica and version, in this order."""
        return dict(sorted(totals_by(of_owner[1:] for of_owner in self._history).items()))

    def add(self, rollout: ComparedRollout, owner: str, now: float) -> None:
        """Adds a rollout at `now` seconds."""
        if not rollout.tokens:
            return
        sums = rollout.sums
        self.rollouts += 1
        self.all += sums
        for attribute in rollout.labels:
            values = self._by.setdefault(attribute, OwnedValues(MOST_VALUES))
            for value, of_value in rollout.sums_by(attribute).items():
                values.set(owner, value, (values.get(owner, value) or NO_TOKENS) + of_value)
        period = now - now % PERIOD_S
        replicas, versions = rollout.labels["replica"], rollout.labels["version"]
        both = [*product(replicas.names, versions.names)]
        made_by = TokenLabels(both, replicas.codes * len(versions.names) + versions.codes)
        for made, of_made in sums_by(made_by, rollout.difference).items():
            key = (period, *made)
            self._history.set(owner, key, (self._history.get(owner, key) or NO_TOKENS) + of_made)
        self._history.drop_oldest_while(lambda key, _: key[0] < period - (MOST_PERIODS - 1) * PERIOD_S)
        policy = rollout.labels["policy"].names[0]
        window = self._windows.get(owner, policy) or deque(maxlen=RECENT_ROLLOUTS)
        window.append(pattern_of(rollout, owner))
        self._windows.set(owner, policy, window)
        self._changed[owner, policy] = None
        worst = self._worst.get(owner, {}) | {rollout.rollout_id: sums}
        by_ratio = sorted(worst.items(), key=lambda one: one[1].mean_ratio, reverse=True)
        self._worst[owner] = dict(by_ratio[:MOST_WORST])

    def look(self, now: float) -> list[MismatchFinding]:
        """Looks for patterns in the recent rollouts of those who have reported; returns the findings that are new."""
        new = []
        for owner, policy in self._changed:
            if (window := self._windows.get(owner, policy)) is not None:
                new += self._note(findings_of(self._sound(window), self._most_mean_ratio), now, owner)
        return new

    def suspicion(self, now: float) -> Suspicion | None:
        """A replica that parts from its siblings, and rollouts of it that are to be scored again now.

        Looks at those who have reported since the last call.
        """
        changed, self._changed = self._changed, {}
        for trainer in changed:
            window = self._windows.get(*trainer) or ()
            if (replica := suspect_of(window)) is None:
                continue
            made = [one for one in reversed(window) if replica in one.by_replica]
            rollouts = [MadeRollout(one.owner, one.rollout_id, one.group) for one in made]
            if to_check := self._trials.to_check(replica, rollouts, now):
                return Suspicion(replica, tuple(to_check))
        return None

    def vote(self, replica: str, vote: Vote, now: float) -> str | None:
        """A rollout of a suspicion was scored, and says this. Returns why the replica is at fault, if it is by this.

        What it made is then looked at no more.
        """
        trial = self._trials.vote(replica, vote, now)
        if trial is None:
            return None
        for owner, policy, window in list(self._windows):
            kept = [one for one in window if replica not in one.by_replica]
            self._windows.set(owner, policy, deque(kept, maxlen=RECENT_ROLLOUTS))
        reason = (
            f"Generator replica {replica} computes other log-probabilities than its siblings: of {len(trial.votes)} "
            f"rollouts that it and two others have scored again, {trial.against} say so."
        )
        finding = MismatchFinding("replica", f"{reason} It was taken out of service.", replica=replica)
        self._note([finding], now, owner=None)
        return reason

    def findings(self, owner: str) -> list[MismatchFinding]:
        """Those about trainers of this owner, or replicas; the latest first."""
        told = [finding for key, finding in self._findings.items() if key[2] in (None, owner)]
        return sorted(told, key=lambda finding: finding.last, reverse=True)

    def worst(self, owner: str) -> Mapping[str, Sums]:
        """The rollouts of this owner that part the most from their trainer, by id, the worst first."""
        return self._worst.get(owner, {})

    def _sound(self, window: Sequence[RolloutPattern]) -> list[RolloutPattern]:
        """The window without the rollouts of a replica that is suspected: they have a pattern of their own."""
        suspect = suspect_of(window)
        return [one for one in window if suspect is None or suspect not in one.by_replica]

    def _note(self, findings: Iterable[MismatchFinding], now: float, owner: str | None) -> list[MismatchFinding]:
        new = []
        for finding in findings:
            key = finding.kind, finding.replica, owner
            before = self._findings.get(key)
            if before is None or now - before.last > PERIOD_S * MOST_PERIODS:
                new.append(finding)
            self._findings[key] = replace(finding, since=now if before is None else before.since, last=now)
        while len(self._findings) > MOST_FINDINGS:
            oldest = min(self._findings, key=lambda key: self._findings[key].last)
            del self._findings[oldest]
        return new
