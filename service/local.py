"""The whole service on this machine: a Ray of its own, the deployments of a Serve config, and an end to all of it."""

import ctypes
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import typer
import yaml
from dotenv import load_dotenv
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve._private.common import DeploymentStatus
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, ServeDeploySchema
from rich.console import Console

from deployments.policy.cluster import cluster_weights_folder

SERVE_LEVERS = "serve.env"
OBJECT_STORE_BYTES = 2**30
POLL_S = 0.5
STOP_WITHIN_S = 5.0
STOP_ROUNDS = 4
PR_SET_CHILD_SUBREAPER = 36
RAY_LOGS = "/tmp/ray/session_latest/logs"


class ServiceNotStarted(Exception):
    """The service did not come up; the message says what refused."""


@contextmanager
def sentences_for_the_user(console: Console) -> Iterator[None]:
    """Ends a command with a sentence and exit code 1 when the service does not start, and quietly on Ctrl-C."""
    try:
        yield
    except ServiceNotStarted as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def read_config(path: Path, host: str | None = None, port: int | None = None) -> ServeDeploySchema:
    """Reads a Serve config, with `host` and `port` in place of its own where given.

    Sets the environment variables of `serve.env` beside it, if there is one, that are not set already.

    Raises:
        ServiceNotStarted: the file cannot be read as a Serve config.
    """
    try:
        config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ServiceNotStarted(f"{path} is no Serve config: {error}") from error
    load_dotenv(path.parent / SERVE_LEVERS)
    config.http_options.host = host or config.http_options.host
    config.http_options.port = port or config.http_options.port
    return config


@contextmanager
def local_service(config: ServeDeploySchema, console: Console) -> Iterator[str]:
    """Runs the service for the length of the block and yields its base URL once it is ready.

    Every process that it started has ended when the block is left, however it is left.

    Raises:
        ServiceNotStarted: the port is taken, or a deployment refused to start.
    """
    host, port = config.http_options.host, config.http_options.port
    refuse_taken_port(host, port)
    adopt_orphans()
    started_at = time.monotonic()
    try:
        with console.status("Starting Ray") as status:
            start_ray()
            with interruptible():
                deploy(config)
                for waiting_for in deployments_not_ready(config):
                    status.update(f"Starting {waiting_for} ({time.monotonic() - started_at:.0f} s)")
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        console.print(f"Ready after {time.monotonic() - started_at:.0f} s: {url}")
        with interruptible():
            yield url
    finally:
        with console.status("Stopping the service"):
            stop_ray()
        console.print("The service has stopped.")


def refuse_taken_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceNotStarted(f"Port {port} on {host} is taken: stop what uses it or choose another.") from error


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ray() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )


def deploy(config: ServeDeploySchema) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    client = serve_start(
        http_options=HTTPOptions(**config.http_options.model_dump()), proxy_location=config.proxy_location
    )
    client.deploy_apps(config)


def deployments_not_ready(config: ServeDeploySchema) -> Iterator[str]:
    """Yields what is still starting, twice a second, until every application runs.

    Raises:
        ServiceNotStarted: an application failed to deploy; the message is Serve's.
    """
    names = {application.name for application in config.applications}
    while True:
        applications = {name: app for name, app in serve.status().applications.items() if name in names}
        for name, app in applications.items():
            if app.status == ApplicationStatus.DEPLOY_FAILED:
                reasons = [
                    f"{deployment_name}: {last_words(deployment.message)}"
                    for deployment_name, deployment in app.deployments.items()
                    if deployment.status == DeploymentStatus.DEPLOY_FAILED
                ]
                raise ServiceNotStarted(
                    f"{name} failed to start. {' '.join(reasons) or last_words(app.message)} "
                    f"The whole story is in {RAY_LOGS}."
                )
        if len(applications) == len(names) and all(
            app.status == ApplicationStatus.RUNNING for app in applications.values()
        ):
            return
        # Serve's message says what a slow deployment waits for, such as cores that the machine does not have.
        starting = [
            f"{deployment_name}: {last_words(deployment.message)}" if deployment.message else deployment_name
            for app in applications.values()
            for deployment_name, deployment in app.deployments.items()
            if deployment.status != DeploymentStatus.HEALTHY
        ]
        yield ", ".join(starting) or "the application"
        time.sleep(POLL_S)


def last_words(message: str) -> str:
    """What a traceback says at its end; a message without one as it is."""
    lines = message.strip().splitlines()
    indented = [number for number, line in enumerate(lines, start=1) if line.startswith((" ", "\t"))]
    return " ".join(lines[indented[-1] if indented else 0 :])


def stop_ray() -> None:
    """Ends the applications, then Ray, then whatever of their processes has not ended by itself, and their weights."""
    weights_folder: Path | None = None
    if ray.is_initialized():
        weights_folder = cluster_weights_folder()
        for name in serve.status().applications:
            serve.delete(name)
        ray.shutdown()
    # More than once: a process that was only being started when its parent ended is seen the next time.
    for _ in range(STOP_ROUNDS):
        _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=STOP_WITHIN_S)
        for process in alive:
            process.kill()
        if not alive:
            break
    if weights_folder is not None:
        shutil.rmtree(weights_folder, ignore_errors=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C an interrupt and SIGTERM an orderly end, also where Ray or the parent process set either aside."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: end_as_asked}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_as_asked(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, so that none of them is lost from sight."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
