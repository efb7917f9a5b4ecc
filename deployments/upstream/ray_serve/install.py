"""The patches of Ray Serve and gRPC in a replica."""

from collections.abc import Callable

from deployments.upstream.ray_serve.grpc_wakeups import read_all_wakeups
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, is_replica


def install(at_shutdown: Callable[[float], None] | None = None) -> None:
    """Patches the replica that calls it, for its running event loop; does nothing outside of one.

    Args:
        at_shutdown: called as `call_at_shutdown` says.
    """
    if not is_replica():
        return
    read_all_wakeups()
    if at_shutdown is not None:
        call_at_shutdown(at_shutdown)
