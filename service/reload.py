"""`python -m service.reload TASK`: the environment of a running service starts anew, with its code as it is now.

The engine, the weights and the other environments go on. Steps that were running are made again. Code that cannot be
imported, or does not take its arguments, is said here, and the running environment goes on as it is.
"""

import logging
import time
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import ray
import typer
from ray import serve
from rich.console import Console

from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment_class
from service.local import sentences_for_the_user
from service.settings import EnvironmentSettings
from service.startup.failures import ServiceNotStarted

POLL_S = 0.25
STARTED_WITHIN_S = 120.0


class Cluster(Protocol):
    """What a reload needs of Serve."""

    def applications(self) -> Mapping[str, Any]:
        """What Serve says of each, by name."""
        ...

    def kill(self, actor_name: str) -> None: ...


class ServeCluster(Cluster):
    """The Serve of this machine's Ray."""

    def __init__(self) -> None:
        """Raises `ServiceNotStarted` if none runs."""
        try:
            ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
            self._client: Any = serve.context._get_global_client()
        except (ConnectionError, serve.exceptions.RayServeException) as error:
            raise ServiceNotStarted("No service runs here: start one with `make serve`.") from error

    def applications(self) -> Mapping[str, Any]:
        applications: Mapping[str, Any] = self._client.get_serve_details()["applications"]
        return applications

    def kill(self, actor_name: str) -> None:
        ray.kill(ray.get_actor(actor_name, namespace="serve"))


def reload_environment(task_name: str, cluster: Cluster) -> int:
    """Replaces the replicas of the environment, one after the other, and returns how many.

    Raises:
        ServiceNotStarted: no running service has the task, the environment cannot be loaded, or a new replica does not
            start.
    """
    application_name = application_of(task_name, cluster.applications())
    old = running_replicas(cluster, application_name, task_name)
    for actor_name in old:
        cluster.kill(actor_name)
        wait_for_new(cluster, application_name, task_name, actor_name, len(old))
    return len(old)


def application_of(task_name: str, applications: Mapping[str, Any]) -> str:
    """The application that plays the task, whose environment can be loaded."""
    tasks: list[str] = []
    for name, application in applications.items():
        environments = ((application.get("deployed_app_config") or {}).get("args") or {}).get("environments") or {}
        if task_name in environments:
            settings = EnvironmentSettings.model_validate(environments[task_name])
            try:
                environment_class = load_environment_class(settings.import_path)
                checked_arguments(environment_class, settings.arguments, settings.import_path)
            except EnvironmentNotLoadable as error:
                raise ServiceNotStarted(f"{error} The running environment goes on as it is.") from error
            return name
        tasks += environments
    raise ServiceNotStarted(
        f"The running service does not play {task_name!r}; it plays {', '.join(tasks) or 'nothing'}. Where several "
        "services run on this machine, RAY_ADDRESS says which one is meant."
    )


def running_replicas(cluster: Cluster, application_name: str, task_name: str) -> list[str]:
    """The names of their actors."""
    replicas = cluster.applications()[application_name]["deployments"][task_name]["replicas"]
    return [replica["actor_name"] for replica in replicas if replica["state"] == "RUNNING"]


def wait_for_new(cluster: Cluster, application_name: str, task_name: str, old: str, replicas: int) -> None:
    """Waits until as many replicas run as before, without the old one."""
    give_up_at = time.monotonic() + STARTED_WITHIN_S
    while True:
        running = running_replicas(cluster, application_name, task_name)
        if old not in running and len(running) >= replicas:
            return
        if time.monotonic() > give_up_at:
            said = cluster.applications()[application_name]["deployments"][task_name].get("message") or "nothing"
            raise ServiceNotStarted(
                f"No new replica of {task_name!r} has started after {STARTED_WITHIN_S:g} s. Serve says: {said}"
            )
        time.sleep(POLL_S)


def main(task: Annotated[str, typer.Argument(help="A name under `environments` of the service's config.")]) -> None:
    """Start an environment of the running service anew, with its code as it is now."""
    console = Console(stderr=True)
    with sentences_for_the_user(console), console.status(f"Reloading {task}"):
        started_at = time.monotonic()
        count = reload_environment(task, ServeCluster())
        took_s = time.monotonic() - started_at
    console.print(f"{task}: {count} {'replica' if count == 1 else 'replicas'} anew after {took_s:.0f} s.")


if __name__ == "__main__":
    typer.run(main)
