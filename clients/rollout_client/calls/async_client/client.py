"""The client. It only does I/O: other modules decide what to send, how to read it and when to try again."""

from collections.abc import Mapping
from contextlib import aclosing
from copy import copy
from typing import Self, Unpack

import httpx
from tenacity import AsyncRetrying

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.async_client.info import AsyncBlobMethods, AsyncInfoMethods, AsyncScoreMethods
from rollout_client.calls.async_client.jobs import AsyncJobs
from rollout_client.calls.async_client.policy import AsyncPolicyMethods
from rollout_client.calls.async_client.records import AsyncRecordMethods
from rollout_client.calls.async_client.rollouts import AsyncRolloutMethods
from rollout_client.calls.async_client.sessions import AsyncSessionMethods
from rollout_client.calls.call import Call, Result
from rollout_client.calls.concurrency import async_sleep
from rollout_client.calls.options import (
    UPDATE_ADVICE,
    ClientDefaults,
    ClientOptions,
    key_headers,
    merged,
    service_url,
    shown,
    user_agent_of,
)
from rollout_client.calls.rollouts import readiness_call
from rollout_client.retry import DEFAULT_RETRIES, readiness_policy

UNBOUNDED = httpx.Limits(max_connections=None, max_keepalive_connections=64)
"""Admission is the service's: a request that waited for a connection here would be invisible to it."""


class AsyncRolloutClient(
    AsyncRolloutMethods,
    AsyncRecordMethods,
    AsyncScoreMethods,
    AsyncSessionMethods,
    AsyncPolicyMethods,
    AsyncInfoMethods,
    AsyncBlobMethods,
):
    """Talks to one rollout service. `RolloutClient` is safe to share between threads; `AsyncRolloutClient` has the same
    methods for asyncio, and cancelling one of its rollouts ends it at the service too.

    Args:
        base_url: of the service, with its scheme; by default that of `http_client`, then the environment variable
            `ROLLOUT_URL`, then `http://127.0.0.1:8000`.
        timeout_s: what one call may take, in seconds, its retries and the caller's own time between the samples of a
            stream included; `None` sets no limit. Calls that play no rollouts and change no weights take at most 60 s.
            It is checked when a chunk of the response arrives, and when none arrives for that long.
        retries: further attempts after a transient failure: refused and broken connections, 408,
            425, 429, 500, 502, 503, 504 (`rollout_client.retry` has the whole table). The default goes on for 33 to
            67 s. While the service is full, the client waits and uses up no retry.
        headers: sent with every request.
        api_key: lets the client in where the service asks for keys; by default that of the environment variable
            `ROLLOUT_API_KEY`.
        http_client: sends the requests, in place of one of our own; `close` leaves it open.

    Each method takes `timeout_s`, `retries` and `request_id` of its own (`CallOptions`). Each method that talks to the
    service raises a `RolloutError`. `ValueError` means that the arguments are at fault: `base_url` is not a URL,
    `api_key` cannot be sent, or a sample holds a value that JSON does not have (`NotJson`).
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout_s: float | None = None,
        retries: int = DEFAULT_RETRIES,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        url = service_url(base_url, http_client)
        key = key_headers(api_key, url, headers, http_client)
        own_headers = merged(merged(user_agent_of(http_client), headers), key)
        defaults = ClientDefaults(timeout_s, retries, own_headers)
        http = httpx.AsyncClient(limits=UNBOUNDED) if http_client is None else http_client
        self._connection = AsyncConnection(http, url, defaults)
        self._is_owner = http_client is None

    @property
    def jobs(self) -> AsyncJobs:
        """Rollouts that outlive their connection."""
        return AsyncJobs(self._connection)

    @property
    def base_url(self) -> str:
        """The service's URL, without a slash at its end."""
        return str(self._connection.base_url).rstrip("/")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, unless they are those of an `http_client` or of another client (`with_options`)."""
        if self._is_owner:
            await self._connection.http.aclose()

    def with_options(self, **options: Unpack[ClientOptions]) -> Self:
        """A client with other `timeout_s`, `retries` or further `headers`, which shares this client's connections."""
        connection = self._connection
        client = copy(self)
        client._connection = AsyncConnection(
            connection.http, connection.base_url, connection.defaults.replaced(options)
        )
        client._is_owner = False
        return client

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Returns once rollouts can be served; raises `ServiceUnreachable` with the last reason after `timeout_s`."""
        limits = self._connection.defaults.limits({"timeout_s": timeout_s})

        async def ask() -> None:
            async with aclosing(await self._connection.attempt(readiness_call(), limits)):
                pass

        policy = readiness_policy(shown(self._connection.base_url), timeout_s)
        await AsyncRetrying(sleep=async_sleep, **policy)(ask)

    async def once(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Makes one of the calls of `calls/rollouts.py` or `calls/policy.py` in one attempt."""
        limits = self._connection.defaults.limits({"timeout_s": timeout_s}, advice=UPDATE_ADVICE)
        return await self._connection.result_of_one_attempt(call, limits)
