"""The service whose sessions are disturbed, and what runs in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from ray.exceptions import RayActorError
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.endurance.chaos.one_machine import CORES, GENERATOR_CORES, REPLICAS, OneMachine
from tests.endurance.replica_actors import done_in, instance_of, replica_actors
from tests.endurance.soak.soaked_service import ENVIRONMENT


def config_of_sessions(path: Path) -> ServeDeploySchema:
    """The config at `path` with sessions, two ingresses and two generators."""
    settings = read_config(path, port=free_port())
    [application] = settings.applications
    application.args["sessions"] = {}
    application.args["engine"] |= {"num_cpus": GENERATOR_CORES}
    ingress = RayActorOptionsSchema(num_cpus=CORES["Ingress"])
    application.deployments = [
        DeploymentSchema(name="Generator", num_replicas=REPLICAS),
        DeploymentSchema(name="Ingress", num_replicas=REPLICAS, ray_actor_options=ingress),
    ]
    return settings


@contextmanager
def service_of_sessions(path: Path, console: Console) -> Iterator[OneMachine]:
    """Runs the service for the length of the block."""
    settings = config_of_sessions(path)
    with patch.dict(os.environ, ENVIRONMENT), local_service(settings, console) as url:
        yield OneMachine(url, {"Generator": REPLICAS, "Ingress": REPLICAS}, settings)


def calls_in_flight() -> int:
    """How many calls the engines have."""
    calls = 0
    for actor in replica_actors().get("Generator", ()):
        with suppress(RayActorError):
            calls += done_in(actor, calls_of)
    return calls


def calls_of(replica: object) -> int:
    """In the replica's process."""
    ongoing: int = instance_of(replica).load().ongoing_generations
    return ongoing
