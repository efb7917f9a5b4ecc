"""Ray Serve's log and its own `print`, which get in the way of the logs of a replica.

Needed with Ray 2.60; no upstream issue is known.
"""

import builtins
import logging
from logging.handlers import MemoryHandler

from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.logging_utils import buildin_print

SERVE_LOG = logging.getLogger(SERVE_LOGGER_NAME)


def keep_serve_log_open(log: logging.Logger = SERVE_LOG) -> None:
    """Lets Ray Serve's buffer of log records outlive a library that configures `logging`, as vLLM does when imported.

    That closes all handlers of the process, and the buffer forgets its file. Serve's lines would be lost; and a
    controller that restarts asks each replica for the path of that file, and replaces the replicas that have none.
    """
    for handler in log.handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]


def use_own_print() -> None:
    """Puts Python's own `print` back, in whose place Serve has put a function that writes to its log."""
    builtins.print = buildin_print
