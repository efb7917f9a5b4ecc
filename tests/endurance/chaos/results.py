"""The results of rounds, and what they come to by kind."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One round: all games were played, and one part was struck meanwhile."""

    kind: str
    rollouts: int
    seconds: float
    """Until the last rollout came back."""
    recovered_after_s: float | None
    """Seconds after the strike in which the part was replaced; `None` if it was not in time."""
    lost: int
    twice: int
    changed: int
    errors: list[str]
    turns_again: int
    """Steps of turns that had been stepped before."""
    most_turns_again: int
    """Of one rollout."""

    def problems(self) -> list[str]:
        """A sentence for each thing that does not hold."""
        found = {"lost": self.lost, "twice": self.twice, "changed": self.changed}
        problems = [f"{count} of {self.rollouts} rollouts {what}" for what, count in found.items() if count]
        if self.most_turns_again > 1:
            problems.append(f"{self.most_turns_again} turns of one rollout were done twice")
        if self.recovered_after_s is None:
            problems.append("what was struck was not replaced in time")
        return [f"{self.kind}: {problem}" for problem in [*problems, *self.errors]]


def in_turn(kinds: Sequence[str], rounds: int, before: Sequence[Round], minutes: float) -> Iterator[str]:
    """The kinds by turns, until each has `rounds`, those that were played `before` among them; none after `minutes`."""
    until, played = monotonic() + 60 * minutes, Counter(one.kind for one in before)
    for number in range(rounds):
        for kind in kinds:
            if monotonic() > until:
                return
            if played[kind] <= number:
                yield kind


def by_kind(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """What the rounds of each kind come to."""
    return {kind: totals([one for one in rounds if one.kind == kind]) for kind in sorted({one.kind for one in rounds})}


def totals(rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "rounds": len(rounds),
        "rounds_with_problems": sum(bool(one.problems()) for one in rounds),
        "turns_again": sum(one.turns_again for one in rounds),
        "longest_s": max(one.seconds for one in rounds),
        "longest_recovery_s": max(one.recovered_after_s or 0.0 for one in rounds),
    }
