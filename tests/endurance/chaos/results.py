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
    struck_after_s: float
    ended_before: int
    """Rollouts that had come back when the part was struck."""
    seconds: float
    """Until the last rollout came back."""
    recovered_after_s: float | None
    """Seconds after that in which the part was replaced; `None` if it was not in time."""
    lost: int
    twice: int
    changed: int
    posted_again: int
    errors: list[str]
    turns_again: int = 0
    """Steps of turns that had been stepped before. Rounds of older files do not know."""
    most_turns_again: int = 0
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
    recovered = [finished.recovered_after_s for finished in rounds if finished.recovered_after_s is not None]
    summed = ("lost", "twice", "changed", "posted_again", "turns_again")
    return {
        "rounds": len(rounds),
        "rounds_with_problems": sum(bool(finished.problems()) for finished in rounds),
        **{name: sum(getattr(finished, name) for finished in rounds) for name in summed},
        "most_turns_again": max(finished.most_turns_again for finished in rounds),
        "longest_s": round(max(finished.seconds for finished in rounds), 1),
        "longest_recovery_s": round(max(recovered), 1) if recovered else None,
    }
