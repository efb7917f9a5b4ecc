"""Facts that Ray Serve does not tell a replica: its deployment's config, its shutdown, and whether its caller lives.

`ReplicaContext` has only the number of replicas (`world_size`), and `serve.status()` has neither the bounds of
autoscaling nor the time for a shutdown. So this reads a private field, which `ReplicaContext` and Serve's `Replica`
both have, and wraps the method in which a shutdown begins: Serve runs nothing of a replica's own before the last call
has ended. Callers are found by the names of their actors.

Needed with Ray 2.60; no upstream issue is known. `test_own_replica.py` fails when Serve tells either by itself.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.replica import Replica
from ray.serve.context import _get_internal_replica_context

from deployments.upstream.ray_serve.grpc_wakeups import read_all_wakeups
from deployments.upstream.ray_serve.serve_internals import deadlines_of_leaving_nodes

FIELD = "_deployment_config"
DRAINING_SHARE = 0.5
"""Part of `graceful_shutdown_timeout_s`, or of the time until the node leaves, if that is less. The rest is for what
comes after: Serve looks every two seconds whether calls are still open, and then the engine's processes have to end.
Serve does not tell a running replica when the setting changes: it keeps the value with which it started."""
LEAVING_KNOWN_WITHIN_S = 1.0
"""Bound of the question when the node leaves, which is asked while a shutdown waits for it."""
logger = logging.getLogger("rollout_service.rpc")


def most_replicas() -> int:
    """The most replicas that this replica's deployment may have: the config's number, or autoscaling's maximum."""
    context = serve.get_replica_context()
    autoscaling = getattr(context, FIELD).autoscaling_config
    return context.world_size if autoscaling is None else int(autoscaling.max_replicas)


def _graceful_shutdown_s(replica: Any) -> float:
    """Seconds that Serve waits for the calls of the replica, which is Serve's own `Replica`."""
    return float(getattr(replica, FIELD).graceful_shutdown_timeout_s)


def own_name() -> str:
    """The name of this process to the replicas that it calls, by which these can tell whether it lives."""
    context = _get_internal_replica_context()  # type: ignore[no-untyped-call]
    return uuid4().hex if context is None else str(context.replica_id.to_full_id_str())


def is_name_of_replica(caller: str) -> bool:
    return bool(ReplicaID.is_full_id_str(caller))


def has_died(caller: str) -> bool:
    """Whether the actor of the caller, a replica of Serve, is gone. Ray tells each process of that within milliseconds.

    Blocks while Ray's control service does not answer.
    """
    try:
        ray.get_actor(caller, namespace=SERVE_NAMESPACE)
    except ValueError:
        return True
    except RayError:
        return False
    return False


def _seconds_until_node_leaves() -> float:
    """Seconds until the deadline that Ray was told for this node, at least 0; infinite where it stays.

    The deadline is read by the clock of this node, by which `leave` gives it.
    Serve shuts the replicas of a node that leaves down in time for their own `graceful_shutdown_timeout_s`, or at once
    if the notice is shorter than that: then it waits for longer than the node lives. Blocks.
    """
    try:
        deadlines_ms = deadlines_of_leaving_nodes(LEAVING_KNOWN_WITHIN_S)
    except RayError:
        logger.warning(
            "Ray does not say whether this node leaves: its replica may end before its calls.", exc_info=True
        )
        return math.inf
    deadline_ms = deadlines_ms.get(ray.get_runtime_context().get_node_id(), 0)
    # Zero is Ray's word for a node that leaves some day.
    return max(deadline_ms / 1000 - time.time(), 0.0) if deadline_ms else math.inf


def call_at_shutdown(callback: Callable[[float], None]) -> None:
    """Calls `callback` in the running event loop when Serve begins to shut this process's replica down.

    Its argument is how many seconds the calls of the replica may go on: half of what Serve waits for them, or of what
    is left until the node leaves. A controller that restarts calls Serve's method again.
    """
    loop = asyncio.get_running_loop()
    perform = Replica.perform_graceful_shutdown
    has_begun = False

    async def call_then_perform(replica: Any) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            left_s = min(_graceful_shutdown_s(replica), await asyncio.to_thread(_seconds_until_node_leaves))
            bound_s = DRAINING_SHARE * left_s
            loop.call_soon_threadsafe(callback, bound_s)
        await perform(replica)  # type: ignore[no-untyped-call]

    Replica.perform_graceful_shutdown = call_then_perform  # type: ignore[method-assign]


def install(at_shutdown: Callable[[float], None] | None = None) -> None:
    """Patches Ray Serve and gRPC in the replica that calls it, for its running event loop; does nothing outside of one.

    Args:
        at_shutdown: called as `call_at_shutdown` says.
    """
    if _get_internal_replica_context() is None:  # type: ignore[no-untyped-call]
        return
    read_all_wakeups()
    if at_shutdown is not None:
        call_at_shutdown(at_shutdown)
