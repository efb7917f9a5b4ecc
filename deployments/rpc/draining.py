"""Tells a replica that Serve shuts it down, early enough to hand its work over."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve._private.replica import Replica

DRAINING_SHARE = 0.5
"""Of `graceful_shutdown_timeout_s`. The rest is for what comes after: Serve looks every two seconds whether calls are
still open, and then the engine's processes have to end."""


def draining_bound_s() -> float:
    """How long the calls of this replica may go on after the begin of its shutdown."""
    return DRAINING_SHARE * serve.get_replica_context()._deployment_config.graceful_shutdown_timeout_s


def call_at_shutdown(callback: Callable[[], None]) -> None:
    """Calls `callback` in the running event loop when Serve begins to shut this process's replica down.

    Serve 2.60 has no hook for it: it runs nothing of a replica's own before the last call has ended. So this wraps the
    method in which the shutdown begins.
    """
    loop = asyncio.get_running_loop()
    perform = Replica.perform_graceful_shutdown

    async def call_then_perform(replica: Any) -> None:
        loop.call_soon_threadsafe(callback)
        await perform(replica)  # type: ignore[no-untyped-call]

    Replica.perform_graceful_shutdown = call_then_perform  # type: ignore[method-assign]
