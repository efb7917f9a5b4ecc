"""Ingress replicas that listen on the port of the service, where one machine serves and needs no proxy before them.

With `RAY_SERVE_ENABLE_DIRECT_INGRESS`, Serve gives each ingress replica a port of a range, where HAProxy finds it, and
its Python proxy listens on the port of the config. A request takes milliseconds longer through that.

Needed with Ray 2.60; no upstream issue is known: Serve has no public way to choose the port of a replica.
"""

from collections.abc import Mapping
from typing import Any

import ray
from ray.serve._private import replica
from ray.serve.config import HTTPOptions

PORT_LABEL = "rollout-service-port"
"""A label of the node of a service whose ingress replicas listen on its port."""
VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    # Seconds that a replica that stops goes on, for a balancer to notice that it does.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}
"""Environment variables of such a service, which Ray reads when it starts."""


def own_port() -> int | None:
    """The port of the service on which the ingress replicas of this machine listen; `None` where a proxy does."""
    if not ray.is_initialized():
        return None
    labels: dict[str, str] = ray.get_runtime_context().get_node_labels()  # type: ignore[assignment]  # Not lists.
    return int(labels[PORT_LABEL]) if PORT_LABEL in labels else None


def listen_on_own_port() -> None:
    """Has Serve's server of this replica listen on `own_port`, beside other replicas of the machine.

    Does nothing where there is none. Linux divides the connections among the replicas that listen.
    """
    if (port := own_port()) is None:
        return
    module: Any = replica
    start = module.start_asgi_http_server

    async def start_there(app: Any, options: HTTPOptions, *, event_loop: Any, **_: bool) -> Any:
        there = options.model_copy(update={"port": port})
        return await start(app, there, event_loop=event_loop, enable_so_reuseport=True)

    module.start_asgi_http_server = start_there
