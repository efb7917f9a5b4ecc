"""The port and the address of the service, also where its ingress replicas listen on the port themselves.

Where one machine serves, its ingress replicas need no proxy before them.

With `RAY_SERVE_ENABLE_DIRECT_INGRESS`, Serve gives each ingress replica a port of a range, where HAProxy finds it, and
runs its Python proxy all the same, through which a request takes milliseconds longer. Without a proxy its replicas
listen nowhere.

Needed with Ray 2.60; no upstream issue is known: Serve has no public way to choose the port of a replica, and none to
its own options.
"""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Protocol

import ray
from ray import serve
from ray.serve._private import replica
from ray.serve.config import HTTPOptions

from rollout_env import ModelUnavailable

PORT_LABEL = "rollout-service-port"
"""A label of the node of a service whose ingress replicas listen on its port."""
_ALL_INTERFACES = (None, "0.0.0.0", "::", "")


def own_port() -> int | None:
    """The port of the service on which the ingress replicas of this machine listen; `None` where a proxy does."""
    if not ray.is_initialized():
        return None
    labels: dict[str, str] = ray.get_runtime_context().get_node_labels()  # type: ignore[assignment]  # Not lists.
    return int(labels[PORT_LABEL]) if PORT_LABEL in labels else None


def listen_on_own_port() -> None:
    """Has an ingress replica that Serve makes in this process listen on `own_port`, beside others of the machine.

    Does nothing where there is none. Linux divides the connections among the replicas that listen.
    """
    if (port := own_port()) is None:
        return
    module: Any = replica
    module.RAY_SERVE_ENABLE_DIRECT_INGRESS = True
    module.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S = 0  # No balancer has to notice that a replica stops.
    module.ProxyLocation = SimpleNamespace(Disabled=None)  # No proxy is no reason to listen nowhere.
    start_servers, start = module.Replica._maybe_start_direct_ingress_servers, module.start_asgi_http_server

    async def start_servers_there(self: Any) -> None:
        controller, self._controller_handle = self._controller_handle, _OwnPort(self._controller_handle, port)
        try:
            await start_servers(self)
        finally:
            self._controller_handle = controller

    async def start_beside_others(app: Any, options: HTTPOptions, *, event_loop: Any, **_: bool) -> Any:
        return await start(app, options, event_loop=event_loop, enable_so_reuseport=True)

    module.Replica._maybe_start_direct_ingress_servers = start_servers_there
    module.start_asgi_http_server = start_beside_others


class _OwnPort:
    """Serve's controller, but for ports: of those that it gives it takes none back while the variable is not set."""

    def __init__(self, controller: Any, port: int) -> None:
        self._controller = controller
        self.allocate_replica_port = SimpleNamespace(remote=_answering(port))
        self.release_replica_port = SimpleNamespace(remote=_answering(None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)


def _answering(answer: int | None) -> Callable[..., Awaitable[int | None]]:
    async def answered(*_: Any, **__: Any) -> int | None:
        return answer

    return answered


def running_http_options() -> HTTPOptions | None:
    """The options of the Serve that runs; `None` where none does. Blocks."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


class HttpOptions(Protocol):
    """Those of Serve, or of a config for it."""

    @property
    def host(self) -> str | None: ...

    @property
    def port(self) -> int: ...

    @property
    def ssl_certfile(self) -> str | None: ...


def own_address(options: HttpOptions) -> str:
    """The address of the service for programs on a node that listens on its port."""
    scheme = "http" if options.ssl_certfile is None else "https"
    host = "127.0.0.1" if options.host in _ALL_INTERFACES else options.host
    return f"{scheme}://{host}:{options.port}"


def running_address() -> str:
    """The `own_address` of the service that this process belongs to. Blocks. Raises `ModelUnavailable` without one."""
    if (options := running_http_options()) is None:
        raise ModelUnavailable("The address of this service is not known: Serve does not run.")
    return own_address(options)
