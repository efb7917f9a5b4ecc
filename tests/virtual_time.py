"""An event loop whose clock jumps: what would be slept through passes at once, and every time is exact."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import pytest

from service.rollout_requests import garbage_collection

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
STUCK_AFTER_S = 60.0
"""Of true time; the longest that a thread may take."""
PORTION_S = 1.0
"""Between two collections of new objects."""
GIVEN_UP_AFTER_S = 1000.0
"""Of the loop's time; the longest that a test waits for something."""


class JumpingSelector(selectors.DefaultSelector):
    """Where a loop would wait for `timeout` seconds, `jump` makes them pass instead, unless threads are at work."""

    jump: Callable[[float], None]
    look: Callable[[], bool]
    """Whether there is something to do after all; called once in each pass of the loop."""
    threads_at_work = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.look() or timeout == 0:
            return super().select(0)
        if timeout is None or self.threads_at_work:
            if ready := super().select(STUCK_AFTER_S):
                return ready
            raise RuntimeError("Everything waits for something that does not happen.")
        ready = super().select(0)
        if not ready:
            self.jump(timeout)
        return ready


class CountedThreads(ThreadPoolExecutor):
    """Tells the loop when a thread has ended, also where the task that waited for it was cancelled before."""

    def __init__(self, loop: "VirtualTimeLoop") -> None:
        super().__init__()
        self._loop = loop

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        self._loop.thread_begins()
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._tell)
        return future

    def _tell(self, _future: Future[Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.thread_ends)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock begins at 0 s; threads (`asyncio.to_thread`) take no time of it.

    What a cancelled task left to a thread is waited for too: it may hold a lock that others poll for.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.iterations = 0
        """How many have begun."""
        self._watched: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._jumping = JumpingSelector()
        self._jumping.jump = self._jump
        self._jumping.look = self._look
        super().__init__(self._jumping)
        self.set_default_executor(CountedThreads(self))

    def time(self) -> float:
        return self._now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's
        """Without the limit of Python 3.12 and newer, which would pass at once by this clock."""
        del timeout
        await super().shutdown_default_executor()

    def once(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """Done in the first pass of the loop in which `is_so`."""
        future = self.create_future()
        self._watched[future] = is_so
        return future

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        self.thread_begins()
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self.thread_ends())
        return future

    def thread_begins(self) -> None:
        """The clock stands until `thread_ends` was called as often."""
        self._jumping.threads_at_work += 1

    def thread_ends(self) -> None:
        self._jumping.threads_at_work -= 1

    def _jump(self, seconds: float) -> None:
        self._now += seconds

    def _look(self) -> bool:
        self.iterations += 1
        happened = [future for future, is_so in self._watched.items() if future.done() or is_so()]
        for future in happened:
            del self._watched[future]
            if not future.done():
                future.set_result(None)
        return bool(happened)


def synchronous(story: Callable[Parameters, Coroutine[Any, Any, Result]]) -> Callable[Parameters, Result]:
    """Runs an asynchronous function on a loop of its own: `conftest.py` does it where nothing else decorates a test.

    Nearest to the function, below all other decorators.
    """

    @wraps(story)
    def run_story(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return run(story(*args, **kwargs))

    return run_story


def runs(story: Callable[Parameters, Coroutine[Any, Any, Result]]) -> Callable[Parameters, Result]:
    """As `synchronous`, on a loop whose clock is the true one."""

    @wraps(story)
    def run_story(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return asyncio.run(story(*args, **kwargs))

    return run_story


def run(main: Coroutine[Any, Any, Result]) -> Result:
    # A request that takes an hour of the loop's time would have its garbage collected 180,000 times.
    with (
        patch.object(garbage_collection, "PORTION_S", PORTION_S),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        return runner.run(main)


def now() -> float:
    """Seconds since the loop began."""
    return asyncio.get_running_loop().time()


def iteration() -> int:
    """The number of the loop's current iteration."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop.iterations


async def settled(passes: int = 50) -> None:
    """Lets everything go on that can without time passing."""
    for _ in range(passes):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Goes on in the very pass of the loop in which `is_so`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with asyncio.timeout(GIVEN_UP_AFTER_S):
        await loop.once(is_so)


async def end_by_cancellation(task: asyncio.Future[Any]) -> None:
    """Cancels a task, which takes it as its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
