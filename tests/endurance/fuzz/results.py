"""The cases that targets have had, in portions, and what the portions of several runs come to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Portion:
    """Cases that one target was sent in one go."""

    target: str
    cases: int
    problems: list[str]
    loop_gap_ms: float
    """The longest gap of the ingress's event loop, in its processor time, on a core of usual speed."""
    seconds: float
    commit: str
    """Of the tree that was attacked; with a `+` at its end if files differed from it."""
    core_speed: float = 1.0
    """Of the machine, as a share of the usual: the gap took that much longer."""


def counted(portions: Iterable[Portion]) -> dict[str, list[Portion]]:
    """By target, the portions that count."""
    by_target: dict[str, list[Portion]] = {}
    for portion in portions:
        earlier = by_target.get(portion.target, [])
        by_target[portion.target] = [portion] if begins_anew(earlier) else [*earlier, portion]
    return by_target


def begins_anew(portions: Sequence[Portion]) -> bool:
    """Whether the target of these portions had problems: what it had before does not count when it is mended."""
    return bool(portions and portions[-1].problems)


def cases_of(portions: Sequence[Portion]) -> int:
    return sum(portion.cases for portion in portions)


def problems_of(by_target: Mapping[str, Sequence[Portion]]) -> list[str]:
    return [
        f"{name}: {problem}"
        for name, portions in by_target.items()
        for portion in portions
        for problem in portion.problems
    ]


def totals(by_target: Mapping[str, Sequence[Portion]]) -> dict[str, Any]:
    """Cases and longest gap of each target, and of all."""
    cases = {name: cases_of(portions) for name, portions in sorted(by_target.items())}
    gaps = {
        name: round(max(portion.loop_gap_ms for portion in portions), 1) for name, portions in sorted(by_target.items())
    }
    return {
        "cases": cases,
        "loop_gaps_ms": gaps,
        "loop_gap_ms": max(gaps.values(), default=0.0),
        "fewest_cases": min(cases.values(), default=0),
        "all_cases": sum(cases.values()),
    }
