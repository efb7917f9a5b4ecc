"""One running service for the whole suite: the embedded model on processors, on a free port of loopback."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from rollout_client.client import RolloutClient
from service.local import deploy, deployments_not_ready, free_port, local_service, read_config

pytest.register_assert_rewrite("tests.live.played_with_weights")

# How long an example takes says more of the machine than of the code.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_MODEL = REPOSITORY / "models" / "tiny"


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service may read checkpoints from."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def service_config(checkpoint_root: Path) -> ServeDeploySchema:
    """The example config with an environment of the tests', adapters, transfers, and room for a second generator."""
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    application.args["environments"]["following"] = {
        "import_path": "tests.live.following_environment:FollowingEnvironment"
    }
    application.args["policy"] = {"checkpoint_roots": [str(checkpoint_root)]}
    application.args["engine"] |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_cpus": 0.4}
    application.args["engine"] |= {"weight_transfer_config": {"backend": "gloo"}}
    application.deployments.append(
        DeploymentSchema(name="following", ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
    )
    return config


@pytest.fixture(scope="session")
def service_url(service_config: ServeDeploySchema) -> Iterator[str]:
    with local_service(service_config, Console(stderr=True)) as url:
        yield url


@pytest.fixture(scope="session")
def client(service_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(service_url) as rollout_client:
        yield rollout_client


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
