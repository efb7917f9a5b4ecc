"""Health of an engine: observes whether it hangs, checks it by real generations, and kills one that hangs.

Knows no vLLM. `EngineWatch` is a state machine: it is given what is observed at each health check.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import psutil

from deployments.failures import GenerationNotFinite, RolloutFailure

LEAST_OBSERVATIONS = 3
"""Without a step, one after the other. After a stall of the observer's own event loop, the first observation may come
before the steps that the engine has taken meanwhile are known."""


class EngineWatch:
    """An engine hangs if it has work and takes no step for `timeout_s` seconds, in which it is not paused.

    Says when the engine is idle: an idle engine takes no steps, so only work can tell whether it hangs.
    """

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s` is None for an engine without a limit."""
        self._timeout_s = timeout_s
        self._steps = 0
        self._since: float | None = None
        """When the engine was first seen with work and the same number of steps."""
        self._observations = 0

    def observe(self, now: float, steps: int, ongoing: int, is_paused: bool) -> Literal["moves", "idle", "hangs"]:
        """Judges the engine by this and the earlier observations.

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


RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""In the command line of Python's helper process, which frees shared memory when the others have ended."""
logger = logging.getLogger("rollout_service.generation")


class EngineHangs(Exception):
    """The engine has work and takes no step. Its processes were ended; Serve replaces the replica."""


class EngineHealth:
    """Is asked at each health check of the replica.

    An idle engine is given one token to generate, and the next checks look whether it moves. A busy one shows by its
    steps that it moves, so it is given nothing. The processes of one that hangs are killed: then everything goes on as
    if it had died. Its generations fail at once and are made again at other replicas, and no process that is stopped
    outlives the replica.
    """

    def __init__(
        self,
        timeout_s: float | None,
        observed: Callable[[], tuple[int, int, bool]],
        generate_one: Callable[[], Awaitable[object]],
        kill: Callable[[], None],
    ) -> None:
        """Begins without observations.

        Args:
            timeout_s: an engine that has work and takes no step for so many seconds hangs; `None` for no limit.
            observed: how many steps the engine has taken, its ongoing generations, and whether it is paused.
            generate_one: generates a token.
            kill: ends the engine's processes.
        """
        self._watch = EngineWatch(timeout_s)
        self._timeout_s = timeout_s
        self._observed = observed
        self._generate_one = generate_one
        self._kill = kill
        self._probe: asyncio.Task[None] | None = None
        self._failure: GenerationNotFinite | None = None
        """Failure of a token since the last check."""

    def check(self) -> None:
        """
        Raises:
            EngineHangs: it did not move for too long.
            GenerationNotFinite: the log-probability of the token that it was given to generate was NaN or infinite.
        """
        failure, self._failure = self._failure, None
        verdict = self._watch.observe(time.monotonic(), *self._observed())
        if verdict == "hangs":
            logger.error("The engine has work and took no step for %g s: its processes are killed.", self._timeout_s)
            self._kill()
            raise EngineHangs(f"The engine has work and took no step for {self._timeout_s:g} s.")
        if verdict == "idle" and self._probe is None:
            self._probe = asyncio.create_task(self._generate())
        if failure is not None:
            # Serve replaces a replica after several checks that failed: a bit that flipped once is no reason to.
            raise failure

    async def _generate(self) -> None:
        try:
            await self._generate_one()
        except GenerationNotFinite as failure:
            self._failure = failure
        except RolloutFailure as failure:
            # An update of the weights may abort it. An engine that has died says so itself.
            logger.info("The token of a health check was not generated: %s", failure)
        finally:
            self._probe = None

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()


def kill_child_processes() -> None:
    """Kills all processes below this one, stopped ones too, except those that free what the others leave."""
    for process in psutil.Process().children(recursive=True):
        try:
            if RESOURCE_TRACKER not in " ".join(process.cmdline()):
                process.kill()
        except psutil.NoSuchProcess:
            continue
