"""How fast a simulated engine is: its settings, and when its generations end. Imports no Ray.

`TimedGenerations` is a state machine: the caller passes the time in, no clock is read. Guarantees: at most
`max_num_seqs` generations run at once; of the waiting ones the next to start is one of the lowest virtual time, and the
oldest of these, at the exact moment in which another one ends; each submitted generation finishes exactly once or is
cancelled.
"""

import heapq
import math
from collections.abc import Hashable
from itertools import count
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from deployments.strict_settings import StrictSettings

ROUNDING = 1e-6
"""Part of a token that differences of times lose."""


class Timing(StrictSettings):
    """How fast a simulated engine is. With both times 0, a generation ends at the moment in which it is submitted."""

    time_to_first_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds of one generation's prefill; the time that it waits before it runs is not included."""
    time_per_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds per generated token, the first one included."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Generations that run at once; further ones wait, the lowest virtual time first."""
    length_spread: float = Field(default=0.0, ge=0, lt=1)
    """By up to this part a generation is shorter than `max_new_tokens`, at random, as prompt and seed decide."""
    stage_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds to read a pushed version into memory; generations go on meanwhile."""
    swap_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds to replace full weights by others; nothing is generated meanwhile."""
    routed_experts: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Layers, and experts of a token in each: the engine is one of a mixture, and each token has random experts."""

    def duration_s(self, tokens: int) -> float:
        """Seconds that a generation of `tokens` tokens runs."""
        return self.time_to_first_token_s + tokens * self.time_per_token_s

    def tokens_missing(self, seconds: float) -> int:
        """How many tokens a generation still lacks that many seconds before its end."""
        return math.ceil(seconds / self.time_per_token_s - ROUNDING) if self.time_per_token_s else 0


Key = TypeVar("Key", bound=Hashable)


class TimedGenerations(Generic[Key]):
    """The generations that run or wait, each under a key of the caller's.

    Times are seconds of any monotonic clock, the same one in all calls.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._waiting: dict[Key, int] = {}
        """Tokens by key."""
        self._by_virtual_time: list[tuple[int, int, Key]] = []
        """A heap of `_waiting`; a cancelled generation stays in it until it reaches the top."""
        self._ends: dict[Key, float] = {}
        """Ends of the generations that run."""
        self._by_end: list[tuple[float, int, Key]] = []
        """A heap of `_ends`; a cancelled generation stays in it until it reaches the top."""
        self._numbers = count()
        self._paused_until = -math.inf

    def __len__(self) -> int:
        """Generations that run or wait."""
        return len(self._ends) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def next_end(self) -> float | None:
        """When the next generation ends; `None` if none runs."""
        while self._by_end and self._is_cancelled(self._by_end[0]):
            heapq.heappop(self._by_end)
        return self._by_end[0][0] if self._by_end else None

    def end_of(self, key: Key) -> float | None:
        """When a generation that runs ends; `None` for all others."""
        return self._ends.get(key)

    def submit(self, key: Key, tokens: int, now: float, virtual_time: int = 0) -> None:
        """Adds a generation of `tokens` tokens; `key` is not in use. Call `pop_finished(now)` first."""
        if len(self._ends) < self._timing.max_num_seqs:
            self._start(key, tokens, now)
        else:
            self._waiting[key] = tokens
            heapq.heappush(self._by_virtual_time, (virtual_time, next(self._numbers), key))

    def pop_finished(self, now: float) -> list[Key]:
        """Removes the generations that have ended by `now`; returns their keys in the order of their ends."""
        finished = []
        while (end := self.next_end) is not None and end <= now:
            _, _, key = heapq.heappop(self._by_end)
            del self._ends[key]
            finished.append(key)
            self._start_next(end)
        return finished

    def pause(self, seconds: float, now: float) -> None:
        """Generates nothing for so long: all that runs ends later. Call `pop_finished(now)` first."""
        self._paused_until = self.progressed_to(now) + seconds
        self._ends = {key: end + seconds for key, end in self._ends.items()}
        self._by_end = [(end, next(self._numbers), key) for key, end in self._ends.items()]
        heapq.heapify(self._by_end)

    def progressed_to(self, now: float) -> float:
        """The time up to which what is left of a generation counts: the end of a pause, while one lasts."""
        return max(now, self._paused_until)

    def cancel(self, key: Key, now: float) -> float | None:
        """Removes a generation that runs or waits; an unknown key is ignored. Call `pop_finished(now)` first.

        Returns when it would have ended; `None` if it did not run.
        """
        end = self._ends.pop(key, None)
        if end is None:
            self._waiting.pop(key, None)
        else:
            self._start_next(now)
        return end

    def _start_next(self, now: float) -> None:
        while self._by_virtual_time:
            _, _, key = heapq.heappop(self._by_virtual_time)
            if (tokens := self._waiting.pop(key, None)) is not None:
                self._start(key, tokens, now)
                return

    def _start(self, key: Key, tokens: int, now: float) -> None:
        end = self._ends[key] = self.progressed_to(now) + self._timing.duration_s(tokens)
        heapq.heappush(self._by_end, (end, next(self._numbers), key))

    def _is_cancelled(self, entry: tuple[float, int, Key]) -> bool:
        end, _, key = entry
        return self._ends.get(key) != end
