"""The metrics that locust does not have: rollouts, turns, tokens, statuses, kinds of errors; of a process or a sum."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollout_load.outcomes import Outcome

SLOT_S = 5
"""Tokens are summed by so many seconds of the clock, so that a soak can be compared with its begin."""
QUARTERS = 4


@dataclass(slots=True)
class LoadTotals:
    """Counts since the run began. Those of a worker are sent to the master and begin anew with each report."""

    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    pushes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    slots: Counter[int] = field(default_factory=Counter)
    """Tokens by slot of the clock."""

    def add(self, outcome: Outcome, now_s: float) -> None:
        self.rollouts += outcome.rollouts
        self.turns += outcome.turns
        self.tokens += outcome.tokens
        self.statuses += outcome.statuses
        self.errors += outcome.errors
        self.slots[int(now_s) // SLOT_S] += outcome.tokens

    def merge(self, other: "LoadTotals") -> None:
        for name in ("rollouts", "turns", "tokens", "pushes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("statuses", "errors", "slots"):
            getattr(self, name).update(getattr(other, name))

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def message(self) -> dict[str, Any]:
        """What a worker sends. Pairs, because msgpack as locust uses it takes no numbers as keys of a map."""
        counts = {name: getattr(self, name) for name in ("rollouts", "turns", "tokens", "pushes")}
        pairs = {name: [list(pair) for pair in getattr(self, name).items()] for name in ("statuses", "errors", "slots")}
        return counts | pairs

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "LoadTotals":
        statuses, errors, slots = (Counter(dict(message[name])) for name in ("statuses", "errors", "slots"))
        rollouts, turns, tokens, pushes = (message[name] for name in ("rollouts", "turns", "tokens", "pushes"))
        return cls(rollouts, turns, tokens, pushes, statuses, errors, slots)

    def last_quarter_over_first(self) -> float | None:
        """Tokens of the last quarter of the run by those of its first one; `None` if there are too few slots to say."""
        if not self.slots:
            return None
        first, last = min(self.slots), max(self.slots)
        # The slots at both ends are cut by the begin and the end of the run.
        whole = [self.slots[slot] for slot in range(first + 1, last)]
        size = len(whole) // QUARTERS
        if not size or not sum(whole[:size]):
            return None
        return sum(whole[-size:]) / sum(whole[:size])
