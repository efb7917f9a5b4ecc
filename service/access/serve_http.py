"""Where Serve listens, whoever started it: `serve run` reads no config of ours."""

import ray
from ray import serve

from service.access.exposure import HttpOptions

ALL_INTERFACES = (None, "0.0.0.0", "::", "")


def http_options() -> HttpOptions | None:
    """Of the Serve that runs; `None` where none does. Blocks."""
    if not ray.is_initialized():
        return None
    # Serve has no public way to its own options.
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def own_address(options: HttpOptions) -> str:
    """Under which programs reach the service on a node where Serve has a proxy."""
    scheme = "http" if options.ssl_certfile is None else "https"
    host = "127.0.0.1" if options.host in ALL_INTERFACES else options.host
    return f"{scheme}://{host}:{options.port}"
