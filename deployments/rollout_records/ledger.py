"""The mismatch ledger: what trainers' log-probabilities say about the service's, as a state machine without I/O.

Guarantees: its memory is bounded, whatever is reported; causes are looked for in the rollouts of one owner and policy
alone, which are one trainer's, and told to that owner, but for replicas that are at fault.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.rollout_records.comparison import ComparedRollout, crossed
from deployments.rollout_records.findings import (
    MismatchFinding,
    MismatchKind,
    RolloutPattern,
    Sums,
    findings_of,
    pattern_of,
    suspect_of,
    total,
)

RECENT_ROLLOUTS = 256
"""Reported rollouts of a trainer in which patterns are looked for."""
MOST_TRAINERS = 64
"""Trainers that are told apart; those that have reported last."""
PERIOD_S = 60.0
MOST_PERIODS = 120
MOST_VALUES = 256
"""Values of one attribute, such as versions, that are told apart; those that were seen last."""
MOST_WORST = 20
MOST_FINDINGS = 50
SUSPECT_ROLLOUTS = 4
"""Rollouts of a suspected replica that are scored again."""


@dataclass(slots=True)
class Cell:
    """Sums of the tokens of one value of an attribute."""

    sums: Sums = field(default_factory=Sums)
    largest: float = 1.0
    """The largest ratio of a token."""

    def add(self, ratios: np.ndarray, sizes: np.ndarray) -> None:
        if len(ratios):
            self.sums += Sums(len(ratios), float(sizes.sum()), float(ratios.sum()))
            self.largest = max(self.largest, float(ratios.max()))


@dataclass(frozen=True, slots=True)
class WorstRollout:
    """A rollout that parts from its trainer."""

    rollout_id: str
    owner: str
    mean_ratio: float
    largest_ratio: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A replica whose rollouts part from the trainer more than those of its siblings."""

    replica: str
    rollouts: tuple[tuple[str, str], ...]
    """Rollouts of its own to score on another replica, by owner and id."""
    usual_size: float
    """Mean of the absolute differences of its siblings' tokens."""


@dataclass(slots=True)
class Noted:
    """A finding and when it was made, first and last, in the ledger's seconds."""

    finding: MismatchFinding
    owner: str | None
    """Whose trainer it is about; `None` if it is about a replica."""
    since: float
    last: float


class MismatchLedger:
    """Collects compared rollouts.

    Args:
        most_mean_ratio: trainer and service part if the mean ratio of their probabilities is above this.
    """

    def __init__(self, most_mean_ratio: float) -> None:
        self._most_mean_ratio = most_mean_ratio
        self.all = Cell()
        self.rollouts = 0
        self.by: dict[str, OrderedDict[str, Cell]] = {}
        """By attribute and value."""
        self.history: OrderedDict[tuple[float, str, str], Cell] = OrderedDict()
        """By the beginning of the period, replica and version."""
        self._windows: OrderedDict[tuple[str, str], deque[RolloutPattern]] = OrderedDict()
        """By owner and policy, the recent rollouts."""
        self._changed: dict[tuple[str, str], None] = {}
        """Those to which rollouts were added since the last look."""
        self._worst: list[WorstRollout] = []
        self._findings: dict[tuple[MismatchKind, str | None, str | None], Noted] = {}
        """By kind, replica and owner."""
        self._cleared: dict[str, int] = {}
        """By replica that was suspected and is not at fault: until how many rollouts it is not suspected again."""

    def add(self, rollout: ComparedRollout, owner: str, now: float) -> None:
        """Adds a rollout at `now` seconds."""
        if not rollout.tokens:
            return
        ratios, sizes = rollout.ratios, np.abs(rollout.difference)
        self.rollouts += 1
        self.all.add(ratios, sizes)
        for attribute, labels in rollout.labels.items():
            cells = self.by.setdefault(attribute, OrderedDict())
            for start, end, value in labels:
                cells.setdefault(value, Cell()).add(ratios[start:end], sizes[start:end])
                cells.move_to_end(value)
            while len(cells) > MOST_VALUES:
                cells.popitem(last=False)
        period = now - now % PERIOD_S
        for start, end, replica, version in crossed(rollout.labels["replica"], rollout.labels["version"]):
            cell = self.history.setdefault((period, replica, version), Cell())
            cell.add(ratios[start:end], sizes[start:end])
        self._forget_before(period - (MOST_PERIODS - 1) * PERIOD_S)
        trainer = owner, rollout.labels["policy"][0].label
        window = self._windows.setdefault(trainer, deque(maxlen=RECENT_ROLLOUTS))
        window.append(pattern_of(rollout, owner))
        self._changed[trainer] = None
        self._windows.move_to_end(trainer)
        while len(self._windows) > MOST_TRAINERS:
            self._changed.pop(self._windows.popitem(last=False)[0], None)
        self._worst.append(WorstRollout(rollout.rollout_id, owner, float(ratios.mean()), float(ratios.max())))
        self._worst.sort(key=lambda one: one.mean_ratio, reverse=True)
        del self._worst[MOST_WORST * 8 :]

    def look(self, now: float) -> list[MismatchFinding]:
        """Looks for patterns in the recent rollouts of those who have reported; returns the findings that are new."""
        new = []
        for trainer in self._changed:
            found = findings_of(self._sound(self._windows[trainer]), self._most_mean_ratio)
            new += self._note(found, now, owner=trainer[0])
        return new

    def suspicion(self) -> Suspicion | None:
        """The replica to score again, if one parts from its siblings: one that was not cleared of it lately.

        Looks at those who have reported since the last call.
        """
        changed, self._changed = self._changed, {}
        for trainer in changed:
            window = self._windows[trainer]
            replica = suspect_of(window)
            if replica is None or self._cleared.get(replica, 0) > self.rollouts:
                continue
            # Until there is a verdict it is asked for once.
            self._cleared[replica] = self.rollouts + RECENT_ROLLOUTS
            own = [one for one in window if replica in one.by_replica]
            usual = total(sums for one in window for name, sums in one.by_replica.items() if name != replica)
            rollouts = tuple((one.owner, one.rollout_id) for one in own[-SUSPECT_ROLLOUTS:])
            return Suspicion(replica, rollouts, usual.mean_size)
        return None

    def convict(self, replica: str, message: str, now: float) -> list[MismatchFinding]:
        """The replica is at fault: what it made is looked at no more."""
        for trainer, window in self._windows.items():
            kept = [one for one in window if replica not in one.by_replica]
            self._windows[trainer] = deque(kept, maxlen=RECENT_ROLLOUTS)
        return self._note([MismatchFinding("replica", message, replica=replica)], now, owner=None)

    def findings(self, owner: str) -> list[Noted]:
        """Those about trainers of this owner, or replicas; the latest first."""
        told = [noted for noted in self._findings.values() if noted.owner in (None, owner)]
        return sorted(told, key=lambda noted: noted.last, reverse=True)

    def worst(self, owner: str) -> list[WorstRollout]:
        """Those of this owner, the worst first."""
        return [one for one in self._worst if one.owner == owner][:MOST_WORST]

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
            self._findings[key] = Noted(finding, owner, now if before is None else before.since, now)
        while len(self._findings) > MOST_FINDINGS:
            oldest = min(self._findings, key=lambda key: self._findings[key].last)
            del self._findings[oldest]
        return new

    def _forget_before(self, period: float) -> None:
        while self.history and next(iter(self.history))[0] < period:
            self.history.popitem(last=False)
        while len(self.history) > MOST_PERIODS * MOST_VALUES:
            self.history.popitem(last=False)
