"""The methods of the client that play rollouts and show tasks."""

from typing import TYPE_CHECKING, Unpack

from rollout_client.async_client.connection import AsyncConnection
from rollout_client.async_client.stream import AsyncRolloutStream
from rollout_client.contract import RolloutResponse, SampleInput, SampleResult
from rollout_client.deadline import SHORT_CALL_TIMEOUT_S, Deadline
from rollout_client.ndjson import NdjsonReader, in_input_order
from rollout_client.progress import rollout_bar
from rollout_client.rollout_calls import (
    RolloutOptions,
    Samples,
    arrow_rollout_call,
    example_samples_call,
    rollout_call,
    rollout_count,
    streamed_rollout_call,
    tasks_call,
)
from rollout_client.task_contract import TaskInfo

if TYPE_CHECKING:
    from rollout_client.arrow.response import ArrowResponse


class AsyncRolloutMethods:
    _connection: AsyncConnection

    async def rollout(
        self, samples: Samples, *, progress: bool = False, **options: Unpack[RolloutOptions]
    ) -> RolloutResponse:
        """Plays `samples` and returns their rollouts in input order, those of one sample next to each other.

        With `progress`, a bar on stderr counts them as they finish (needs the `cli` extra).
        """
        if not progress:
            call = rollout_call(samples, options)
            return await self._connection.result(call, Deadline(self._connection.timeout_s))
        by_position: dict[int, SampleResult] = {}
        with rollout_bar(rollout_count(samples, options)) as count:
            async with self.stream(samples, **options) as rollouts:
                async for position, sample in rollouts.placed():
                    by_position[position] = sample
                    count(sample)
                return in_input_order(rollouts.summary, by_position)

    async def rollout_arrow(self, samples: Samples, **options: Unpack[RolloutOptions]) -> "ArrowResponse":
        """`rollout`, request and answer as Arrow: the same in a third of the bytes, and `to_tensors` takes it as it is.

        Raises `ModuleNotFoundError` without the `arrow` extra.
        """
        call = arrow_rollout_call(samples, options)
        return await self._connection.result(call, Deadline(self._connection.timeout_s))

    def stream(self, samples: Samples, **options: Unpack[RolloutOptions]) -> AsyncRolloutStream:
        """Plays `samples` and gives out each rollout the moment it ends. Use it as a context manager.

        Leaving the block early ends the request, and the service cancels what is still running.
        """
        call = streamed_rollout_call(samples, options)
        lines = NdjsonReader(rollout_count(samples, options))
        return AsyncRolloutStream(self._connection, call, lines, self._connection.timeout_s)

    async def tasks(self) -> list[TaskInfo]:
        """The tasks of the service, the fields they need and an example of each."""
        return await self._connection.result(tasks_call(), Deadline(SHORT_CALL_TIMEOUT_S))

    async def example_samples(self, task_name: str, count: int = 8, seed: int = 0) -> list[SampleInput]:
        """Samples of a task, ready to post; equal seeds give equal samples."""
        call = example_samples_call(task_name, count, seed)
        return await self._connection.result(call, Deadline(SHORT_CALL_TIMEOUT_S))
