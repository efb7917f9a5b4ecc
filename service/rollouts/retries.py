"""Time limits and retries of calls to other deployments."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from deployments.failures import EnvironmentShuttingDown, ReplicaShuttingDown, RolloutFailure, TurnTimedOut
from service.rollouts.pacing import LoopPacer

logger = logging.getLogger("rollout_service.rollouts")

FIRST_BACKOFF_S = 0.1
LONGEST_PAUSE_S = 5.0
JITTER_S = 1.0
"""Spreads the retries of the many calls that one dead replica fails at once."""
MOST_DOUBLINGS = 10
MOST_NOTED = 64
"""Retries of one budget that are remembered, the last ones: those that cost nothing have no bound."""
LONGEST_NOTE = 500
"""Characters of a failure's message that are remembered."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Retry:
    """A call that was made again, or a rollout that was played anew."""

    at: float
    """When the call had failed, in seconds since 1970."""
    kind: str
    """The `kind` of the failure."""
    message: str


@dataclass(slots=True)
class RetryBudget:
    """The retries that the calls of one rollout, sequence or judgement share."""

    log_fields: Mapping[str, Any]
    """The `extra` of the log record of a retry: for what the calls are made."""
    left: int
    noted: list[_Retry] = field(default_factory=list)
    """The last retries, in order; those of an earlier process are not known."""

    def note(self, failure: RolloutFailure) -> None:
        """Remembers a retry after this failure."""
        self.noted.append(_Retry(time.time(), failure.kind, str(failure)[:LONGEST_NOTE]))
        del self.noted[:-MOST_NOTED]

    def take(self) -> bool:
        """Takes a retry out of the budget. Returns whether there was one."""
        self.left -= 1
        return self.left >= 0


async def with_timeout(seconds: float | None, call: Awaitable[Result], what: str) -> Result:
    """Awaits the call, for at most `seconds`; `None` is no limit.

    Raises:
        TurnTimedOut: the call took longer. Its message begins with `what`. The call is cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TurnTimedOut(f"{what} took longer than {seconds:g} s.") from error


async def with_retries(
    call: Callable[[], Awaitable[Result]], budget: RetryBudget, pacer: LoopPacer | None = None
) -> Result:
    """Makes the call until it succeeds, as long as its failures are retryable and the budget lasts.

    The first retry of a call whose replica is shut down is made at once: another one takes it.

    Args:
        pacer: spreads the failures of many calls, which one dead replica fails at once, over loop iterations.

    Raises:
        RolloutFailure: the last failure. Other exceptions are never retried.
    """
    for retry in count():
        try:
            return await call()
        except RolloutFailure as failure:
            if pacer is not None:
                # Not for the episode: that waits with a result to keep.
                await pacer.wait_for_turn(failure)
            can_succeed = failure.retryable and failure.same_call_can_succeed
            may_retry = can_succeed and (not failure.costs_a_retry or budget.take())
            if not may_retry:
                raise
            budget.note(failure)
            logger.info("A call is retried: %s", failure, extra=budget.log_fields)
            is_handed_over = isinstance(failure, ReplicaShuttingDown | EnvironmentShuttingDown)
        if retry or not is_handed_over:
            await asyncio.sleep(pause_s(retry))
    raise AssertionError("There is no last retry.")


def pause_s(retry: int) -> float:
    """The pause before retry n (from 0): `FIRST_BACKOFF_S` * 2^n plus up to `JITTER_S`, at most `LONGEST_PAUSE_S`."""
    backoff_s: float = FIRST_BACKOFF_S * 2 ** min(retry, MOST_DOUBLINGS)
    return min(backoff_s + random.uniform(0, JITTER_S), LONGEST_PAUSE_S)
