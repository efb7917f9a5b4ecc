"""The methods of the client that play rollouts and list tasks, and the stream of a request's rollouts."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Self, Unpack

import httpx

from rollout_client.calls.async_client.connection import AsyncConnection, body_chunks
from rollout_client.calls.call import Call
from rollout_client.calls.concurrency import async_cancelled
from rollout_client.calls.ndjson import NdjsonReader, PositionedSample, in_input_order
from rollout_client.calls.options import (
    CallLimits,
    CallOptions,
    Deadline,
)
from rollout_client.calls.progress import rollout_bar
from rollout_client.calls.rollouts import (
    RolloutOptions,
    Samples,
    arrow_rollout_call,
    group_size,
    rollout_call,
    rollout_count,
    streamed_rollout_call,
    task_samples_call,
    tasks_call,
)
from rollout_client.contract.info import TaskInfo, TaskSamples
from rollout_client.contract.rollouts import RolloutSummary, SampleInput, SampleResult
from rollout_client.errors import RolloutError
from rollout_client.responses import PlayedRollouts

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse


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
        """The number of rollouts that the request asks for; with `keep.where`, the most that come."""
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


class AsyncRolloutMethods:
    _connection: AsyncConnection

    async def rollout(
        self, samples: Samples = (), *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> PlayedRollouts:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        Without `samples`, `samples_from` says which samples of the service are played.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            limits = self._connection.defaults.limits(options)
            return await self._connection.result(rollout_call(samples, options), limits)
        by_position: dict[int, SampleResult] = {}
        with rollout_bar(rollout_count(samples, options)) as count:
            async with self.stream(samples, **options) as rollouts:
                async for position, sample in rollouts.with_positions():
                    by_position[position] = sample
                    count(sample)
                return in_input_order(rollouts.summary, by_position)

    async def rollout_arrow(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> "ArrowResponse":
        """`rollout` with request and response as Arrow: a third of the bytes, and `to_tensors` makes no Python objects.

        Raises `ModuleNotFoundError` without the `arrow` extra.
        """
        limits = self._connection.defaults.limits(options)
        return await self._connection.result(arrow_rollout_call(samples, options), limits)

    def stream(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> AsyncRolloutStream:
        """Plays `samples` and yields each rollout when it ends. Use it as a context manager.

        Leaving the block early ends the request, and the service cancels what is still running.
        """
        call = streamed_rollout_call(samples, options)
        lines = NdjsonReader(rollout_count(samples, options), group_size(options))
        return AsyncRolloutStream(self._connection, call, lines, options)

    async def tasks(self, **options: Unpack[CallOptions]) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        return await self._connection.short(tasks_call(), options)

    async def example_samples(
        self, task_name: str, count: int = 8, seed: int = 0, **options: Unpack[CallOptions]
    ) -> list[SampleInput]:
        """The first samples of `task_samples`, without where the next ones begin."""
        return (await self.task_samples(task_name, count, seed=seed, **options)).samples

    async def task_samples(
        self,
        task_name: str,
        count: int = 8,
        start: int = 0,
        *,
        seed: int | None = None,
        split: str | None = None,
        **options: Unpack[CallOptions],
    ) -> TaskSamples:
        """A page of the task's data, or of what its environment makes: samples that can be posted as they are.

        Equal arguments give equal samples. They are those that `samples_from` plays for a `SampleRange` like them.
        """
        return await self._connection.short(task_samples_call(task_name, count, start, seed, split), options)
