"""The processes that this one has started: adopts those whose parent has died, and ends all of them."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_EXIT_TIMEOUT_S = 5.0
_STOP_ROUNDS = 4
"""A process that was being started while its parent ended shows up in the next round."""
_REAP_EVERY_S = 5.0
_REAPED_AFTER_S = 0.01


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that it can end all of them."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class _OrphanReaper:
    """Reaps adopted processes that have ended: each engine that dies would leave some for as long as the service runs.

    Children that this process has started itself are left to whoever waits for their exit code.
    """

    def __init__(self) -> None:
        self._others: set[psutil.Process] = set()
        """Processes below this one that something else has started."""

    def reap(self) -> None:
        children = set(psutil.Process().children())
        for adopted in self._others & children:
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if adopted.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(adopted.pid, os.WNOHANG)
        descendants = set(psutil.Process().children(recursive=True))
        self._others = (descendants - children) | (descendants & self._others)


@contextmanager
def repeated(work: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Does the work again and again in a thread of this name, for the length of the block."""
    left = threading.Event()

    def repeat() -> None:
        while not left.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def orphans_reaped() -> AbstractContextManager[None]:
    """Reaps adopted processes for the length of the block."""
    return repeated(_OrphanReaper().reap, _REAP_EVERY_S, "orphans")


def wait_for_ends(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits until the processes have ended, and returns those that have not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            alive: list[psutil.Process] = psutil.wait_procs(processes, timeout=max(deadline - time.monotonic(), 0))[1]
            return alive
        except (FileNotFoundError, psutil.NoSuchProcess):
            # Linux 6.15 and later has an answer that psutil does not expect for a process that is being reaped.
            time.sleep(_REAPED_AFTER_S)


def end_descendants() -> None:
    """Waits for all descendants to exit; kills those that have not after `_EXIT_TIMEOUT_S`."""
    for _ in range(_STOP_ROUNDS):
        alive = wait_for_ends(psutil.Process().children(recursive=True), _EXIT_TIMEOUT_S)
        for process in alive:
            process.kill()
        if not alive:
            break


@contextmanager
def interruptible() -> Iterator[None]:
    """Ends the block by `KeyboardInterrupt` on SIGINT and by `SystemExit(0)` on SIGTERM.

    Ray, or a parent process, may have installed other handlers; they are back when the block is left.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: sys.exit(0)}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
