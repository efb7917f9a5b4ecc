"""Worker processes for code that may never end. The kernel bounds the processor time of each call.

Guarantees: a call raises `ProcessorTimeExceeded` if it needs more processor time than its limit, and only then, however
busy the machine is. Whatever else keeps a call from its result (a worker that gets no processor, a queue, a dead
worker, a broken pool) raises `TemporaryFailure`, so that the step is tried again. No call outlives its limits, also
when the replica is killed.

It needs pebble, which the extra `workers` installs.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext
from typing import Any, ParamSpec, Self, TypeVar

from pebble import ProcessExpired, ProcessPool

from rollout_env.records import TemporaryFailure

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ProcessorTimeExceeded(Exception):
    """The call needed more processor time than its limit. Its worker was ended."""


class WorkerEnded(TemporaryFailure):
    """The worker ended by itself, or something else ended it, during the call."""


class WorkerPool:
    """Runs functions in worker processes, each worker one call at a time.

    Workers are forked from a server process that has `preloaded` modules imported, so an ended worker is replaced
    within about a quarter of a second. A fork of the replica itself would copy the locks of its threads.
    """

    def __init__(
        self, workers: int, prepare: Callable[[], None], preloaded: Sequence[str], lost_after_s: float
    ) -> None:
        """Starts the workers in the background.

        Args:
            prepare: called once in each worker before its first call.
            preloaded: names of modules that are imported before the workers are forked.
            lost_after_s: seconds of wall time after which a call without a result is given up and its worker replaced.
        """
        self._workers = workers
        self._prepare = prepare
        self._preloaded = [__name__, *preloaded]
        self.lost_after_s = lost_after_s
        """Limit of the calls that begin from now on."""
        self._pool = self._started_pool()

    @classmethod
    async def start(
        cls,
        workers: int,
        prepare: Callable[[], None],
        preloaded: Sequence[str],
        first_call: Callable[[], object],
        start_within_s: float,
        lost_after_s: float,
    ) -> Self:
        """A pool that has answered a first call. Modules are imported beside the event loop.

        Raises:
            TemporaryFailure: no worker has answered within `start_within_s` seconds.
            Exception: what `first_call` has raised. The workers have ended.
        """
        pool = await asyncio.to_thread(cls, workers, prepare, preloaded, start_within_s)
        try:
            await pool.run(start_within_s, first_call)
        except BaseException:
            await asyncio.to_thread(pool.close)
            raise
        pool.lost_after_s = lost_after_s
        return pool

    async def run(
        self,
        processor_time_limit_s: float,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Calls the function in a worker. If this is cancelled the worker ends the call by itself, within its limits.

        Raises:
            ProcessorTimeExceeded: the call needed more than `processor_time_limit_s` seconds of processor time. The
                kernel counts it in ticks of some milliseconds, so a limit below a second can be off by a quarter.
            WorkerEnded: its worker ended otherwise.
            TemporaryFailure: there is no result for any other reason.
            Exception: what the function raised, which must not be a `TimeoutError`.
        """
        # pebble's pool stays unusable after a worker was killed between two calls.
        if not self._pool.active:
            broken, self._pool = self._pool, self._started_pool()
            await asyncio.to_thread(broken.join)
        future = self._pool.schedule(
            limited, (processor_time_limit_s, function, args, kwargs), timeout=self.lost_after_s
        )
        try:
            async with asyncio.timeout(self.lost_after_s):
                # To cancel pebble's future would kill a worker, also if the call has not begun.
                result: Result = await asyncio.shield(asyncio.wrap_future(future))
                return result
        except TimeoutError as error:
            raise TemporaryFailure(f"A worker process had no result after {self.lost_after_s:g} s.") from error
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGPROF:
                raise ProcessorTimeExceeded(f"more than {processor_time_limit_s:g} s of processor time") from error
            raise WorkerEnded(f"A worker process ended with exit code {error.exitcode}.") from error
        except BrokenProcessPool as error:
            raise TemporaryFailure("The worker processes ended before this call's turn.") from error

    def close(self) -> None:
        """Ends the workers."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _started_pool(self) -> ProcessPool:
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preloaded)
        pool = ProcessPool(max_workers=self._workers, initializer=prepared, initargs=(self._prepare,), context=context)
        assert pool.active  # Reading this property starts the workers.
        return pool


def prepared(prepare: Callable[[], None]) -> None:
    """Lets the kernel end this worker at once, whatever Python code it is in."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    prepare()


def limited(
    processor_time_limit_s: float, function: Callable[..., Result], args: Sequence[Any], kwargs: dict[str, Any]
) -> Result:
    """Calls the function in a worker. SIGPROF ends the process after that many seconds of its processor time."""
    signal.setitimer(signal.ITIMER_PROF, processor_time_limit_s)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
