"""Runs the whole service on this machine: a Ray of its own, the deployments of a Serve config, and the end of both.

The rollouts under way end before the service is shut down. Server half of that: `Ingress.drain`.

Whoever has no token cannot call the Ray cluster, which runs what it is sent. Ray turns that on by itself where
`ray.init` starts a cluster on one machine, and writes the token into a file that every user of the machine may read.
Here it is on unless RAY_AUTH_MODE says otherwise, and the file is its owner's alone.
"""

import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import typer
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema
from rich.console import Console
from tenacity import Retrying, retry, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_fixed

from deployments.logs import serve_logs_folder, session_folder
from deployments.policy.cluster import cluster_weights_folder
from deployments.storage.databases import cluster_folder
from deployments.upstream.ray_serve.direct_ingress import PORT_LABEL, own_address
from deployments.upstream.ray_serve.serve_internals import (
    application_states,
    fewer_processes,
    read_environment_again,
    route_in_own_loop,
)
from deployments.workers.cleanup import free_left_over, remove_left_over
from service.access.access_control import HAPROXY
from service.startup.config import APP_BUILDER, ServiceNotStarted
from service.startup.console_logs import replica_logs_shown, stages_shown
from service.startup.preflight import check_config
from service.startup.processes import adopt_orphans, end_descendants, interruptible, orphans_reaped
from service.startup.readiness import deploy, deployments_not_ready

INGRESS = "Ingress"
GRACEFUL_SHUTDOWN_TIMEOUT_S = 20.0
"""Ray Serve's, where a config says nothing."""
LONGEST_ANSWER_S = 5.0
"""Longest wait for an ingress replica to report what is left."""
REPLICAS_KNOWN_WITHIN_S = 10.0
_AUTH_MODE = "RAY_AUTH_MODE"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_TRIES = Retrying(stop=stop_after_attempt(3), before_sleep=lambda _: end_descendants(), reraise=True)
"""Tries of a start of Ray, which gives its node 30 s and has no setting for it: a busy machine takes longer."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
logger = logging.getLogger("rollout_service.startup")


def _finish_rollouts(config: ServeDeploySchema, console: Console) -> None:
    """Has the ingress refuse new requests, and waits for those under way as long as its `graceful_shutdown_timeout_s`.

    Serve shuts all deployments of an application down at once: without this, an ingress replica would go on with
    rollouts whose engines and environments are gone.
    """
    for application in (each for each in config.applications if each.import_path == APP_BUILDER):
        bound_s = _shutdown_bound_s(application)
        try:
            handle: Any = serve.get_deployment_handle(INGRESS, app_name=application.name)
            route_in_own_loop(handle)
            with stages_shown(console) as show:
                show(f"Finishing the rollouts under way, for at most {bound_s:g} s")
                left = _drain_replicas(handle, bound_s)
        except (RayError, RayServeException, TimeoutError) as error:
            console.print(f"The rollouts under way could not be waited for: {error}", markup=False, soft_wrap=True)
            continue
        if left:
            console.print(f"{left} rollouts have not ended within {bound_s:g} s.")


@retry(
    retry=retry_if_exception_type(DeploymentUnavailableError),
    stop=stop_after_delay(REPLICAS_KNOWN_WITHIN_S),
    wait=wait_fixed(0.05),
    reraise=True,
)
def _drain_replicas(handle: Any, bound_s: float) -> int:
    """How many rollouts are left on all replicas of the ingress.

    Ray Serve 2.60 tells a new handle its deployment's config and its replicas in two messages. Between them
    `broadcast` finds no replica and calls the deployment unavailable.
    """
    answers: list[int] = handle.broadcast("drain", bound_s).results(timeout_s=bound_s + LONGEST_ANSWER_S)
    return sum(answers)


def _shutdown_bound_s(application: ServeApplicationSchema) -> float:
    """`graceful_shutdown_timeout_s` of the ingress, in seconds."""
    given = next((each.graceful_shutdown_timeout_s for each in application.deployments if each.name == INGRESS), None)
    return float(given) if isinstance(given, int | float) else GRACEFUL_SHUTDOWN_TIMEOUT_S


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
def local_service(config: ServeDeploySchema, console: Console) -> Iterator[str]:
    """Runs the service for the length of the block and yields its base URL once it is ready.

    Every process that it started has ended when the block is left, however it is left. After SIGTERM the rollouts under
    way are finished before, until a second signal comes. What replicas print and warn of is shown on the console.

    Raises:
        ServiceNotStarted: the config cannot work, the port is taken, or a deployment cannot start.
    """
    host, port = config.http_options.host, config.http_options.port
    check_config(config)
    _refuse_taken_port(host, port)
    adopt_orphans()
    started_at = time.monotonic()
    with ExitStack() as to_undo:
        to_undo.callback(_stop, console)
        with stages_shown(console) as show:
            show("Starting Ray")
            _start_ray(port)
            to_undo.enter_context(orphans_reaped())
            to_undo.enter_context(replica_logs_shown(console, serve_logs_folder()))
            with interruptible():
                show("Starting Ray Serve")
                deploy(config)
                for starting in deployments_not_ready(config):
                    show(f"Starting {starting}")
        url = own_address(config.http_options)
        console.print(f"Ready after {time.monotonic() - started_at:.0f} s: {url}")
        console.print(f"Logs of the replicas: {serve_logs_folder()}", soft_wrap=True)
        with interruptible():
            try:
                yield url
            except SystemExit:
                _finish_rollouts(config, console)
                raise


def serve_until_stopped(config: ServeDeploySchema, console: Console) -> None:
    """Runs the service until SIGINT or SIGTERM. Raises what `local_service` raises."""
    with local_service(config, console) as url:
        console.print(f"Routes and their fields: {url}/docs. Ctrl-C stops the service.")
        threading.Event().wait()


def _start_ray(port: int) -> None:
    """Starts a Ray whose ingress replicas will listen on the port, unless HAProxy shall.

    Raises:
        ServiceNotStarted: with what Ray says.
    """
    labels = None
    if os.environ.get(HAPROXY) != "1":
        labels = {PORT_LABEL: str(port)}
        os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = "0"  # Serve's controller would start a proxy on the port.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve says after so many seconds what a replica that has not started waits for.
    os.environ.setdefault("RAY_SERVE_SLOW_STARTUP_WARNING_S", "5")
    os.environ.setdefault("RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S", "5")
    require_cluster_token()
    try:
        with fewer_processes():
            _TRIES(
                ray.init,
                address="local",
                namespace="serve",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                labels=labels,
            )
    except Exception as error:  # Ray raises a bare one.
        raise ServiceNotStarted(f"Ray did not start: {error}") from error


def _refuse_taken_port(host: str, port: int) -> None:
    """Raises `ServiceNotStarted` if the service cannot listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceNotStarted(f"Port {port} on {host} is taken: stop what uses it or choose another.") from error


