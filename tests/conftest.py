"""One running service for the whole suite: the embedded model on processors, on a free port of loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema
from rich.console import Console

from rollout_client.client import RolloutClient
from service.local import free_port, local_service, read_config

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_MODEL = REPOSITORY / "models" / "tiny"


@pytest.fixture(scope="session")
def service_url() -> Iterator[str]:
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    application.args["environments"]["following"] = {"import_path": "tests.following_environment:FollowingEnvironment"}
    application.deployments.append(
        DeploymentSchema(name="following", ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
    )
    with local_service(config, Console(stderr=True)) as url:
        yield url


@pytest.fixture(scope="session")
def client(service_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(service_url) as rollout_client:
        yield rollout_client
