"""Whether something that is measured again and again grows. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more a quantity may be in the last period than in the one before it.

    `floor` is for what varies without growing: caches that fill, arenas of the allocator. `per_push` is multiplied with
    the number of pushes between the middles of the two periods.
    """

    floor: float
    per_push: float = 0.0


def medians(*periods: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """By quantity, those of its readings in each period.

    A reading without a quantity, such as the memory of a process that is just replaced, counts as 0.
    """
    names = sorted({name for readings in periods for reading in readings for name in reading})
    return {name: [median(reading.get(name, 0.0) for reading in readings) for readings in periods] for name in names}


def growth_problems(
    second: Sequence[Mapping[str, float]], last: Sequence[Mapping[str, float]], bounds: Mapping[str, Bound]
) -> Iterator[str]:
    """A sentence for each quantity that grows; it is bound by the first of `bounds` whose name is in its own.

    Args: `second` and `last` have one reading for each push in two periods of the same length, none between them.
    """
    pushes = (len(second) + len(last)) // 2
    for name, (before, now) in medians(second, last).items():
        bound, *_ = (bound for part, bound in bounds.items() if part in name)
        if now - before > bound.floor + bound.per_push * pushes:
            yield f"{name} grew from {before:,.0f} to {now:,.0f} in {pushes} pushes"
