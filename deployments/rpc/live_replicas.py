"""The replicas that take calls, as the request routers of this process were told last.

`NamedReplicaRouter` records them; `RemoteGenerator` and `RemoteEnvironment` read them. They are in a module of their
own, because Serve copies the module of a router with its global variables into the process that routes.
"""

from collections.abc import Iterable
from typing import Any

from ray.serve.handle import DeploymentHandle

_live_replicas: dict[Any, tuple[str, ...]] = {}


def record_live_replicas(deployment_id: Any, unique_ids: Iterable[str]) -> None:
    _live_replicas[deployment_id] = tuple(sorted(unique_ids))


def live_replicas_of(handle: DeploymentHandle[Any]) -> tuple[str, ...]:
    """Unique ids of the deployment's replicas that take calls, sorted. Empty before the handle's first call."""
    return _live_replicas.get(handle.deployment_id, ())
