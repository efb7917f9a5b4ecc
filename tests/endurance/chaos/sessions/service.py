"""The service whose sessions are disturbed, and what runs in it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil
from ray.exceptions import RayActorError
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from benchmarks.process_group import command_of
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.endurance.chaos.one_machine import CORES, GENERATOR_CORES, REPLICAS, OneMachine
from tests.endurance.replica_actors import done_in, instance_of, replica_actors
from tests.endurance.soak.soaked_service import ENVIRONMENT

TASK_NAME = "endless"
AGENT = Path(__file__).parent / "endless_agent.py"
MOST_AGENTS = 64


def config_of_sessions(path: Path, answers: Path) -> ServeDeploySchema:
    """The config at `path` with sessions and one task that the endless agent plays; two ingresses and generators.

    Args:
        answers: the folder in which the agents write down what they were answered.
    """
    settings = read_config(path, port=free_port())
    [application] = settings.applications
    command = {"argv": [sys.executable, "-S", str(AGENT), str(answers)]}
    agent = {"command": command, "scored_by": "agent", "timeout_s": 3600, "max_concurrent_runs": MOST_AGENTS}
    application.args |= {"sessions": {}, "environments": {TASK_NAME: {"agent": agent}}}
    application.args["engine"] |= {"num_cpus": GENERATOR_CORES}
    ingress = RayActorOptionsSchema(num_cpus=CORES["Ingress"])
    application.deployments = [
        DeploymentSchema(name="Generator", num_replicas=REPLICAS),
        DeploymentSchema(name="Ingress", num_replicas=REPLICAS, ray_actor_options=ingress),
        DeploymentSchema(name=f"{TASK_NAME}_agent", ray_actor_options=ingress),
    ]
    return settings


@contextmanager
def service_of_sessions(path: Path, answers: Path, console: Console) -> Iterator[OneMachine]:
    """Runs the service for the length of the block."""
    settings = config_of_sessions(path, answers)
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


def agents() -> list[psutil.Process]:
    """The processes of agents that the service runs."""
    return [process for process in psutil.Process().children(recursive=True) if is_agent(process)]


def is_agent(process: psutil.Process) -> bool:
    """A program with a session of its own has its address among its arguments."""
    command = command_of(process)
    return str(AGENT) in command and "http://" not in command
