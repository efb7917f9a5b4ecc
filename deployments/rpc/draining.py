"""Tells a replica that Serve shuts it down, early enough to hand its work over."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve._private.replica import Replica

DRAINING_SHARE = 0.5
"""Of `graceful_shutdown_timeout_s`. The rest is for what comes after: Serve looks every two seconds whether calls are
still open, and then the engine's processes have to end. Serve does not tell a running replica when the setting changes:
it keeps the value with which it started."""


def call_at_shutdown(callback: Callable[[float], None]) -> None:
    """Calls `callback` in the running event loop when Serve begins to shut this process's replica down.

    Its argument is how many seconds the calls of the replica may go on. Serve 2.60 has no hook for this: it runs
    nothing of a replica's own before the last call has ended. So this wraps the method in which the shutdown begins.
    """
    loop = asyncio.get_running_loop()
    perform = Replica.perform_graceful_shutdown

    async def call_then_perform(replica: Any) -> None:
        bound_s = DRAINING_SHARE * replica._deployment_config.graceful_shutdown_timeout_s
        loop.call_soon_threadsafe(callback, bound_s)
        await perform(replica)  # type: ignore[no-untyped-call]

    Replica.perform_graceful_shutdown = call_then_perform  # type: ignore[method-assign]
