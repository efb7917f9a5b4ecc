"""Tasks beside calls: work that no caller waits for, calls that callers share, and loops that outlive a loss.

Work that outlives its HTTP request runs in an empty context: in the request's own, Serve cancels the calls that the
work makes when the request is cancelled, and others may share them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class BackgroundTasks:
    """Keeps a reference to each running task: the event loop itself keeps only weak ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Result], context: Context | None = None) -> asyncio.Task[Result]:
        """Starts the work in this context; `None` is the caller's."""
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns or raises what `work` does. A cancelled caller does not cancel `work`."""
        return await asyncio.shield(self.start(work))

    async def ended(self) -> None:
        """Returns when no task runs any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class SharedCalls(Generic[Result]):
    """Calls for one name each, which all callers for it at one time share. A cancelled caller does not cancel them.

    Each runs in an empty context too because Serve's router mixes up calls that wait in the context of one request.
    """

    def __init__(self, call: Callable[[str], Coroutine[Any, Any, Result]]) -> None:
        self._call = call
        self._running: dict[str, asyncio.Task[Result]] = {}

    async def result(self, name: str = "") -> Result:
        """Waits for the running call for this name, or makes one if none runs."""
        running = self._running.get(name)
        if running is None:
            running = self._running[name] = asyncio.create_task(self._call(name), context=Context())
            running.add_done_callback(partial(self._forget, name))
        return await asyncio.shield(running)

    def _forget(self, name: str, running: asyncio.Task[Result]) -> None:
        del self._running[name]
        if not running.cancelled():
            running.exception()  # Marks it as seen, in case every caller is gone.


async def until_back(
    work: Callable[[], Awaitable[None]],
    lost: type[Exception] | tuple[type[Exception], ...],
    retry_s: float,
    on_lost: Callable[[Exception, bool], None] = lambda _failure, _is_first: None,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Repeats the work, and waits after each loss of what it needs.

    Args:
        work: one round, or all rounds until the loss.
        lost: exceptions that mean a loss; others are raised.
        retry_s: seconds from a loss to the next round.
        on_lost: gets the failure, and whether it is the first one since a round succeeded.
        goes_on: asked before each round.
    """
    is_lost = False
    while goes_on():
        try:
            await work()
            is_lost = False
        except lost as failure:
            on_lost(failure, not is_lost)
            is_lost = True
            await asyncio.sleep(retry_s)
