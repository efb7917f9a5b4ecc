"""Ends a process of the engine with the one that has started it, however that ends."""

import ctypes
import os
import signal
from multiprocessing import parent_process

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on Linux kills this process when its parent dies, also while it is stopped or computes.

    vLLM's own processes notice the death of the replica at their next message, if at all, and keep cores, memory and
    shared memory until then. Does nothing in a process that `multiprocessing` has not started.

    Linux takes the end of the thread that started this process for the death of the parent. A replica starts its engine
    in the thread of its event loop, and the engine its workers in its main thread: both live as long as their process.

    Raises:
        OSError: Linux refuses it.
    """
    parent = parent_process()
    if parent is None:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not parent.is_alive():
        # It died before Linux was asked.
        os.kill(os.getpid(), signal.SIGKILL)
