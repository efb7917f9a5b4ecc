"""Makes the calls of one service over one connection pool and tries failed ones again. I/O only."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
from tenacity import AsyncRetrying

from rollout_client.base_url import address
from rollout_client.deadline import Deadline
from rollout_client.errors import error_of_answer
from rollout_client.http_errors import before_the_response, during_the_response
from rollout_client.retry import call_policy
from rollout_client.rollout_calls import Call, Result


class AsyncConnection:
    """
    Args:
        http: sends the requests; its `base_url` is the service's.
        timeout_s: what one rollout or one update of the weights may take, in seconds; `None` sets no limit.
        retries: further attempts of one call.
    """

    def __init__(self, http: httpx.AsyncClient, timeout_s: float | None, retries: int) -> None:
        self.http = http
        self.timeout_s = timeout_s
        self.retries = retries

    @property
    def address(self) -> str:
        return address(self.http.base_url)

    async def result(self, call: Call[Result], deadline: Deadline) -> Result:
        """Makes `call`, tries it again where that may help, and reads its response."""
        async with aclosing(await self.open(call, deadline)) as response:
            return call.read(call.joined([chunk async for chunk in body_chunks(response, deadline)]))

    async def result_of_one_attempt(self, call: Call[Result], deadline: Deadline) -> Result:
        """Makes `call` once and reads its response."""
        async with aclosing(await self.attempt(call, deadline)) as response:
            return call.read(call.joined([chunk async for chunk in body_chunks(response, deadline)]))

    async def open(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        """The response of `call` with its body still to be read; the call is tried again where that may help."""
        return await AsyncRetrying(**call_policy(self.retries, deadline.timeout_s))(self.attempt, call, deadline)

    async def attempt(self, call: Call[Any], deadline: Deadline) -> httpx.Response:
        """Sends `call` once; returns its response, with the body still to be read, if the status is a success."""
        with before_the_response(self.address, deadline):
            response = await self.http.send(self._request(call, deadline), stream=True)
        if response.is_success:
            return response
        async with aclosing(response):
            body = b"".join([chunk async for chunk in body_chunks(response, deadline)])
        raise error_of_answer(response.status_code, response.headers, body)

    def _request(self, call: Call[Any], deadline: Deadline) -> httpx.Request:
        return self.http.build_request(
            call.method,
            call.path,
            params=call.query,
            content=call.body,
            headers=call.headers,
            timeout=deadline.http_timeout(),
        )


async def body_chunks(response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
    with during_the_response(deadline):
        async for chunk in response.aiter_bytes():
            deadline.left_s()
            yield chunk
