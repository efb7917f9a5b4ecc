"""Nim: two players take sticks from heaps in turn, and who takes the last one wins. An example of a game."""

import random
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

MOVE = re.compile(r"take\s+(\d{1,4})\s+from\s+([A-Za-z])\b", re.IGNORECASE)
RULES = (
    "You play Nim against another player. In turn you take one or more sticks from one heap. Who takes the last stick "
    "of all wins. Write your move as `take 2 from A`, with nothing after it. A second move that is not permitted loses."
)
MOST_HEAPS, MOST_STICKS = 3, 4


class Nim:
    """A `MultiplayerGame` of `deployments/agents/game_program.py`. A first move that is not permitted is repeated."""

    def __init__(self, seed: int, heaps: Sequence[int] | None = None) -> None:
        """Draws the heaps, unless they are given.

        Args:
            heaps: sticks of each heap, at least 1.

        Raises:
            ValueError: there is no heap, or one without sticks.
        """
        if heaps is not None and not (heaps and min(heaps) > 0):
            raise ValueError(f"heaps must have sticks each, got {heaps!r}")
        draw = random.Random(f"nim {seed}")
        self._heaps = [draw.randint(1, MOST_STICKS) for _ in range(MOST_HEAPS)] if heaps is None else [*heaps]
        self._next = 0
        self._winner: int | None = None
        self._news = ["", ""]
        """For each seat, the move that it has not yet seen."""
        self._knows_rules = [False, False]
        self._faults = [0, 0]

    def turn(self) -> tuple[int, str] | None:
        if self._winner is not None:
            return None
        sticks = ", ".join(f"{name} {count}" for name, count in zip(ascii_uppercase, self._heaps, strict=False))
        rules = "" if self._knows_rules[self._next] else RULES
        return self._next, "\n".join(filter(None, (rules, self._news[self._next], f"Heaps: {sticks}. Your move.")))

    def move(self, text: str) -> None:
        seat, other = self._next, 1 - self._next
        self._knows_rules[seat] = True
        found = MOVE.findall(text)
        count, heap = (int(found[-1][0]), ascii_uppercase.index(found[-1][1].upper())) if found else (0, 0)
        if not (heap < len(self._heaps) and 1 <= count <= self._heaps[heap]):
            self._faults[seat] += 1
            self._news[seat] = "That is not a move that is permitted."
            self._winner = other if self._faults[seat] > 1 else None
            return
        self._heaps[heap] -= count
        self._news[other] = f"The other player took {count} from {ascii_uppercase[heap]}."
        self._winner = None if any(self._heaps) else seat
        self._next = other

    def rewards(self) -> Mapping[int, float]:
        return {seat: 1.0 if seat == self._winner else -1.0 for seat in range(2)}
