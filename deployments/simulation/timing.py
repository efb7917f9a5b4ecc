"""The pace of a generator: how long its generations take, and how many run at once. No clock, no tokens.

Guarantees: never more than `max_num_seqs` run at once; who waits longest runs next, from the very moment in which a
place becomes free; whatever arrives ends exactly once or is dropped.
"""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Timing(BaseModel):
    """How fast an engine is. With both times zero every generation ends as it arrives."""

    model_config = ConfigDict(extra="forbid")

    time_to_first_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """From the moment in which a generation runs."""
    time_per_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """For each of its tokens, the first included."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Generations that run at once; further ones wait in the order of their arrival."""

    def duration_s(self, tokens: int) -> float:
        return self.time_to_first_token_s + tokens * self.time_per_token_s


Name = TypeVar("Name", bound=Hashable)


class TimedGenerations(Generic[Name]):
    """Generations under way at a pace. Times are seconds of a clock of the caller's that never goes back."""

    def __init__(self, pace: Timing) -> None:
        self._pace = pace
        self._waiting: dict[Name, int] = {}
        self._ends: dict[Name, float] = {}
        self._by_end: list[tuple[float, int, Name]] = []
        """A heap; those that were dropped stay in it until they are on top."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._ends) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def next_end(self) -> float | None:
        """When the next generation ends; `None` if none runs."""
        while self._by_end and self._is_dropped(self._by_end[0]):
            heapq.heappop(self._by_end)
        return self._by_end[0][0] if self._by_end else None

    def arrive(self, name: Name, tokens: int, now: float) -> None:
        """A generation of `tokens` tokens that no other of this `name` is under way with; ask for `ended` first."""
        if len(self._ends) < self._pace.max_num_seqs:
            self._begin(name, tokens, now)
        else:
            self._waiting[name] = tokens

    def ended(self, now: float) -> list[Name]:
        """Those that have ended since it was last asked, in the order of their ends."""
        names = []
        while (end := self.next_end) is not None and end <= now:
            _, _, name = heapq.heappop(self._by_end)
            del self._ends[name]
            names.append(name)
            self._begin_next(end)
        return names

    def drop(self, name: Name, now: float) -> None:
        """Forgets a generation that runs or waits; ask for `ended` first."""
        if self._ends.pop(name, None) is None:
            self._waiting.pop(name, None)
        else:
            self._begin_next(now)

    def _begin_next(self, now: float) -> None:
        if self._waiting:
            name = next(iter(self._waiting))
            self._begin(name, self._waiting.pop(name), now)

    def _begin(self, name: Name, tokens: int, now: float) -> None:
        end = self._ends[name] = now + self._pace.duration_s(tokens)
        heapq.heappush(self._by_end, (end, next(self._numbers), name))

    def _is_dropped(self, entry: tuple[float, int, Name]) -> bool:
        end, _, name = entry
        return self._ends.get(name) != end
