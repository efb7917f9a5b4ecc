"""The rollouts of one request, each as it finishes."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Self

import httpx

from rollout_client.calls.async_client.connection import AsyncConnection, body_chunks
from rollout_client.calls.concurrency import async_cancelled
from rollout_client.calls.ndjson import NdjsonReader, PositionedSample
from rollout_client.calls.options import CallLimits, CallOptions
from rollout_client.calls.rollouts import Call
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.deadline import Deadline
from rollout_client.errors import RolloutError


class AsyncRolloutStream:
    """Rollouts in the order in which they finish.

        async with client.stream(samples) as rollouts:
            async for sample in rollouts:
                ...
        rollouts.summary

    The request is sent when the block begins. Leaving the block early ends it, and the service cancels its rollouts.
    """

    def __init__(
        self, connection: AsyncConnection, call: Call[bytes], lines: NdjsonReader, options: CallOptions
    ) -> None:
        self._connection = connection
        self._call = call
        self._lines = lines
        self._options = options
        self._limits: CallLimits | None = None
        self._response: httpx.Response | None = None
        self._samples: AsyncGenerator[PositionedSample, None] | None = None

    @property
    def expected(self) -> int:
        """The number of rollouts that the request asks for."""
        return self._lines.expected

    @property
    def summary(self) -> RolloutSummary:
        """Raises `RuntimeError` before the last sample."""
        if self._lines.summary is None:
            raise RuntimeError("The summary comes after the last sample: iterate to the end first.")
        return self._lines.summary

    async def __aenter__(self) -> Self:
        limits = self._limits = self._connection.defaults.limits(self._options)
        try:
            self._response = await self._connection.open(self._call, limits)
        except async_cancelled:
            await self._connection.end_run(limits)
            raise
        self._samples = self._read(self._response, limits.deadline)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._samples is not None:
            await self._samples.aclose()
        if self._response is not None:
            await self._response.aclose()
        # After an error of the service or of the connection, the request may be posted again with its key.
        if self._limits is not None and self._lines.summary is None and not isinstance(error, RolloutError):
            await self._connection.end_run(self._limits)

    def __aiter__(self) -> AsyncIterator[SampleResult]:
        return (sample async for _, sample in self.with_positions())

    def with_positions(self) -> AsyncIterator[PositionedSample]:
        """Each sample with its position in the `samples` that `rollout` would have returned."""
        if self._samples is None:
            raise RuntimeError("A stream starts in a with statement: async with client.stream(...) as rollouts.")
        return self._samples

    async def _read(self, response: httpx.Response, deadline: Deadline) -> AsyncGenerator[PositionedSample, None]:
        async with aclosing(body_chunks(response, deadline)) as chunks:
            async for chunk in chunks:
                for positioned in self._lines.feed(chunk):
                    yield positioned
        self._lines.end()
