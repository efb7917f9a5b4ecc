"""When a call is tried again: the connection failed before an answer began, or the service said 503.

Rollouts that were under way on such a connection were cancelled with it and are played anew; an answer that has begun
is never asked for again. Pieces of an upload can be sent twice, and are.
"""

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from tenacity import (
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    stop_never,
    wait_fixed,
    wait_random_exponential,
)

from rollout_client.errors import RequestRejected, RolloutError, ServiceFailed, ServiceUnreachable, StreamBroken

logger = logging.getLogger("rollout_client")

BACKOFF = wait_random_exponential(multiplier=0.5, max=10)
"""Seconds, drawn up to a bound that doubles each time: clients that failed together come back apart."""

READY_POLL_S = 0.5


def is_worth_retrying(error: BaseException) -> bool:
    return isinstance(error, ServiceUnreachable) or is_unavailable(error)


def is_unavailable(error: BaseException) -> bool:
    return isinstance(error, ServiceFailed) and error.is_unavailable


def is_worth_asking(error: BaseException) -> bool:
    """Of a piece of an upload, which can be sent twice: asking the service what it has, and going on, may help."""
    if isinstance(error, RequestRejected):
        return error.problem.type.endswith(("chunk-misplaced", "chunk-damaged"))
    return is_worth_retrying(error) or isinstance(error, StreamBroken)


def wait_s(state: RetryCallState) -> float:
    """What the service asked for with Retry-After, and the backoff on top, so that not all come back at once."""
    error = state.outcome.exception() if state.outcome else None
    asked_s = error.retry_after_s if isinstance(error, ServiceFailed) else None
    return (asked_s or 0.0) + BACKOFF(state)


def log_retry(state: RetryCallState) -> None:
    reason = state.outcome.exception() if state.outcome else None
    logger.warning("%s Trying again in %.1f s.", reason, state.upcoming_sleep)


def call_policy(
    retries: int, timeout_s: float | None, is_worth: Callable[[BaseException], bool] = is_worth_retrying
) -> dict[str, Any]:
    """For tenacity: `retries` more attempts, none that would start after `timeout_s`."""
    in_time = stop_never if timeout_s is None else stop_before_delay(timeout_s)
    return {
        "retry": retry_if_exception(is_worth),
        "stop": stop_after_attempt(retries + 1) | in_time,
        "wait": wait_s,
        "before_sleep": log_retry,
        "reraise": True,
    }


def readiness_policy(base_url: str, timeout_s: float) -> dict[str, Any]:
    """For tenacity: asks until the answer is yes.

    Any error may pass while a service starts: its proxy says 404 before the application is there.
    """

    def give_up(state: RetryCallState) -> NoReturn:
        reason = state.outcome.exception() if state.outcome else None
        raise ServiceUnreachable(f"{base_url} is not ready after {timeout_s:g} s. {reason}") from reason

    return {
        "retry": retry_if_exception_type(RolloutError),
        "stop": stop_before_delay(timeout_s),
        "wait": wait_fixed(READY_POLL_S),
        "retry_error_callback": give_up,
    }
