"""Makes the calls of one service over one connection pool, and makes failed ones again. I/O only."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import httpx
from tenacity import AsyncRetrying

from rollout_client.calls.call import Call, Result
from rollout_client.calls.concurrency import async_cancelled, async_sleep
from rollout_client.calls.options import (
    IDEMPOTENCY_KEY,
    SHORT_CALL_ADVICE,
    SHORT_CALL_TIMEOUT_S,
    CallLimits,
    CallOptions,
    ClientDefaults,
    Deadline,
    before_the_response,
    during_the_response,
    merged,
    shown,
)
from rollout_client.calls.rollouts import end_run_call
from rollout_client.errors import ContractDiffers, RolloutError, error_of_response
from rollout_client.retry import call_policy, may_pass
from rollout_client.version import check_contract

END_RUN_WITHIN_S = 5.0


class AsyncConnection:
    """The connections to one service.

    Args:
        http: sends the requests; its own `base_url` is not used.
        base_url: of the service.
        defaults: of the client.
    """

    def __init__(self, http: httpx.AsyncClient, base_url: httpx.URL, defaults: ClientDefaults) -> None:
        self.http = http
        self.base_url = base_url
        self.defaults = defaults

    async def short(self, call: Call[Result], options: CallOptions, longest_s: float = SHORT_CALL_TIMEOUT_S) -> Result:
        """`result` of a call that plays no rollouts and changes no weights."""
        return await self.result(call, self.defaults.limits(options, longest_s, SHORT_CALL_ADVICE))

    async def result(
        self,
        call: Call[Result],
        limits: CallLimits,
        is_repeated: Callable[[BaseException], bool] = may_pass,
    ) -> Result:
        """Makes `call` and reads its response; makes it again after an error for which `is_repeated`.

        A call with an idempotency key that is cancelled ends its run.
        """
        policy = call_policy(limits.retries, limits.deadline.timeout_s, is_repeated)
        try:
            result: Result = await AsyncRetrying(sleep=async_sleep, **policy)(self.result_of_one_attempt, call, limits)
        except async_cancelled:
            await self.end_run(limits)
            raise
        return result

    async def end_run(self, limits: CallLimits) -> None:
        """Deletes the run of the idempotency key in `limits`, if there is one: nobody waits for it any longer.

        Where that fails, the run goes on to its end, and its answer is kept like that of a job.
        """
        if IDEMPOTENCY_KEY in limits.headers:
            key = {IDEMPOTENCY_KEY: limits.headers[IDEMPOTENCY_KEY]}
            with suppress(RolloutError):
                await self.result_of_one_attempt(end_run_call(), CallLimits(Deadline(END_RUN_WITHIN_S), 0, key))

    async def result_of_one_attempt(self, call: Call[Result], limits: CallLimits) -> Result:
        async with aclosing(await self.attempt(call, limits)) as response:
            return call.read(call.join([chunk async for chunk in body_chunks(response, limits.deadline)]))

    async def open(self, call: Call[Any], limits: CallLimits) -> httpx.Response:
        """Makes `call` and returns its response with the body still to be read; makes it again where that may help."""
        policy = call_policy(limits.retries, limits.deadline.timeout_s)
        return await AsyncRetrying(sleep=async_sleep, **policy)(self.attempt, call, limits)

    async def attempt(self, call: Call[Any], limits: CallLimits) -> httpx.Response:
        """Sends `call` once and returns its response with the body still to be read.

        Raises:
            StatusError: the status is not a success.
            ContractDiffers: the service speaks another version of the contract.
            ServiceUnreachable, StreamBroken, RolloutTimeout: there was no whole response.
        """
        with before_the_response(shown(self.base_url), limits.deadline):
            response = await self.http.send(self._request(call, limits), stream=True)
        try:
            check_contract(response.headers)
        except ContractDiffers:
            await response.aclose()
            raise
        if response.is_success:
            return response
        async with aclosing(response):
            body = b"".join([chunk async for chunk in body_chunks(response, limits.deadline)])
        raise error_of_response(response.status_code, response.headers, body)

    def _request(self, call: Call[Any], limits: CallLimits) -> httpx.Request:
        headers = merged(self.defaults.request_headers(), call.headers)
        return self.http.build_request(
            call.method,
            str(self.base_url).rstrip("/") + call.path,
            params=call.query,
            content=call.body,
            headers=merged(headers, limits.headers),
            timeout=limits.deadline.http_timeout(),
        )


async def body_chunks(response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
    with during_the_response(deadline):
        async for chunk in response.aiter_bytes():
            deadline.left_s()
            yield chunk
