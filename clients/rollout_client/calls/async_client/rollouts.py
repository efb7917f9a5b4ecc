"""The methods of the client that play rollouts and show tasks."""

from typing import TYPE_CHECKING, Unpack

from rollout_client.async_client.stream import AsyncRolloutStream
from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.ndjson import NdjsonReader, in_input_order
from rollout_client.calls.options import CallOptions, call_options
from rollout_client.calls.progress import rollout_bar
from rollout_client.calls.rollouts import (
    RolloutOptions,
    Samples,
    arrow_rollout_call,
    rollout_call,
    rollout_count,
    streamed_rollout_call,
    task_samples_call,
    tasks_call,
)
from rollout_client.contract.rollouts import RolloutResponse, SampleInput, SampleResult
from rollout_client.deadline import SHORT_CALL_ADVICE, SHORT_CALL_TIMEOUT_S
from rollout_client.task_contract import TaskInfo, TaskSamples

if TYPE_CHECKING:
    from rollout_client.arrow.bodies import ArrowResponse


class AsyncRolloutMethods:
    _connection: AsyncConnection

    async def rollout(
        self, samples: Samples = (), *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> RolloutResponse:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        Without `samples`, `samples_from` says which samples of the service are played.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            limits = self._connection.defaults.limits(call_options(options))
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
        limits = self._connection.defaults.limits(call_options(options))
        return await self._connection.result(arrow_rollout_call(samples, options), limits)

    def stream(self, samples: Samples = (), **options: Unpack[RolloutOptions]) -> AsyncRolloutStream:
        """Plays `samples` and yields each rollout when it ends. Use it as a context manager.

        Leaving the block early ends the request, and the service cancels what is still running.
        """
        call = streamed_rollout_call(samples, options)
        lines = NdjsonReader(rollout_count(samples, options))
        return AsyncRolloutStream(self._connection, call, lines, call_options(options))

    async def tasks(self, **options: Unpack[CallOptions]) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        limits = self._connection.defaults.limits(options, SHORT_CALL_TIMEOUT_S, SHORT_CALL_ADVICE)
        return await self._connection.result(tasks_call(), limits)

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
        limits = self._connection.defaults.limits(options, SHORT_CALL_TIMEOUT_S, SHORT_CALL_ADVICE)
        return await self._connection.result(task_samples_call(task_name, count, start, seed, split), limits)
