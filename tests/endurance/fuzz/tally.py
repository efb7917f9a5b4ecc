"""How many cases there were, and what was wrong."""

from dataclasses import dataclass, field

MOST_PROBLEMS = 20


@dataclass(slots=True)
class Tally:
    """Of one target: a route, or one kind of body that one route or the client reads."""

    cases: int = 0
    problems: list[str] = field(default_factory=list)
    """The first of each kind; at most `MOST_PROBLEMS`."""

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        new = [problem for problem in dict.fromkeys(other.problems) if problem not in self.problems]
        self.problems = [*self.problems, *new][:MOST_PROBLEMS]
