"""The processes and the scale of the running service."""

import time
from pathlib import Path

import psutil
from ray import serve
from ray.serve.schema import ServeDeploySchema

from service.startup.readiness import deploy, deployments_not_ready

READY_WITHIN_S = 240.0
"""An engine that takes the place of a killed one, also on a machine that is three times slower than usual."""
IDLE_WITHIN_S = 60.0
"""Far more than it takes, and less than what tests ask for and leave would take."""


def replicas(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment, oldest first: the service runs below this very process."""
    return processes(f"ServeReplica:rollout:{deployment}")


def controller() -> psutil.Process:
    """Ray Serve's."""
    [found] = processes("ServeController")
    return found


def processes(title: str) -> list[psutil.Process]:
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and title in " ".join(process.cmdline())
    ]
    return sorted(found, key=lambda process: process.create_time())


def scale(config: ServeDeploySchema, deployment: str, count: int) -> None:
    """Returns when there are so many replicas and all of them take calls."""
    [application] = config.applications
    [scaled] = [each for each in application.deployments if each.name == deployment]
    scaled.num_replicas = count
    deploy(config)
    for _ in deployments_not_ready(config):
        pass


def ongoing_generations() -> int:
    """Of the only replica of the generator."""
    handle = serve.get_deployment_handle("Generator", app_name="rollout")
    ongoing: int = handle.ongoing_generations.remote().result()
    return ongoing


def ended_generations() -> int:
    """How many the only replica of the generator has ended so far."""
    handle = serve.get_deployment_handle("Generator", app_name="rollout")
    ended: int = handle.ended_generations.remote().result()
    return ended


def wait_until_idle() -> None:
    """Returns when the only replica of the generator generates nothing."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while ongoing := ongoing_generations():
        assert time.monotonic() < deadline, f"{ongoing} generations run {IDLE_WITHIN_S:g} s after nobody waits for them"
        time.sleep(0.1)


def shared_bytes(process: psutil.Process) -> int:
    """Shared memory that it has touched; of a raylet, of Ray's object store."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("RssShmem:")]
    return int(kib) * 1024
