"""`client.policy`: the weights that the service has, and which of them it serves."""

import math
from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncResource
from rollout_client.calls.call import Call, call_for, nothing, path_of, without_none
from rollout_client.calls.concurrency import async_sleep
from rollout_client.calls.json_values import json_bytes
from rollout_client.calls.options import SHORT_CALL_TIMEOUT_S, UPDATE_ADVICE, CallLimits, CallOptions
from rollout_client.calls.policy import LONGEST_QUESTION_S, RESPONSE_S, SwitchCallOptions, pause_s, switch_query
from rollout_client.contract.policy import PolicyLayout, PolicyState, PolicyUpdate
from rollout_client.errors import RequestRejected
from rollout_client.retry import has_not_begun


class AsyncPolicy(AsyncResource):
    """`client.policy`. Each method raises a `RolloutError`; `client.push_weights` sends weights."""

    async def state(self, checksums_within_s: float = 0.0, **options: Unpack[CallOptions]) -> PolicyState:
        """Which weights the service serves, which it has, and what each of its replicas has loaded.

        With `checksums_within_s` the replicas compute the checksums of the weights in their engines, while generations
        go on, and the answer waits at most so many seconds for them. Without it nothing is computed.
        """
        call = call_for(PolicyState, "GET", "/policy", query={"checksums_within_s": checksums_within_s or None})
        limits = self._connection.settings.short_limits(options, SHORT_CALL_TIMEOUT_S + checksums_within_s)
        return await self._connection.result(call, limits)

    async def layout(self, **options: Unpack[CallOptions]) -> PolicyLayout:
        """The tensors that full weights must have: name, dtype and shape of each."""
        return await self._connection.short(call_for(PolicyLayout, "GET", "/policy/layout"), options)

    async def wait_for_version(
        self, version: int, timeout_s: float | None = 600.0, *, retries: int | None = None
    ) -> PolicyState:
        """Returns once every replica serves `version` or a newer one.

        Raises `RolloutTimeout` after `timeout_s`; `None` sets no limit.
        """
        whole = CallLimits(math.inf if timeout_s is None else timeout_s)
        given: CallOptions = {} if retries is None else {"retries": retries}
        while True:
            wait_s = round(min(whole.remaining_s() or 0.0, LONGEST_QUESTION_S), 3)
            limits = self._connection.settings.limits({**given, "timeout_s": wait_s + RESPONSE_S})
            query = {"min_version": version, "wait_s": wait_s}
            try:
                return await self._connection.result(call_for(PolicyState, "GET", "/policy", query=query), limits)
            except RequestRejected as error:
                await async_sleep(pause_s(error, version, whole))

    async def rollback(
        self, to: int, version: int | None = None, name: str | None = None, **options: Unpack[SwitchCallOptions]
    ) -> PolicyUpdate:
        """Makes the weights of version `to` current again, as a new version, and returns once every replica serves it.

        Args:
            to: a version whose weights the service still has; `state()` lists them.
            version: number of the new version; without it, one more than the newest that the service knows.
            name: serves the adapter of version `to` as this named policy, beside the current weights, which stay.

        Raises:
            RequestRejected: 404, the service does not have these weights, or no longer; the message lists those it has.
        """
        body = json_bytes(without_none({"to": to, "version": version, "name": name}))
        call = call_for(PolicyUpdate, "POST", "/policy/rollback", query=switch_query(options), body=body)
        limits = self._connection.settings.limits(options, advice=UPDATE_ADVICE)
        return await self._connection.result(call, limits, has_not_begun)

    async def drop(self, name: str, **options: Unpack[CallOptions]) -> None:
        """The service serves the named policy no longer. Rollouts of it that need further tokens fail.

        Raises:
            RequestRejected: 404, there is no policy of this name; the message lists those that there are.
        """
        limits = self._connection.settings.limits(options, advice=UPDATE_ADVICE)
        await self._connection.result(Call("DELETE", path_of("policy", "names", name), nothing), limits, has_not_begun)
