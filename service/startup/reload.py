"""`python -m service.startup.reload TASK` starts one environment of a running service anew, with its code as it is.

The engine, the weights and the other environments go on. Steps that were running are made again. Code that cannot be
imported, or does not take its arguments, is said here, and the running environment goes on as it is.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import ray
import typer
from ray import serve
from rich.console import Console

from deployments.upstream.ray_serve.serve_internals import clusters_of_this_machine, forget_serve_client, serve_client
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment_class
from service.settings import EnvironmentSettings
from service.startup.commands import ServiceNotStarted
from service.startup.local_service import require_cluster_token, sentences_for_the_user
from service.startup.readiness import REPLICA_FAILED, reason_in

POLL_S = 0.25
STARTED_WITHIN_S = 120.0
NO_SERVICE = "No service runs here: start one with `make serve`."


class ServeCluster:
    """The Serve of the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        """Raises `ServiceNotStarted` if there is none."""
        try:
            self._client: Any = serve_client()
        except serve.exceptions.RayServeException as error:
            raise ServiceNotStarted(NO_SERVICE) from error

    def applications(self) -> Mapping[str, Any]:
        """Serve's details of each application, by name."""
        applications: Mapping[str, Any] = self._client.get_serve_details()["applications"]
        return applications

    def kill(self, actor_name: str) -> None:
        ray.kill(ray.get_actor(actor_name, namespace="serve"))


@contextmanager
def _connected(address: str) -> Iterator[ServeCluster]:
    """Raises `ServiceNotStarted` if no service runs in this Ray cluster."""
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ServiceNotStarted(NO_SERVICE) from error
    try:
        yield ServeCluster()
    finally:
        forget_serve_client()
        ray.shutdown()


def cluster_here() -> str:
    """The Ray cluster that `RAY_ADDRESS` names, or the one that runs on this machine.

    Raises:
        ServiceNotStarted: there is none, or several are.
    """
    named = os.environ.get("RAY_ADDRESS")
    addresses = [named] if named else clusters_of_this_machine()
    if not addresses:
        raise ServiceNotStarted(NO_SERVICE)
    if len(addresses) > 1:
        raise ServiceNotStarted(f"Several Ray clusters run here: name one in RAY_ADDRESS, of {', '.join(addresses)}.")
    return addresses[0]


def reload_environment(task_name: str, cluster: ServeCluster) -> int:
    """Replaces the replicas of the environment, one after the other, and returns how many.

    Raises:
        ServiceNotStarted: no running service has the task, the environment cannot be loaded, or a new replica does not
            start.
    """
    application_name = _application_of(task_name, cluster.applications())

    def deployment() -> Mapping[str, Any]:
        return cluster.applications()[application_name]["deployments"][task_name]  # type: ignore[no-any-return]

    def running() -> list[str]:
        return [each["actor_name"] for each in deployment()["replicas"] if each["state"] == "RUNNING"]

    def wait_for(replicas: int, replaced: str | None = None) -> None:
        """Waits until as many replicas run, without the one that is replaced."""
        give_up_at = time.monotonic() + STARTED_WITHIN_S
        while replaced in (names := running()) or len(names) < replicas:
            said = deployment()["message"]
            if said != said_before and said.startswith(REPLICA_FAILED):
                raise ServiceNotStarted(
                    f"The new replica of {task_name!r} failed to start. Serve tries again: correct the code.\n"
                    f"{reason_in(said)}"
                )
            if time.monotonic() > give_up_at:
                raise ServiceNotStarted(
                    f"No new replica of {task_name!r} has started after {STARTED_WITHIN_S:g} s. "
                    f"Serve says: {said or 'nothing'}"
                )
            time.sleep(POLL_S)

    said_before, old = deployment()["message"], running()
    for actor_name in old:
        cluster.kill(actor_name)
        wait_for(len(old), actor_name)
    if old or not deployment()["target_num_replicas"]:
        return len(old)
    # Those with the code before this one have not started: Serve tries again by itself, with the code as it is now.
    wait_for(1)
    return 1


def _application_of(task_name: str, applications: Mapping[str, Any]) -> str:
    """The application that plays the task, whose environment can be loaded."""
    tasks: list[str] = []
    for name, application in applications.items():
        environments = _environments_of(application)
        if task_name in environments:
            settings = EnvironmentSettings.model_validate(environments[task_name])
            try:
                environment_class = load_environment_class(settings.import_path)
                checked_arguments(environment_class, settings.arguments, settings.import_path)
            except EnvironmentNotLoadable as error:
                raise ServiceNotStarted(f"{error} The running environment goes on as it is.") from error
            return name
        tasks += environments
    raise ServiceNotStarted(f"No running service plays {task_name!r}; there is {', '.join(tasks) or 'no task'}.")


def _environments_of(application: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the environments of one application, by task."""
    return ((application.get("deployed_app_config") or {}).get("args") or {}).get("environments") or {}


def main(task: Annotated[str, typer.Argument(help="A name under `environments` of the service's config.")]) -> None:
    """Start an environment of the running service anew, with its code as it is now."""
    console = Console(stderr=True)
    with sentences_for_the_user(console), console.status(f"Reloading {task}"):
        started_at = time.monotonic()
        require_cluster_token()
        with _connected(cluster_here()) as cluster:
            count = reload_environment(task, cluster)
        took_s = time.monotonic() - started_at
    console.print(f"{task}: {count} {'replica' if count == 1 else 'replicas'} anew after {took_s:.0f} s.")


if __name__ == "__main__":
    typer.run(main)
