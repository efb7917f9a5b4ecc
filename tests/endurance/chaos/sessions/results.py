"""The results of rounds, and what they come to by kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.endurance.running import sums

GOAL_S = 1.0


@dataclass(slots=True)
class SessionRound:
    kind: str
    sessions: int
    quiet_after_s: float | None
    """Seconds after which the engines did nothing for nobody any more; `None` if they still did."""
    answered: int = 0
    """Calls that the agents were answered."""
    recorded: int = 0
    """Responses in the records that were read."""
    readable: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        return self.quiet_after_s is None or self.quiet_after_s > GOAL_S

    def problems(self) -> list[str]:
        problems = list(self.errors)
        if self.is_late:
            problems.append(f"something ran for nobody after {GOAL_S:g} s (until {self.quiet_after_s} s)")
        return [f"{self.kind}: {problem}" for problem in problems]


def totals(rounds: Sequence[SessionRound]) -> dict[str, Any]:
    quiet = [finished.quiet_after_s for finished in rounds if finished.quiet_after_s is not None]
    return {
        **sums(rounds, "sessions", "answered", "recorded", "readable"),
        "rounds_with_errors": sum(bool(finished.errors) for finished in rounds),
        "longest_until_quiet_s": max(quiet, default=None),
        "later_than_goal": sum(finished.is_late for finished in rounds),
    }
