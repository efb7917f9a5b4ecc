"""Facts that Ray Serve 2.60 does not tell a replica about itself: that it is shut down, and its deployment's config.

`ReplicaContext` has only the number of replicas (`world_size`), and `serve.status()` has neither the bounds of
autoscaling nor the time for a shutdown. So this reads a private field, which `ReplicaContext` and Serve's `Replica`
both have, and wraps the method in which a shutdown begins. A newer Ray's changes are made here.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve._private.replica import Replica
from ray.serve.context import _get_internal_replica_context

FIELD = "_deployment_config"


def most_replicas() -> int:
    """Of this replica's deployment: how many its config asks for; with autoscaling, how many it may ask for at most."""
    context = serve.get_replica_context()
    autoscaling = getattr(context, FIELD).autoscaling_config
    return context.world_size if autoscaling is None else int(autoscaling.max_replicas)


def graceful_shutdown_s(replica: Any) -> float:
    """How long Serve waits for the calls of the replica. Args: `replica` is Serve's own `Replica`."""
    return float(getattr(replica, FIELD).graceful_shutdown_timeout_s)


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
