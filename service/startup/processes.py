"""The processes that this one has started: adopts those whose parent has died, and ends all of them."""

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

PR_SET_CHILD_SUBREAPER = 36
EXIT_TIMEOUT_S = 5.0
STOP_ROUNDS = 4
"""A process that was being started while its parent ended shows up in the next round."""


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that it can end all of them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants() -> None:
    """Waits for all descendants to exit; kills those that have not after `EXIT_TIMEOUT_S`."""
    for _ in range(STOP_ROUNDS):
        _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=EXIT_TIMEOUT_S)
        for process in alive:
            process.kill()
        if not alive:
            break


@contextmanager
def interruptible() -> Iterator[None]:
    """Ends the block by `KeyboardInterrupt` on SIGINT and by `SystemExit(0)` on SIGTERM.

    Ray, or a parent process, may have installed other handlers; they are back when the block is left.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: exit_on_signal}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_on_signal(_number: int, _frame: object) -> None:
    raise SystemExit(0)
