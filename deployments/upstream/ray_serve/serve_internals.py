"""Private parts of Ray and Ray Serve: Serve's own calls and options, and Ray's configuration and resources.

Needed with Ray 2.60; no upstream issue is known. Serve has no public way to start without deploying, to its own
options; and `cancel` leaves a call alone that was handed to a replica just before. Ray has no public way to the
resources of this machine, to nodes that leave, or to its configuration.
"""

from typing import Any

import ray
from ray import _raylet, serve
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.serve._private.api import serve_start
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator
from ray.serve.schema import ServeDeploySchema

from deployments.upstream.ray_serve.direct_ingress import own_port

RAYLET: Any = _raylet


def cancel_call(call: Any) -> None:
    """Cancels a handle call, also one that was handed to a replica in this iteration of the event loop.

    Serve's own `cancel` leaves that one alone, because it knows the replica's end of a call only once the caller's task
    has run again: the replica would work on for nobody, and the connection would keep the call for ever.
    """
    call.cancel()
    if isinstance(call, DeploymentResponse | DeploymentResponseGenerator):
        assigned: Any = call._replica_result_future
        if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
            assigned.result().cancel()


def route_in_own_loop(handle: Any) -> None:
    """Makes a handle usable in a process without an event loop, also where `serve.env` says that callers have one."""
    handle._init(_run_router_in_separate_loop=True)


def deploy_apps(config: ServeDeploySchema) -> None:
    """Starts Serve, or changes what it runs, and returns before the deployments are ready."""
    client = serve_start(
        http_options=HTTPOptions(**config.http_options.model_dump()), proxy_location=config.proxy_location
    )
    client.deploy_apps(config)


def running_http_options() -> HTTPOptions | None:
    """The options of the Serve that runs, with the port of the service; `None` where none does. Blocks."""
    options = _options_of_proxies()
    if options is None or (port := own_port()) is None:
        return options
    return options.model_copy(update={"port": port})


def proxy_port() -> int | None:
    """The port of Serve's own proxy; `None` where no Serve runs. Blocks."""
    options = _options_of_proxies()
    return None if options is None else options.port


def _options_of_proxies() -> HTTPOptions | None:
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def read_environment_again() -> None:
    """Lets Ray take in environment variables that were set after it was imported."""
    RAYLET.Config.initialize("")


def metrics_report_interval_s() -> float:
    """Seconds between two reports of Ray's exporters, which forget a gauge that was not set for two of them."""
    return float(RAYLET.Config.metrics_report_interval_ms()) / 1000


def deadlines_of_leaving_nodes(timeout_s: float) -> dict[str, int]:
    """By the id of each node that was given notice, when it ends: milliseconds since 1970, or 0 for some day.

    Blocks. Raises `RayError` if Ray's control service does not answer within `timeout_s` seconds.
    """
    gcs = RAYLET.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadlines_ms: dict[str, int] = gcs.get_draining_nodes(timeout=timeout_s)
    return deadlines_ms


def resources_of_this_machine() -> dict[str, float]:
    """The resources that Ray will find when it starts here."""
    found: dict[str, float] = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()  # type: ignore[no-untyped-call]
    return found
