"""The server half of batching: yields the results of one batched call. Client half: `service/remote/batching.py`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from deployments.failures import RolloutFailure
from deployments.rpc.message_size import divided

logger = logging.getLogger("rollout_service.rpc")

Result = TypeVar("Result")
BatchResults = list[tuple[int, Result | RolloutFailure]]
"""Each result with its request's place in the call."""


async def results_as_completed(
    jobs: Sequence[Awaitable[Result | RolloutFailure]],
    if_cancelled: RolloutFailure,
    bytes_of: Callable[[Result | RolloutFailure], int],
    wake: asyncio.Event | None = None,
) -> AsyncGenerator[BatchResults[Result], None]:
    """Runs all jobs concurrently and yields each result exactly once, as soon as it is there.

    The results of one event-loop iteration are yielded together, divided into batches within the bounds of
    `message_size`. A job returns its failures; the result of a job that was cancelled is `if_cancelled`. Setting `wake`
    yields an empty batch if no result is there. Closing the generator cancels the jobs that still run.
    """
    finished: BatchResults[Result] = []
    some_finished = wake or asyncio.Event()

    def add_result(place: int, task: "asyncio.Future[Result | RolloutFailure]") -> None:
        finished.append((place, result_of(task, if_cancelled)))
        some_finished.set()

    tasks = [asyncio.ensure_future(job) for job in jobs]
    for place, task in enumerate(tasks):
        task.add_done_callback(partial(add_result, place))
    missing = len(tasks)
    try:
        while missing:
            await some_finished.wait()
            some_finished.clear()
            batch = finished.copy()
            finished.clear()
            missing -= len(batch)
            for message in divided(batch, lambda result: bytes_of(result[1])) if batch else [batch]:
                yield message
    finally:
        for task in tasks:
            task.cancel()


def result_of(task: "asyncio.Future[Result | RolloutFailure]", if_cancelled: RolloutFailure) -> Result | RolloutFailure:
    """The result of a job that has ended in whatever way, so that its caller never waits in vain."""
    if task.cancelled():
        return if_cancelled
    error = task.exception()
    if error is None:
        return task.result()
    # A job catches every `Exception`. What it raises is something else, such as the panic of a library in Rust.
    logger.warning("A call broke.", exc_info=error)
    return RolloutFailure(f"{type(error).__name__} was raised.")
