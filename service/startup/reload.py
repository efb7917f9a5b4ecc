"""`python -m service.startup.reload TASK` starts one environment of a running service anew, with its code as it is.

The engine, the weights and the other environments go on. Steps that were running are made again. Code that cannot be
imported, or does not take its arguments, is said here, and the running environment goes on as it is.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import ray
import typer
from ray import serve
from rich.console import Console

from deployments.environments.shadows import refuse_unloadable
from deployments.rpc.own_address import own_address
from deployments.upstream.ray_serve.ray_internals import clusters_of_this_machine
from deployments.upstream.ray_serve.serve_internals import forget_serve_client, running_http_options, serve_client
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment_class
from service.settings import EnvironmentSettings
from service.startup.commands import ServiceNotStarted
from service.startup.local_service import require_cluster_token, sentences_for_the_user
from service.startup.readiness import REPLICA_FAILED, reason_in

POLL_S = 0.25
STARTED_WITHIN_S = 120.0
NO_SERVICE = "No service runs here: start one with `make serve`."


class ReloadableCluster(Protocol):
    """The part of Serve that a reload needs."""

    def applications(self) -> Mapping[str, Any]:
        """Serve's details of each application, by name."""
        ...

    def kill(self, actor_name: str) -> None: ...


class ServeCluster(ReloadableCluster):
    """The Serve of the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        """Raises `ServiceNotStarted` if there is none."""
        try:
            self._client: Any = serve_client()
        except serve.exceptions.RayServeException as error:
            raise ServiceNotStarted(NO_SERVICE) from error

    def url(self) -> str:
        options = running_http_options()
        assert options is not None, "the constructor has found a Serve that runs"
        return own_address(options)

    def applications(self) -> Mapping[str, Any]:
        applications: Mapping[str, Any] = self._client.get_serve_details()["applications"]
        return applications

    def kill(self, actor_name: str) -> None:
        ray.kill(ray.get_actor(actor_name, namespace="serve"))


@contextmanager
def connected(address: str) -> Iterator[ServeCluster]:
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


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that runs in one of the Ray clusters of this machine."""

    address: str
    """Address of the Ray cluster."""
    url: str
    tasks: Sequence[str]


def services_at(addresses: Sequence[str]) -> Iterator[RunningService]:
    for address in addresses:
        try:
            with connected(address) as cluster:
                tasks = [task for config in cluster.applications().values() for task in environments_of(config)]
                yield RunningService(address, cluster.url(), tasks)
        except (ServiceNotStarted, RuntimeError) as error:
            # Ray raises a RuntimeError for a cluster of another version of Ray or Python, which is another program's.
            logging.getLogger("rollout_service.startup").warning("A Ray cluster is left out (%s): %s", address, error)


def address_of_service(task_name: str) -> str:
    """The Ray cluster that `RAY_ADDRESS` names, or the one of this machine whose service plays the task.

    Raises:
        ServiceNotStarted: there is none, or several are.
    """
    named = os.environ.get("RAY_ADDRESS")
    addresses = [named] if named else clusters_of_this_machine()
    if len(addresses) == 1:
        return addresses[0]
    return only_service(task_name, list(services_at(addresses))).address


def only_service(task_name: str, services: Sequence[RunningService]) -> RunningService:
    """The one that plays the task. Raises `ServiceNotStarted` if there is not one only."""
    if not services:
        raise ServiceNotStarted(NO_SERVICE)
    playing = [service for service in services if task_name in service.tasks]
    if not playing:
        raise not_played(task_name, [task for service in services for task in service.tasks])
    if len(playing) > 1:
        listed = "\n".join(f"  RAY_ADDRESS={service.address} ({service.url})" for service in playing)
        raise ServiceNotStarted(f"{len(playing)} services play {task_name!r}: say which one is meant.\n{listed}")
    return playing[0]


def not_played(task_name: str, tasks: Sequence[str]) -> ServiceNotStarted:
    return ServiceNotStarted(f"No running service plays {task_name!r}; there is {', '.join(tasks) or 'no task'}.")


def environments_of(application: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the environments of one application, by task."""
    return ((application.get("deployed_app_config") or {}).get("args") or {}).get("environments") or {}


def reload_environment(task_name: str, cluster: ReloadableCluster) -> int:
    """Replaces the replicas of the environment, one after the other, and returns how many.

    Raises:
        ServiceNotStarted: no running service has the task, the environment cannot be loaded, or a new replica does not
            start.
    """
    application_name = application_of(task_name, cluster.applications())
    old = running_replicas(cluster, application_name, task_name)
    deployment = deployment_of(cluster, application_name, task_name)
    before = deployment["message"]
    for actor_name in old:
        cluster.kill(actor_name)
        wait_for_new(cluster, application_name, task_name, actor_name, len(old), before)
    if old or not deployment["target_num_replicas"]:
        return len(old)
    # Those with the code before this one have not started: Serve tries again by itself, with the code as it is now.
    wait_for_new(cluster, application_name, task_name, "", 1, before)
    return 1


def application_of(task_name: str, applications: Mapping[str, Any]) -> str:
    """The application that plays the task, whose environment can be loaded."""
    tasks: list[str] = []
    for name, application in applications.items():
        environments = environments_of(application)
        if task_name in environments:
            settings = EnvironmentSettings.model_validate(environments[task_name])
            try:
                environment_class = load_environment_class(settings.import_path)
                checked_arguments(environment_class, settings.arguments, settings.import_path)
                for shadow in settings.shadow.values():
                    refuse_unloadable(shadow)
            except EnvironmentNotLoadable as error:
                raise ServiceNotStarted(f"{error} The running environment goes on as it is.") from error
            return name
        tasks += environments
    raise not_played(task_name, tasks)


def running_replicas(cluster: ReloadableCluster, application_name: str, task_name: str) -> list[str]:
    """The names of their actors."""
    replicas = deployment_of(cluster, application_name, task_name)["replicas"]
    return [replica["actor_name"] for replica in replicas if replica["state"] == "RUNNING"]


def deployment_of(cluster: ReloadableCluster, application_name: str, task_name: str) -> Mapping[str, Any]:
    deployment: Mapping[str, Any] = cluster.applications()[application_name]["deployments"][task_name]
    return deployment


def wait_for_new(
    cluster: ReloadableCluster, application_name: str, task_name: str, old: str, replicas: int, before: str
) -> None:
    """Waits until as many replicas run as before, without the old one.

    Args:
        before: what Serve said of the deployment before the reload.

    Raises:
        ServiceNotStarted: the constructor of the new one raised, or it takes longer than `STARTED_WITHIN_S`.
    """
    give_up_at = time.monotonic() + STARTED_WITHIN_S
    while True:
        running = running_replicas(cluster, application_name, task_name)
        if old not in running and len(running) >= replicas:
            return
        said = deployment_of(cluster, application_name, task_name)["message"]
        if said != before and said.startswith(REPLICA_FAILED):
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


def main(task: Annotated[str, typer.Argument(help="A name under `environments` of the service's config.")]) -> None:
    """Start an environment of the running service anew, with its code as it is now."""
    console = Console(stderr=True)
    with sentences_for_the_user(console), console.status(f"Reloading {task}"):
        started_at = time.monotonic()
        require_cluster_token()
        with connected(address_of_service(task)) as cluster:
            count = reload_environment(task, cluster)
        took_s = time.monotonic() - started_at
    console.print(f"{task}: {count} {'replica' if count == 1 else 'replicas'} anew after {took_s:.0f} s.")


if __name__ == "__main__":
    typer.run(main)
