"""Makes the calls of one service over one connection pool, and makes failed ones again. I/O only."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying

from rollout_client.calls.call import Call, Result, nothing
from rollout_client.calls.concurrency import async_cancelled, async_sleep
from rollout_client.calls.options import (
    IDEMPOTENCY_KEY,
    CallLimits,
    CallOptions,
    ClientSettings,
    before_the_response,
    during_the_response,
    without_password,
)
from rollout_client.errors import ContractDiffers, RolloutError, error_of_response
from rollout_client.retry import call_policy, may_pass
from rollout_client.version import check_contract

END_RUN_WITHIN_S = 5.0
Predicate = Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True)
class AsyncConnection:
    """The connections to one service.

    Args:
        http: sends the requests; its own `base_url` is not used.
        settings: of the client.
    """

    http: httpx.AsyncClient
    settings: ClientSettings

    async def short(self, call: Call[Result], options: CallOptions) -> Result:
        """`result` of a call that plays no rollouts and changes no weights."""
        return await self.result(call, self.settings.short_limits(options))

    async def result(self, call: Call[Result], limits: CallLimits, is_repeated: Predicate = may_pass) -> Result:
        """Makes `call` and reads its response; makes it again after an error for which `is_repeated`.

        A call with an idempotency key that is cancelled ends its run.
        """
        policy = call_policy(limits.retries, limits.timeout_s, is_repeated)
        try:
            result: Result = await AsyncRetrying(sleep=async_sleep, **policy)(self.result_of_one_attempt, call, limits)
        except async_cancelled:
            await self.end_run(limits)
            raise
        return result

    async def end_run(self, limits: CallLimits) -> None:
        """Deletes the run of the idempotency key in `limits`, if there is one: its caller has gone.

        Where that fails, the run goes on to its end, and its answer is kept like that of a job.
        """
        if IDEMPOTENCY_KEY in limits.headers:
            own = CallLimits(END_RUN_WITHIN_S, headers={IDEMPOTENCY_KEY: limits.headers[IDEMPOTENCY_KEY]})
            with suppress(RolloutError):
                await self.result_of_one_attempt(Call("DELETE", "/jobs", nothing), own)

    async def result_of_one_attempt(self, call: Call[Result], limits: CallLimits) -> Result:
        async with aclosing(await self.attempt(call, limits)) as response:
            return call.read([chunk async for chunk in body_chunks(response, limits)])

    async def open(self, call: Call[Any], limits: CallLimits) -> httpx.Response:
        """Makes `call` and returns its response with the body still to be read; makes it again where that may help."""
        policy = call_policy(limits.retries, limits.timeout_s)
        return await AsyncRetrying(sleep=async_sleep, **policy)(self.attempt, call, limits)

    async def attempt(self, call: Call[Any], limits: CallLimits) -> httpx.Response:
        """Sends `call` once and returns its response with the body still to be read.

        Raises:
            StatusError: the status is not a success.
            ContractDiffers: the service speaks another version of the contract.
            ServiceUnreachable, StreamBroken, RolloutTimeout: there was no whole response.
        """
        with before_the_response(without_password(self.settings.base_url), limits):
            request = self.http.build_request(**self.settings.request(call, limits))
            response = await self.http.send(request, stream=True)
        try:
            check_contract(response.headers)
        except ContractDiffers:
            await response.aclose()
            raise
        if response.is_success:
            return response
        async with aclosing(response):
            body = b"".join([chunk async for chunk in body_chunks(response, limits)])
        raise error_of_response(response.status_code, response.headers, body)


async def body_chunks(response: httpx.Response, limits: CallLimits) -> AsyncGenerator[bytes, None]:
    with during_the_response(limits):
        async for chunk in response.aiter_bytes():
            limits.left_s()
            yield chunk


class AsyncResource:
    """Base of the calls of one resource."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
