"""Runs the whole service on this machine: a Ray of its own, the deployments of a Serve config, and the end of both."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray
import typer
from ray import serve
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema
from rich.console import Console

from deployments.logs import serve_logs_folder
from deployments.policy.cluster import cluster_weights_folder
from deployments.shared_memory import free_left_over, remove_left_over
from deployments.storage.cluster_folder import cluster_folder, session_folder
from service.startup.cluster_token import require_cluster_token
from service.startup.commands import ROOM_TIMEOUT_S
from service.startup.console_logs import replica_logs_shown, stages_shown
from service.startup.draining import finish_rollouts
from service.startup.failures import ServiceNotStarted
from service.startup.ports import refuse_taken_port
from service.startup.preflight import check_config
from service.startup.processes import adopt_orphans, end_descendants, interruptible, orphans_reaped
from service.startup.readiness import deploy, deployments_not_ready

OBJECT_STORE_BYTES = 2**30


@contextmanager
def sentences_for_the_user(console: Console) -> Iterator[None]:
    """Ends a command with a sentence and exit code 1 when the service does not start, and with 130 on Ctrl-C."""
    try:
        yield
    except ServiceNotStarted as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def local_service(config: ServeDeploySchema, console: Console, room_timeout_s: float = ROOM_TIMEOUT_S) -> Iterator[str]:
    """Runs the service for the length of the block and yields its base URL once it is ready.

    Every process that it started has ended when the block is left, however it is left. After SIGTERM the rollouts under
    way are finished before, until a second signal comes. What replicas print and warn of is shown on the console.

    Args:
        room_timeout_s: how long a deployment may wait for free cores or GPUs.

    Raises:
        ServiceNotStarted: the config cannot work, the port is taken, or a deployment cannot start.
    """
    host, port = config.http_options.host, config.http_options.port
    check_config(config)
    refuse_taken_port(host, port)
    adopt_orphans()
    started_at = time.monotonic()
    with ExitStack() as to_undo:
        to_undo.callback(stop, console)
        with stages_shown(console) as show:
            show("Starting Ray")
            start_ray()
            to_undo.enter_context(orphans_reaped())
            to_undo.enter_context(replica_logs_shown(console, serve_logs_folder()))
            with interruptible():
                show("Starting Ray Serve")
                deploy(config)
                for starting in deployments_not_ready(config, room_timeout_s):
                    show(f"Starting {starting}")
        url = base_url(config.http_options)
        console.print(f"Ready after {time.monotonic() - started_at:.0f} s: {url}")
        console.print(f"Logs of the replicas: {serve_logs_folder()}", soft_wrap=True)
        with interruptible():
            try:
                yield url
            except SystemExit:
                finish_rollouts(config, console)
                raise


def serve_until_stopped(config: ServeDeploySchema, console: Console, room_timeout_s: float) -> None:
    """Runs the service until SIGINT or SIGTERM. Raises what `local_service` raises."""
    with local_service(config, console, room_timeout_s) as url:
        console.print(f"Routes and their fields: {url}/docs. Ctrl-C stops the service.")
        threading.Event().wait()


def base_url(options: HTTPOptionsSchema) -> str:
    """Under which programs of this machine reach the service."""
    scheme = "http" if options.ssl_certfile is None else "https"
    return f"{scheme}://{'127.0.0.1' if options.host == '0.0.0.0' else options.host}:{options.port}"


def start_ray() -> None:
    """Raises `ServiceNotStarted` with what Ray says."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve says after so many seconds what a replica that has not started waits for.
    os.environ.setdefault("RAY_SERVE_SLOW_STARTUP_WARNING_S", "5")
    os.environ.setdefault("RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S", "5")
    require_cluster_token()
    try:
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    except Exception as error:  # Ray raises a bare one if its node is not there within 30 s.
        raise ServiceNotStarted(f"Ray did not start: {error}") from error


def stop(console: Console) -> None:
    with stages_shown(console) as show:
        show("Stopping the service")
        stop_ray()
    console.print("The service has stopped.")


def stop_ray() -> None:
    """Ends the applications, then Ray, then the processes that did not end by themselves; removes their weights, jobs,
    sessions, sockets and shared memory. Their logs stay."""
    folders: list[Path] = []
    if ray.is_initialized():
        folders = [
            cluster_weights_folder(),
            cluster_folder("job"),
            cluster_folder("session"),
            session_folder() / "sockets",
        ]
        for name in serve.status().applications:
            serve.delete(name)
        ray.shutdown()
    end_descendants()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    remove_left_over()
    free_left_over()
