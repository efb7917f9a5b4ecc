"""Private parts of Ray and Ray Serve: Serve's own calls, log and `print`, and Ray's processes, settings, resources.

Needed with Ray 2.60; no upstream issue is known. Serve has no public way to start without deploying; its `cancel`
leaves a call alone that was handed to a replica just before; and its log and `print` get in the way of the logs of a
replica. Ray has no public way to the resources of this machine, to nodes that leave, or to its configuration, and none
to a cluster of one machine without dashboard, autoscaler and log monitor.
"""

import builtins
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any

import ray
from ray import _raylet, serve
from ray._private.node import Node
from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.serve._private.api import serve_start
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.logging_utils import buildin_print
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeDeploySchema

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


def application_states() -> dict[str, ApplicationStatusOverview]:
    """The applications of `serve.status()`, without the states of their replicas; none where Serve does not run.

    That one pickles the request router of each deployment anew, which keeps a processor busy while many start.
    """
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return {
        app.name: ApplicationStatusOverview(
            app.app_status.status,
            app.app_status.message,
            app.app_status.deployment_timestamp,
            {
                each.name: DeploymentStatusOverview(each.status, each.status_trigger, {}, each.message)
                for each in app.deployment_statuses
            },
        )
        for app in (client.list_serve_statuses() if client else ())
    }


def _name_no_dashboard(node: Any, **_: Any) -> None:
    """Gives an address to the node's agent, which else looks for one each second and logs that there is none."""
    node.get_gcs_client().internal_kv_put(
        DASHBOARD_ADDRESS.encode(), b"127.0.0.1:9", True, namespace=KV_NAMESPACE_DASHBOARD
    )


@contextmanager
def fewer_processes() -> Iterator[None]:
    """Has a Ray that starts in the block do without what only clusters and drivers need: it starts in half of the time.

    Without the autoscaler, the server of the dashboard, which also runs without its pages, and the process that passes
    the logs of workers on to drivers.
    """
    unused = {name: getattr(Node, name) for name in ("start_monitor", "start_api_server", "start_log_monitor")}
    for name in unused:
        setattr(Node, name, _name_no_dashboard if name == "start_api_server" else lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in unused.items():
            setattr(Node, name, start)


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


_SERVE_LOG = logging.getLogger(SERVE_LOGGER_NAME)


def keep_serve_log_open(log: logging.Logger = _SERVE_LOG) -> None:
    """Lets Ray Serve's buffer of log records outlive a library that configures `logging`, as vLLM does when imported.

    That closes all handlers of the process, and the buffer forgets its file. Serve's lines would be lost; and a
    controller that restarts asks each replica for the path of that file, and replaces the replicas that have none.
    """
    for handler in log.handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]


def use_own_print() -> None:
    """Puts Python's own `print` back, in whose place Serve has put a function that writes to its log."""
    builtins.print = buildin_print
