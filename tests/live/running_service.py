"""The processes and the scale of the running service."""

import psutil
from ray.serve.schema import ServeDeploySchema

from service.startup.readiness import deploy, deployments_not_ready


def replicas(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment, oldest first: the service runs below this very process."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
        and f"ServeReplica:rollout:{deployment}" in " ".join(process.cmdline())
    ]
    return sorted(found, key=lambda process: process.create_time())


def scale_generators(config: ServeDeploySchema, count: int) -> None:
    """Returns when there are so many replicas and all of them take calls."""
    [application] = config.applications
    [generator] = [deployment for deployment in application.deployments if deployment.name == "Generator"]
    generator.num_replicas = count
    deploy(config)
    for _ in deployments_not_ready(config):
        pass
