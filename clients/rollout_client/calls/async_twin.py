"""A `RolloutClient` as an `AsyncRolloutClient` that sends through it, for helpers that are handed the former."""

import asyncio

import httpx

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.sync_client.client import RolloutClient

OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
"""Headers of a response that no longer hold once it is read."""


class ThreadedTransport(httpx.AsyncBaseTransport):
    """Sends each request through `http`, in a thread: its proxies, certificates, auth, cookies and hooks count."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the whole response."""
        return await asyncio.to_thread(self._answer, request, await request.aread())

    def _answer(self, request: httpx.Request, content: bytes) -> httpx.Response:
        sent = self._http.build_request(
            request.method, request.url, headers=request.headers, content=content, extensions=request.extensions
        )
        response = self._http.send(sent)
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in OF_THE_TRANSFER]
        return httpx.Response(response.status_code, headers=headers, content=response.content)


def async_twin(client: RolloutClient) -> AsyncRolloutClient:
    """A client with the address, timeout, retries and headers of `client`, which sends through its HTTP client.

    Closing it leaves `client` open. It reads each response as a whole: streams would come at once.
    """
    connection = client._connection
    http = httpx.AsyncClient(
        transport=ThreadedTransport(connection.http), headers=connection.http.headers, trust_env=False
    )
    twin = AsyncRolloutClient(client.base_url, http_client=http)
    twin._connection = AsyncConnection(http, connection.settings)
    return twin