def require_cluster_token() -> None:
    """Makes this process, and the cluster that it starts, use a token; makes the token if there is none.

    Raises:
        ServiceNotStarted: the token's file cannot be made, or cannot be closed to other users.
    """
    mode = os.environ.setdefault(_AUTH_MODE, "token")
    # Ray has read its environment when it was imported, which may have been before `serve.env` was.
    read_environment_again()
    if mode.lower() != "token":
        logger.warning("%s is %s: whoever reaches a port of Ray can run code here. Unset it.", _AUTH_MODE, mode)
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get(_TOKEN_PATH) or "~/.ray/auth_token").expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_token(path)
        if path.stat().st_mode & _OTHERS:
            path.chmod(0o600)
            logger.warning("%s was open to other users, and is no longer.", path)
    except OSError as error:
        raise ServiceNotStarted(
            f"The token of the Ray cluster cannot be kept in {path}: {error.strerror}. "
            f"Name another file in {_TOKEN_PATH}."
        ) from error


def _make_token(path: Path) -> None:
    """Writes a new token, unless the file is there. Nobody reads a part of it, also while two services start."""
    if path.exists():
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".token-") as new, suppress(FileExistsError):
        new.write(secrets.token_hex())
        new.flush()
        os.link(new.name, path)


def _stop(console: Console) -> None:
    """Ends the applications, then Ray, then the processes that did not end by themselves; removes their weights, jobs,
    sessions, sockets and shared memory. Their logs stay."""
    with stages_shown(console) as show:
        show("Stopping the service")
        folders: list[Path] = []
        if ray.is_initialized():
            sockets = session_folder() / "sockets"
            folders = [cluster_weights_folder(), cluster_folder("job"), cluster_folder("session"), sockets]
            for name in application_states():
                serve.delete(name)
            ray.shutdown()
        end_descendants()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        remove_left_over()
        free_left_over()
    console.print("The service has stopped.")
