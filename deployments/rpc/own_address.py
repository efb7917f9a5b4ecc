"""The address at which programs of this service's machines reach it."""

from typing import Protocol

from deployments.upstream.ray_serve.serve_internals import running_http_options
from rollout_env import ModelUnavailable

ALL_INTERFACES = (None, "0.0.0.0", "::", "")


class HttpOptions(Protocol):
    """Those of Serve, or of a config for it."""

    @property
    def host(self) -> str | None: ...

    @property
    def port(self) -> int: ...

    @property
    def ssl_certfile(self) -> str | None: ...


def own_address(options: HttpOptions) -> str:
    """The address of the service for programs on a node where Serve has a proxy."""
    scheme = "http" if options.ssl_certfile is None else "https"
    host = "127.0.0.1" if options.host in ALL_INTERFACES else options.host
    return f"{scheme}://{host}:{options.port}"


def running_address() -> str:
    """The `own_address` of the service that this process belongs to. Blocks. Raises `ModelUnavailable` without one."""
    if (options := running_http_options()) is None:
        raise ModelUnavailable("The address of this service is not known: Serve does not run.")
    return own_address(options)
