"""Retries: which failed attempts are repeated, and when.

A call is repeated only where that may help and cannot harm:

| what happened | most calls | `load_checkpoint` |
| --- | --- | --- |
| connection refused, or connecting timed out | again | again |
| connection broke after the request was sent | again | no |
| `overloaded`, `quota-exceeded` (429) | again, and no retry is used up | the same |
| 408, 425, 503, 429 of a proxy or gateway | again | again |
| 500, 502, 504 | again | no |
| 409 that a proxy or gateway sent | again | no |
| 409 of the service itself | no | no |
| `sample-failed`, with which `on_error="fail"` ends a request; `judgement-failed` | no | no |
| any other status, `timeout_s`, a response that is not of the contract | no | no |

Repeating a rollout is safe: nothing outlasts its request, and a disconnect cancels it. Repeating a chunk of an upload
is safe: the client first asks what has arrived. `load_checkpoint` is repeated only where the service has not begun with
it, because a load goes on after a disconnect. The steps of a weight transfer are never repeated. A stream is opened
again until its response begins, and never after that.

A 409 of the service itself answers what the caller asked: the version is taken, is not current within `wait_s`, or
another update is under way and `if_busy="refuse"` was given.

A service that is full is waited for as long as it takes: it has lost nothing, and only time helps. `timeout_s` bounds
the wait, and `retries=0` makes one attempt even then.

With the default of 16 retries a call goes on for 33 to 67 s: connections are refused for about 11 s after a proxy
died. `timeout_s` bounds it: no attempt starts after that. `Retry-After` is waited for in addition to the backoff; a
service that is full says itself when to come back, and then up to a second takes the place of the backoff.
"""

import logging
import random
from collections.abc import Callable
from typing import Any, NoReturn

from tenacity import (
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    stop_before_delay,
    stop_never,
    wait_exponential,
    wait_fixed,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from rollout_client.errors import RolloutError, ServiceUnreachable, StatusError, StreamBroken

logger = logging.getLogger("rollout_client")

DEFAULT_RETRIES = 16
BACKOFF = wait_exponential(multiplier=0.25, max=2.5) + wait_random_exponential(multiplier=0.25, max=2.5)
"""Seconds: 0.25 to 0.5 after the first failure, then twice that each time, up to 2.5 to 5, which a call may wait for
nothing once a proxy is back. The fixed half makes the retries last until then, the random half spreads clients that
failed together."""

READY_POLL_S = 0.5
MOST_ASKED_S = 60.0
"""Bounds `Retry-After`: a proxy that asks for a day must not stop a training for it."""

NOT_BEGUN = frozenset({408, 425, 429, 503})
"""Statuses of a request that the service has not begun."""
MAY_PASS = NOT_BEGUN | {409, 500, 502, 504}
SERVICE_PROBLEM = "urn:rollout:problem:"
"""Prefix of the types of the service's own problem documents."""
NOT_READY = f"{SERVICE_PROBLEM}not-ready"
"""Also where the policy store died during the call, perhaps after it had made a version current."""
OVERLOADED = f"{SERVICE_PROBLEM}overloaded"
QUOTA_EXCEEDED = f"{SERVICE_PROBLEM}quota-exceeded"
LONGEST_EXTRA_WAIT_S = 1.0
"""Spreads clients to which a full service has given the same `Retry-After`."""
SAMPLE_FAILED = f"{SERVICE_PROBLEM}sample-failed"
JUDGEMENT_FAILED = f"{SERVICE_PROBLEM}judgement-failed"
"""The service has already retried transient failures."""
CHUNK_PROBLEMS = frozenset({f"{SERVICE_PROBLEM}chunk-misplaced", f"{SERVICE_PROBLEM}chunk-damaged"})


def may_pass(error: BaseException) -> bool:
    """Whether `error` is transient: a call that can be repeated may succeed after it."""
    if isinstance(error, StatusError):
        type_ = error.problem.type
        is_final = error.status == 409 and type_.startswith(SERVICE_PROBLEM)
        return error.status in MAY_PASS and not is_final and type_ not in (SAMPLE_FAILED, JUDGEMENT_FAILED)
    return isinstance(error, ServiceUnreachable | StreamBroken)


def has_not_begun(error: BaseException) -> bool:
    """Whether the service has not begun the request that failed, so that one that must run once can be sent again."""
    if isinstance(error, StatusError):
        return error.status in NOT_BEGUN and error.problem.type != NOT_READY
    return isinstance(error, ServiceUnreachable) and not error.may_have_arrived


def chunk_may_pass(error: BaseException) -> bool:
    """Whether a chunk of an upload may arrive after `error`, once the service was asked for the bytes that it has."""
    return may_pass(error) or (isinstance(error, StatusError) and error.problem.type in CHUNK_PROBLEMS)


def is_full(error: BaseException | None) -> bool:
    """Whether the service is full, or the key has used up a quota, so that the request was not admitted."""
    return isinstance(error, StatusError) and error.problem.type in (OVERLOADED, QUOTA_EXCEEDED)


class StopAfterFailures(stop_base):
    """Stops after `retries` + 1 failures; a refusal of a full service is not one, unless `retries` is 0.

    Counts the failures of one call: each call needs an object of its own.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failures = 0

    def __call__(self, state: RetryCallState) -> bool:
        if self._retries and is_full(error_of(state)):
            return False
        self._failures += 1
        return self._failures > self._retries


def error_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def wait_s(state: RetryCallState) -> float:
    """The seconds of `Retry-After`, at most `MOST_ASKED_S`, plus the backoff: so not all clients come back at once."""
    error = error_of(state)
    asked_s = error.retry_after_s if isinstance(error, StatusError) else None
    extra_s = random.uniform(0, LONGEST_EXTRA_WAIT_S) if is_full(error) and asked_s else BACKOFF(state)
    return min(asked_s or 0.0, MOST_ASKED_S) + extra_s


def log_retry(state: RetryCallState) -> None:
    logger.warning("Trying again in %.1f s: %s", state.upcoming_sleep, error_of(state))


def call_policy(
    retries: int, timeout_s: float | None, is_repeated: Callable[[BaseException], bool] = may_pass
) -> dict[str, Any]:
    """Options of tenacity for one call: at most `retries` failures are retried, and none after `timeout_s`."""
    in_time = stop_never if timeout_s is None else stop_before_delay(timeout_s)
    return {
        "retry": retry_if_exception(is_repeated),
        "stop": StopAfterFailures(retries) | in_time,
        "wait": wait_s,
        "before_sleep": log_retry,
        "reraise": True,
    }


def readiness_policy(shown_url: str, timeout_s: float) -> dict[str, Any]:
    """Options of tenacity: asks until the service is ready.

    Every error is transient while a service starts: its proxy answers 404 before the application is there.
    """

    def give_up(state: RetryCallState) -> NoReturn:
        reason = error_of(state)
        raise ServiceUnreachable(f"{shown_url} is not ready after {timeout_s:g} s. {reason}") from reason

    return {
        "retry": retry_if_exception_type(RolloutError),
        "stop": stop_before_delay(timeout_s),
        "wait": wait_fixed(READY_POLL_S),
        "retry_error_callback": give_up,
    }
