"""Which part is killed when: each third of a run kills the same ones in the same order. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

THIRDS = 3
SHORTEST_SLOT_S = 37.5
"""Eight parts in a third of a quarter of an hour. An engine that was killed takes half of it until it is replaced, on
two busy cores."""
FEWEST_PUSHES = 4
"""In each third, also where the parts take long to be replaced: a median of fewer says nothing."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A part is killed at its begin."""

    kind: str
    third: int
    ends_after_s: float
    """Since the begin of the run."""
    fewest_pushes: int


def slots(seconds: float, kinds: Sequence[str]) -> list[Slot]:
    """Args: `kinds` are the parts; of a short run, the first ones only."""
    third_s = seconds / THIRDS
    chosen = kinds[: max(1, int(third_s / SHORTEST_SLOT_S))]
    fewest = -(-FEWEST_PUSHES // len(chosen))
    return [
        Slot(kind, third, third * third_s + (number + 1) * third_s / len(chosen), fewest)
        for third in range(THIRDS)
        for number, kind in enumerate(chosen)
    ]
