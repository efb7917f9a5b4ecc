"""Which replicas take calls, as the request routers in this process were told last.

A module of its own: Serve copies the module of a router, globals and all, into the process that routes.
"""

from collections.abc import Iterable
from typing import Any

from ray.serve.handle import DeploymentHandle

_replicas: dict[Any, tuple[str, ...]] = {}


def note_replicas(deployment_id: Any, unique_ids: Iterable[str]) -> None:
    _replicas[deployment_id] = tuple(sorted(unique_ids))


def replicas_behind(handle: DeploymentHandle[Any]) -> tuple[str, ...]:
    """Unique ids of the replicas that take calls; none before the handle's first call."""
    return _replicas.get(handle.deployment_id, ())
