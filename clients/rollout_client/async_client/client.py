"""The client: what to send, how to read it and when to try again is decided in other modules; here is the I/O."""

from contextlib import aclosing
from typing import Self

import httpx
from tenacity import AsyncRetrying

from rollout_client.async_client.connection import AsyncConnection
from rollout_client.async_client.policy import AsyncPolicyMethods
from rollout_client.async_client.rollouts import AsyncRolloutMethods
from rollout_client.base_url import DEFAULT_URL, checked_url
from rollout_client.deadline import UPDATE_ADVICE, Deadline
from rollout_client.retry import readiness_policy
from rollout_client.rollout_calls import Call, Result, readiness_call

UNBOUNDED = httpx.Limits(max_connections=None, max_keepalive_connections=64)
"""Admission is the service's: a request that waited for a connection here would be invisible to it."""


class AsyncRolloutClient(AsyncRolloutMethods, AsyncPolicyMethods):
    """Talks to one rollout service. Cancelling a rollout ends it at the service too.

    Args:
        base_url: of the service, with its scheme.
        timeout_s: what a whole rollout or a whole update of the weights may take, in seconds, the caller's own time
            between the samples of a stream included; without it, as long as it takes. It is looked at when a chunk of
            the answer arrives, and when none arrives for that long.
        retries: further attempts after a connection that failed before the answer began, or a 503; nothing else is
            tried again but chunks of an upload. A long rollout in one piece begins its answer when its last sample is
            done.
        transport: carries the requests in place of httpx's own.

    Every method that talks to the service raises a `RolloutError`. `ValueError` means that the arguments are at fault:
    `base_url` is no URL, or a sample holds what is no JSON.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        timeout_s: float | None = None,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        http = httpx.AsyncClient(base_url=checked_url(base_url), limits=UNBOUNDED, transport=transport)
        self._connection = AsyncConnection(http, timeout_s, retries)

    @property
    def base_url(self) -> str:
        """Of the service, without a slash at its end."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.http.aclose()

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Returns once rollouts can be served; raises `ServiceUnreachable` with the last reason after `timeout_s`."""
        deadline = Deadline(timeout_s)

        async def ask() -> None:
            async with aclosing(await self._connection.attempt(readiness_call(), deadline)):
                pass

        await AsyncRetrying(**readiness_policy(self._connection.address, timeout_s))(ask)

    async def once(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Makes one of the calls of `rollout_calls` or `policy_calls`, and never tries it again."""
        return await self._connection.result_of_one_attempt(call, Deadline(timeout_s, advice=UPDATE_ADVICE))
