"""Health of a generator replica: whether its engine hangs, and whether its outputs are finite. Knows no vLLM.

`EngineWatch` is a state machine: it is given what is observed at each health check. A replica whose GPU or weights are
damaged may go on answering, with log-probabilities that are NaN. Each such generation fails and is tried again on
another replica; a replica that keeps producing them must be replaced.
"""

import math
from array import array
from collections import deque
from contextlib import suppress

import psutil

from deployments.failures import GenerationNotFinite

LEAST_OBSERVATIONS = 3
"""Without a step, one after the other. After a stall of the observer's own event loop, the first observation may come
before the steps that the engine has taken meanwhile are known."""


class ReplicaUnusable(Exception):
    """Serve replaces the replica: its engine hangs, or its log-probabilities are not finite, or not those of others."""


class EngineWatch:
    """An engine hangs if it has work and takes no step for `timeout_s` seconds, in which it is not paused."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` is None for an engine without a limit."""
        self._timeout_s = timeout_s
        self._steps = 0
        self._since = 0.0
        """When the engine was first seen with work and the same number of steps."""
        self._observations = 0

    def hangs(self, now: float, steps: int, ongoing: int, is_paused: bool) -> bool:
        """Judges the engine by this and the earlier observations.

        Args:
            now: seconds of a monotonic clock.
            steps: how many steps the engine has taken so far.
            ongoing: generations that run or wait in the engine.
            is_paused: whether the engine is paused on purpose.
        """
        if steps != self._steps or is_paused or not ongoing:
            self._steps, self._observations = steps, 0
            return False
        if not self._observations:
            self._since = now
        self._observations += 1
        if self._timeout_s is None or self._observations < LEAST_OBSERVATIONS:
            return False
        return now - self._since >= self._timeout_s


_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""In the command line of Python's helper process, which frees shared memory when the others have ended."""


def kill_child_processes() -> None:
    """Kills all processes below this one, stopped ones too, except those that free what the others leave."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if _RESOURCE_TRACKER not in " ".join(process.cmdline()):
                process.kill()


def refuse_not_finite(logprobs: "array[float]") -> None:
    """Raises `GenerationNotFinite` if one of the log-probabilities (float32) is NaN or infinite.

    Not even -inf can be right: it says that the token has probability 0 under the distribution that it was sampled
    from. With NaN among the logits of a position, the engine returns an arbitrary token.
    """
    # A sum of float32 in float64 does not overflow. For the token of a streamed event NumPy takes twenty times as long.
    if not math.isfinite(sum(logprobs)):
        first = next(place for place, logprob in enumerate(logprobs) if not math.isfinite(logprob))
        raise GenerationNotFinite(
            f"The engine gave {logprobs[first]} as the log-probability of token {first} of {len(logprobs)}."
        )


RECENT_GENERATIONS = 64
MOST_NOT_FINITE = 16
"""Bound for the recent generations. A quarter: chance, such as a bit that flipped once, gives one or two."""
LEAST_GROUPS = 4
"""One prompt may overflow on every replica, and its group may have hundreds of rollouts: no replica is at fault."""


class OutputHealth:
    """Remembers which of the recent generations of one replica had log-probabilities that are not finite."""

    def __init__(self) -> None:
        self._recent: deque[str | None] = deque(maxlen=RECENT_GENERATIONS)
        """The group of each generation that was not finite, `None` for the others."""
        self.distrusted: str | None = None
        """Why the replica is out of service."""

    def record(self, group: str, is_finite: bool) -> None:
        """Adds one generation that has ended; `group` is its `GenerationRequest.group`."""
        self._recent.append(None if is_finite else group)

    def check(self) -> None:
        """Raises `ReplicaUnusable` if it was taken out of service, or too many recent generations were not finite."""
        if self.distrusted is not None:
            raise ReplicaUnusable(f"The replica was taken out of service: {self.distrusted}.")
        faulty = [group for group in self._recent if group is not None]
        if len(faulty) >= MOST_NOT_FINITE and len(set(faulty)) >= LEAST_GROUPS:
            raise ReplicaUnusable(
                f"{len(faulty)} of the last {len(self._recent)} generations had log-probabilities that are NaN or "
                "infinite."
            )
