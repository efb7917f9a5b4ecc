"""Batched calls between deployments: what one event-loop iteration brings travels in one message.

`IterationBatcher` collects, and `TogetherCaller` sends requests that take about as long as each other, with
`results_of` at the other end. Where they do not, `results_as_completed` yields each result when it is there: the server
half of `RequestBatcher` (`service/remote/batching.py`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Generic, TypeVar

from deployments.failures import RolloutFailure
from deployments.rpc.message_size import divided

Item = TypeVar("Item")


class IterationBatcher(Generic[Item]):
    """Hands over, in one list, the items that came in one event-loop iteration; adds no delay."""

    def __init__(self, send: Callable[[list[Item]], None]) -> None:
        """Args: `send` takes at least one item, in the order in which they came."""
        self._send = send
        self._items: list[Item] = []

    def add(self, item: Item) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._items.append(item)

    def _hand_over(self) -> None:
        items, self._items = self._items, []
        self._send(items)


Request = TypeVar("Request")
Result = TypeVar("Result")
Results = Sequence[Result | Exception]
"""In the order of the requests; an exception is what the call of its request raises."""


class TogetherCaller(Generic[Request, Result]):
    """Sends the requests of one event-loop iteration in one call; adds no delay."""

    def __init__(
        self, send: Callable[[list[Request]], Awaitable[Results[Result]]], bytes_of: Callable[[Request], int]
    ) -> None:
        """Args: `bytes_of` is the size of a request; those above `MOST_BYTES_PER_MESSAGE` are divided."""
        self._send = send
        self._bytes_of = bytes_of
        self._tasks: set[asyncio.Task[None]] = set()
        self._add = IterationBatcher(self._start).add

    async def call(self, request: Request) -> Result:
        """Raises what this request, or the whole call, has raised."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._add((request, future))
        return await future

    def _start(self, pending: "list[tuple[Request, asyncio.Future[Result]]]") -> None:
        wanted = [one for one in pending if not one[1].done()]
        for together in divided(wanted, lambda one: self._bytes_of(one[0])) if wanted else ():
            # An empty context: Serve ends the calls of a request that its caller has left, and others wait too.
            task = asyncio.create_task(self._run(together), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, together: "list[tuple[Request, asyncio.Future[Result]]]") -> None:
        results: Results[Result]
        try:
            results = await self._send([request for request, _ in together])
        except Exception as error:  # noqa: BLE001 - the callers raise it
            results = [error] * len(together)
        for (_, future), result in zip(together, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


async def results_of(calls: Sequence[Awaitable[Result]]) -> list[Result | Exception]:
    """The other end: runs the calls concurrently. What is no `Exception`, such as a cancellation, ends them all."""
    results = list[Result | Exception]()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        results.append(result)
    return results


logger = logging.getLogger("rollout_service.rpc")

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
