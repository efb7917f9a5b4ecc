"""Which generator replica says other log-probabilities than the others. State machines without I/O.

Two replicas with the same weights agree up to rounding. How far they part is the statistic of
`deployments/rollout_records/ratios.py`.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.rollout_records.ratios import Sums

RECENT_COMPARISONS = 32
"""Comparisons that are remembered of each replica."""
LEAST_APART = 4
LEAST_OTHERS = 2
"""Replicas that a faulty one must differ from: between two that differ, nothing says which is at fault."""
SHARE_APART = 0.75
"""A sound replica differs from a faulty one too; with three replicas that is half of its comparisons."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One replica's generation compared with the score of another replica."""

    generated_by: str
    scored_by: str
    sums: Sums
    """Those of the tokens. A mean is NaN where a log-probability is."""


def comparison_of(generated_by: str, scored_by: str, generated: Sequence[float], scored: Sequence[float]) -> Comparison:
    """Compares the log-probabilities of the same tokens, at least one."""
    # Between two that are infinite there is no difference to tell: it is NaN too.
    with np.errstate(invalid="ignore"):
        return Comparison(generated_by, scored_by, Sums.of(np.subtract(generated, scored)))


class MismatchHistory:
    """Remembers the recent comparisons of each replica.

    Args:
        most_mean_ratio: two replicas differ if the mean ratio of a comparison is above this, or NaN.
    """

    def __init__(self, most_mean_ratio: float) -> None:
        self._most_mean_ratio = most_mean_ratio
        self._recent: defaultdict[str, deque[tuple[str, bool]]] = defaultdict(lambda: deque(maxlen=RECENT_COMPARISONS))
        """By replica: the other one of each comparison, and whether they differed."""

    def record(self, comparison: Comparison) -> bool:
        """Adds a comparison; returns whether the two replicas differ."""
        is_apart = not comparison.sums.mean_ratio <= self._most_mean_ratio
        self._recent[comparison.generated_by].append((comparison.scored_by, is_apart))
        self._recent[comparison.scored_by].append((comparison.generated_by, is_apart))
        return is_apart

    def keep_only(self, replicas: Collection[str]) -> None:
        """Forgets the comparisons in which other replicas took part."""
        for replica in [known for known in self._recent if known not in replicas]:
            self.forget(replica)

    def forget(self, replica: str) -> None:
        """Forgets the comparisons in which the replica took part."""
        self._recent.pop(replica, None)
        for known, recent in self._recent.items():
            kept = [(other, is_apart) for other, is_apart in recent if other != replica]
            self._recent[known] = deque(kept, maxlen=RECENT_COMPARISONS)

    def at_fault(self) -> str | None:
        """The replica that differs from at least `LEAST_OTHERS` others, in `SHARE_APART` of its comparisons.

        One at a time: the comparisons of the others with it say nothing of them.
        """
        shares = {replica: self._share_apart(replica) for replica in self._recent}
        worst = max(shares, key=shares.__getitem__, default=None)
        return worst if worst is not None and shares[worst] >= SHARE_APART else None

    def _share_apart(self, replica: str) -> float:
        """0 if too few comparisons say something."""
        recent = self._recent[replica]
        apart = [other for other, is_apart in recent if is_apart]
        if len(apart) < LEAST_APART or len(set(apart)) < LEAST_OTHERS:
            return 0.0
        return len(apart) / len(recent)
