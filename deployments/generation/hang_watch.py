"""Whether an engine hangs, from what is observed of it at each health check. No I/O, no vLLM."""

from typing import Literal

LEAST_OBSERVATIONS = 3
"""Without a step, one after the other. After a stall of the observer's own event loop, the first observation may come
before the steps that the engine has taken meanwhile are known."""


LEAST_OBSERVATIONS_OF_SUSPECT = 2
SUSPECT_AFTER = 1 / 3
"""Of the timeout: an engine that took no step for so long is named to those who ask whether the service is ready."""


class HangWatch:
    """An engine hangs if it has work and takes no step for `timeout_s` seconds, in which it is not paused.

    Says when the engine is idle: an idle engine takes no steps, so only work can tell whether it hangs.
    """

    def __init__(self, timeout_s: float | None) -> None:
        """Args: `timeout_s` is None for an engine that may take as long as it likes."""
        self._timeout_s = timeout_s
        self._steps = 0
        self._since: float | None = None
        """When the engine was first seen with work and the same number of steps."""
        self._observations = 0

    def observe(self, now: float, steps: int, ongoing: int, is_paused: bool) -> Literal["moves", "idle", "hangs"]:
        """
        Args:
            now: seconds of a monotonic clock.
            steps: how many steps the engine has taken so far.
            ongoing: generations that run or wait in the engine.
            is_paused: whether the engine is paused on purpose.
        """
        has_moved = steps != self._steps
        self._steps = steps
        if has_moved or is_paused or not ongoing:
            self._since, self._observations = None, 0
            return "moves" if ongoing or is_paused else "idle"
        if self._since is None:
            self._since = now
        self._observations += 1
        if self._timeout_s is None or self._observations < LEAST_OBSERVATIONS:
            return "moves"
        return "hangs" if now - self._since >= self._timeout_s else "moves"

    def suspected_for(self, now: float, steps: int, ongoing: int, is_paused: bool) -> float | None:
        """For how many seconds an engine that seems to hang was seen without a step; `None` for one that does not.

        Asking changes nothing, however often: only `observe` sees an engine. Args: as there.
        """
        if self._timeout_s is None or self._since is None or steps != self._steps or is_paused or not ongoing:
            return None
        still_s = now - self._since
        is_suspect = still_s >= SUSPECT_AFTER * self._timeout_s
        return still_s if is_suspect and self._observations >= LEAST_OBSERVATIONS_OF_SUSPECT else None
