"""Whether something that is measured again and again grows. No I/O."""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Growth:
    """Medians of the last period but one and of the last period; they are `pushes` pushes apart."""

    second: float
    last: float
    pushes: int
    bound: Bound

    @property
    def is_within_bound(self) -> bool:
        return self.last - self.second <= self.bound.floor + self.bound.per_push * self.pushes


def growth_of(second: Sequence[float], last: Sequence[float], bound: Bound) -> Growth:
    """Args: `second` and `last` have one reading for each push in two periods of the same length, none between them."""
    return Growth(median(second), median(last), (len(second) + len(last)) // 2, bound)


def all_growth(
    second: Sequence[Mapping[str, float]], last: Sequence[Mapping[str, float]], bounds: Mapping[str, Bound]
) -> dict[str, Growth]:
    """By quantity; a quantity is bound by the first of `bounds` whose name is in its own.

    A reading without a quantity, such as the memory of a process that is just replaced, counts as 0.
    """

    def values(readings: Sequence[Mapping[str, float]], name: str) -> list[float]:
        return [reading.get(name, 0.0) for reading in readings]

    names = sorted({name for reading in [*second, *last] for name in reading})
    return {name: growth_of(values(second, name), values(last, name), bound_of(name, bounds)) for name in names}


def growth_problems(growth: Mapping[str, Growth]) -> list[str]:
    """A sentence for each quantity that grows."""
    return [
        f"{name} grew from {found.second:,.0f} to {found.last:,.0f} in {found.pushes} pushes"
        for name, found in growth.items()
        if not found.is_within_bound
    ]


def bound_of(quantity: str, bounds: Mapping[str, Bound]) -> Bound:
    """Raises `KeyError` if nothing bounds the quantity."""
    for name, bound in bounds.items():
        if name in quantity:
            return bound
    raise KeyError(quantity)
