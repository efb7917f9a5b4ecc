"""How many cases each target has had, and what was wrong, over all runs: kept in a file, so that a run can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOST_PROBLEMS = 20


@dataclass(slots=True)
class Tally:
    """Of one target: a route, or one kind of body that one route or the client reads."""

    cases: int = 0
    problems: list[str] = field(default_factory=list)
    """The first of each kind; at most `MOST_PROBLEMS`."""
    loop_gap_ms: float = 0.0
    """The longest gap of the ingress's event loop, in its processor time."""

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        new = [problem for problem in dict.fromkeys(other.problems) if problem not in self.problems]
        self.problems = [*self.problems, *new][:MOST_PROBLEMS]
        self.loop_gap_ms = max(self.loop_gap_ms, other.loop_gap_ms)


class Tallies:
    """By name of the target. Written after each addition. A target that had problems in an earlier run begins anew.

    Args:
        file: `None` to keep nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        read: Mapping[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.by_target = {name: Tally(**fields) for name, fields in read.items() if not fields["problems"]}

    def missing(self, target: str, cases: int) -> int:
        """How many of `cases` the target has not had yet."""
        return max(0, cases - self.by_target.get(target, Tally()).cases)

    def add(self, target: str, tally: Tally) -> None:
        self.by_target.setdefault(target, Tally()).add(tally)
        if self._file is not None:
            self._file.write_text(json.dumps({name: asdict(each) for name, each in self.by_target.items()}, indent=1))

    def problems(self) -> list[str]:
        return [f"{name}: {problem}" for name, tally in self.by_target.items() for problem in tally.problems]
