"""Polls a service for readings. I/O only: `view.py` derives the views from them.

A service that goes away is asked again at the next interval, and so is one that was never there. Only a key that the
service refuses, or a contract that this client does not speak, ends it: neither passes by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.call import Call
from rollout_client.calls.policy import policy_call
from rollout_client.calls.rollouts import info_call, readiness_call
from rollout_client.cli.commands.service import ignoring_unavailable
from rollout_client.cli.top.metrics import Series, values_of
from rollout_client.cli.top.view import Reading, Top, TopView
from rollout_client.contract.info import DegradedPart
from rollout_client.errors import (
    ResponseNotUnderstood,
    RolloutTimeout,
    ServiceFailed,
    ServiceUnreachable,
    StatusError,
    StreamBroken,
)

ANSWER_WITHIN_S = 15.0
"""The service itself waits five seconds for its replicas, and for the metrics of each node."""
NO_ANSWER = (ServiceUnreachable, StreamBroken, RolloutTimeout)

Found = TypeVar("Found")


async def views(
    client: AsyncRolloutClient, window_s: float, interval_s: float, count: int
) -> AsyncGenerator[TopView, None]:
    """Yields `count` views, or endlessly if it is 0. The first has no rates.

    Raises:
        RequestRejected: the service refuses the key.
        RolloutError: the response is not one of a rollout service that this client knows.
    """
    top = Top(window_s)
    looks = 0
    while True:
        yield await view_of(client, top)
        looks += 1
        if looks == count:
            return
        await asyncio.sleep(interval_s)


async def view_of(client: AsyncRolloutClient, top: Top) -> TopView:
    try:
        reading = await reading_of(client)
    except NO_ANSWER as error:
        return top.missed(monotonic(), str(error))
    return top.take(reading)


async def reading_of(client: AsyncRolloutClient) -> Reading:
    """One reading. Parts that the key may not see, or that the service fails to report, are `None`.

    Raises what `views` raises, and one of `NO_ANSWER` if `/readyz` has no answer.
    """
    at_s = monotonic()
    metrics = client.once(metrics_call(), ANSWER_WITHIN_S)
    state = client.once(policy_call(), ANSWER_WITHIN_S)
    about = client.once(info_call(), ANSWER_WITHIN_S)
    values, policy, info, (reason, degraded) = await asyncio.gather(
        unless_unavailable(metrics), unless_unavailable(state), unless_unavailable(about), readiness_of(client)
    )
    return Reading(at_s, values, policy, info, reason, degraded)


async def unless_unavailable(answer: Awaitable[Found]) -> Found | None:
    with suppress(ServiceFailed, *NO_ANSWER), ignoring_unavailable():
        return await answer
    return None


async def readiness_of(client: AsyncRolloutClient) -> tuple[str | None, tuple[DegradedPart, ...]]:
    """Why no rollout would work, if none would, and what does not answer."""
    try:
        return None, tuple((await client.once(readiness_call(), ANSWER_WITHIN_S)).degraded)
    except StatusError as error:
        return str(error), ()


def metrics_call() -> Call[dict[Series, float]]:
    return Call("GET", "/metrics", read_metrics, accept="text/plain")


def read_metrics(body: bytes) -> dict[Series, float]:
    try:
        return values_of(body.decode())
    except ValueError as error:
        raise ResponseNotUnderstood(f"The response of GET /metrics is not in Prometheus' format: {error}.") from error
