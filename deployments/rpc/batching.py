"""Jobs that came in one call, answered in batches: those that finish in one instant travel back together."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from deployments.failures import RolloutFailure

Answer = TypeVar("Answer")
BatchResults = list[tuple[int, Answer | RolloutFailure]]
"""Each with the place of its job in the call."""


async def results_as_completed(
    jobs: Sequence[Coroutine[Any, Any, Answer | RolloutFailure]], if_cancelled: RolloutFailure
) -> AsyncGenerator[BatchResults[Answer], None]:
    """Runs all jobs at once and yields their answers as they finish, each exactly once; closing it cancels the rest.

    A job answers by returning, its failures too. One that is cancelled is answered by `if_cancelled`.
    """
    finished: BatchResults[Answer] = []
    some_finished = asyncio.Event()

    def note(place: int, task: "asyncio.Task[Answer | RolloutFailure]") -> None:
        finished.append((place, call_result(task)))
        some_finished.set()

    def call_result(task: "asyncio.Task[Answer | RolloutFailure]") -> Answer | RolloutFailure:
        if task.cancelled():
            return if_cancelled
        # What a job raises is not even an `Exception` (a panic in a Rust library), and must not go unanswered either.
        error = task.exception()
        return task.result() if error is None else RolloutFailure(f"{type(error).__name__} was raised.")

    tasks = [asyncio.create_task(job) for job in jobs]
    for place, task in enumerate(tasks):
        task.add_done_callback(partial(note, place))
    unanswered = len(tasks)
    try:
        while unanswered:
            await some_finished.wait()
            some_finished.clear()
            batch = finished.copy()
            finished.clear()
            unanswered -= len(batch)
            yield batch
    finally:
        for task in tasks:
            task.cancel()
