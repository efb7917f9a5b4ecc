"""Makes calls of one moment together: many requests and as many results in one message.

For calls that take about as long as each other. Where they do not, `batching.py` yields each result when it is there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from deployments.rpc.iteration_batcher import IterationBatcher
from deployments.rpc.message_size import divided

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
