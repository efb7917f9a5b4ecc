"""The client. It only does I/O: other modules decide what to send, how to read it and when to try again."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self, Unpack

import httpx
from tenacity import AsyncRetrying

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.async_client.info import AsyncInfoCalls
from rollout_client.calls.async_client.records import AsyncRecordCalls
from rollout_client.calls.async_client.rollouts import AsyncRolloutCalls
from rollout_client.calls.async_client.weights import AsyncWeightCalls
from rollout_client.calls.call import Call, Result, call_for
from rollout_client.calls.concurrency import async_sleep
from rollout_client.calls.options import (
    UPDATE_ADVICE,
    ClientOptions,
    ClientSettings,
    client_headers,
    service_url,
    without_password,
)
from rollout_client.contract.info import Ready
from rollout_client.retry import DEFAULT_RETRIES, readiness_policy

if TYPE_CHECKING:
    from rollout_client.calls.async_client.jobs import AsyncJobs
    from rollout_client.calls.async_client.policy import AsyncPolicy
    from rollout_client.calls.async_client.sessions import AsyncSessions

UNBOUNDED = httpx.Limits(max_connections=None, max_keepalive_connections=64)
"""Admission is the service's: a request that waited for a connection here would be invisible to it."""


class AsyncRolloutClient(AsyncRolloutCalls, AsyncRecordCalls, AsyncWeightCalls, AsyncInfoCalls):
    """Talks to one rollout service. There are two clients with the same methods: one that blocks and may be shared
    between threads, and one for asyncio, where cancelling a rollout ends it at the service too.

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
        settings = ClientSettings(url, timeout_s, retries, client_headers(api_key, url, headers, http_client))
        http = httpx.AsyncClient(limits=UNBOUNDED) if http_client is None else http_client
        super().__init__(AsyncConnection(http, settings))
        self._is_owner = http_client is None

    @property
    def jobs(self) -> "AsyncJobs":
        """Rollouts that outlive their connection."""
        from rollout_client.calls.async_client.jobs import AsyncJobs

        return AsyncJobs(self._connection)

    @property
    def policy(self) -> "AsyncPolicy":
        """The weights that the service has, and which of them it serves."""
        from rollout_client.calls.async_client.policy import AsyncPolicy

        return AsyncPolicy(self._connection)

    @property
    def sessions(self) -> "AsyncSessions":
        """Agents that bring their own loop."""
        from rollout_client.calls.async_client.sessions import AsyncSessions

        return AsyncSessions(self._connection)

    @property
    def base_url(self) -> str:
        """The service's URL, without a slash at its end."""
        return str(self._connection.settings.base_url)

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
        client = copy(self)
        client._connection = replace(self._connection, settings=self._connection.settings.replaced(options))
        client._is_owner = False
        return client

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Returns once rollouts can be served; raises `ServiceUnreachable` with the last reason after `timeout_s`."""
        settings = self._connection.settings
        policy = readiness_policy(without_password(settings.base_url), timeout_s)
        readiness, limits = call_for(Ready, "GET", "/readyz"), settings.limits({"timeout_s": timeout_s})
        await AsyncRetrying(sleep=async_sleep, **policy)(self._connection.result_of_one_attempt, readiness, limits)

    async def once(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Makes a `Call` of one's own in one attempt."""
        limits = self._connection.settings.limits({"timeout_s": timeout_s}, advice=UPDATE_ADVICE)
        return await self._connection.result_of_one_attempt(call, limits)
