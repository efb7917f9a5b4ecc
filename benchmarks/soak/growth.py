"""Whether something that is measured again and again grows. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

FEWEST_READINGS = 12
"""With fewer, a third is too short for its median to mean anything."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more a quantity may be in the last third of the readings than in the second third.

    `floor` is for what varies without growing: caches that fill, arenas of the allocator. `per_push` is multiplied with
    the number of pushes between the middles of the two thirds.
    """

    floor: float
    per_push: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Medians of the second third and of the last third of the readings; they are `pushes` pushes apart."""

    second: float
    last: float
    pushes: int
    bound: Bound

    @property
    def is_within_bound(self) -> bool:
        return self.last - self.second <= self.bound.floor + self.bound.per_push * self.pushes


def growth_of(readings: Sequence[float], bound: Bound) -> Growth:
    """Args: `readings` has one for each push, in order. The first third is passed over: caches fill meanwhile.

    Raises:
        ValueError: there are fewer than `FEWEST_READINGS`.
    """
    if len(readings) < FEWEST_READINGS:
        raise ValueError(f"Growth needs {FEWEST_READINGS} readings, and there are {len(readings)}.")
    third = len(readings) // 3
    return Growth(median(readings[-2 * third : -third]), median(readings[-third:]), third, bound)


def all_growth(readings: Sequence[Mapping[str, float]], bounds: Mapping[str, Bound]) -> dict[str, Growth]:
    """By quantity; a quantity is bound by the first of `bounds` whose name is in its own.

    A reading without a quantity, such as the memory of a process that is just replaced, counts as 0.
    """
    names = sorted({name for reading in readings for name in reading})
    return {name: growth_of([reading.get(name, 0.0) for reading in readings], bound_of(name, bounds)) for name in names}


def bound_of(quantity: str, bounds: Mapping[str, Bound]) -> Bound:
    """Raises `KeyError` if nothing bounds the quantity."""
    for name, bound in bounds.items():
        if name in quantity:
            return bound
    raise KeyError(quantity)
