"""Tells a replica that Serve shuts it down, early enough to hand its work over."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve._private.replica import Replica
from ray.serve.context import _get_internal_replica_context

from deployments.rpc.own_config import graceful_shutdown_s

DRAINING_SHARE = 0.5
"""Of `graceful_shutdown_timeout_s`. The rest is for what comes after: Serve looks every two seconds whether calls are
still open, and then the engine's processes have to end. Serve does not tell a running replica when the setting changes:
it keeps the value with which it started."""


def is_replica() -> bool:
    """Whether this process is a replica of Serve, which will be shut down some day."""
    return _get_internal_replica_context() is not None  # type: ignore[no-untyped-call]


def call_at_shutdown(callback: Callable[[float], None]) -> None:
    """Calls `callback` in the running event loop when Serve begins to shut this process's replica down.

    Its argument is how many seconds the calls of the replica may go on. Serve 2.60 has no hook for this: it runs
    nothing of a replica's own before the last call has ended. So this wraps the method in which the shutdown begins.
    A controller that restarts calls it again.
    """
    loop = asyncio.get_running_loop()
    perform = Replica.perform_graceful_shutdown
    has_begun = False

    async def call_then_perform(replica: Any) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            bound_s = DRAINING_SHARE * graceful_shutdown_s(replica)
            loop.call_soon_threadsafe(callback, bound_s)
        await perform(replica)  # type: ignore[no-untyped-call]

    Replica.perform_graceful_shutdown = call_then_perform  # type: ignore[method-assign]
