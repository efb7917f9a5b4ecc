"""One running service for all tests of this folder: the embedded model on processors, on a free port of loopback."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from rollout_client import RolloutClient
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.paths import REPOSITORY

HERE = Path(__file__).parent
LIVE_TIMEOUT_S = 300
ON_GPU_RUNNER = os.environ.get("GPU_RUNNER_RIG") == "1"
SCALES_UP = "test_several_generators.py"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of this folder `live` and gives them more time."""
    if not item.path.is_relative_to(HERE):
        return
    item.add_marker(pytest.mark.live)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(LIVE_TIMEOUT_S))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of this folder last and in the order of their files, those of one `folder` of a model together.

    Most of them share one service, and starting and stopping replicas of it takes most of their time. In random order
    (as pytest-randomly puts all other tests) a second generator would be started several times. Tests with a service of
    their own come first, so that one process never runs two; the module that starts the second generator is the
    last one, so that it need not be stopped again.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, Path, int, int]:
        shares_the_service = "service_url" in getattr(item, "fixturenames", ())
        model = item.callspec.indices.get("folder", 0) if hasattr(item, "callspec") else 0
        return item.path.name == SCALES_UP, shares_the_service, item.path, model, item.reportinfo()[1] or 0

    live = sorted((item for item in items if item.path.is_relative_to(HERE)), key=place)
    items[:] = [item for item in items if not item.path.is_relative_to(HERE)] + live


@pytest.fixture(scope="session", autouse=True)
def quick_controller() -> Iterator[None]:
    """Ray Serve's controller looks for work five times a second, not once: a start takes several of its steps.

    Metrics reach Ray's exporter every second, not every ten.
    """
    with patch.dict(os.environ, RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.2", RAY_metrics_report_interval_ms="1000"):
        yield


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service may read checkpoints from."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def followed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where versions may be published."""
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten samples of the task `following`, whose messages are their numbers."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"{number}", "extra_env_info": {"turns": [{"reward": number}]}} for number in range(10)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def service_config(checkpoint_root: Path, followed_folder: Path, data_file: Path) -> ServeDeploySchema:
    """The example config with an environment of the tests', adapters, transfers, and room for a second generator."""
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    application.args["environments"]["following"] = {
        "import_path": "tests.live.following_environment:FollowingEnvironment",
        "data": {"files": str(data_file), "held_out": {"validation": 0.2}},
    }
    application.args["rollout_records"] = {}
    application.args["policy"] = {
        "checkpoint_roots": [str(checkpoint_root)],
        "follow": {"folder": str(followed_folder), "format": "miles_disk_delta", "poll_s": 0.5},
        "transfer": {"trainers": ["127.0.0.1:1-65535"], "rendezvous_timeout_s": 10},
        "transfer_idle_s": 5,
    }
    application.args["engine"] |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_cpus": 0.4}
    application.args["engine"] |= {"weight_transfer_config": {"backend": "gloo"}}
    if ON_GPU_RUNNER:
        # A step of 4,096 tokens takes Triton's interpreter most of a minute.
        application.args["engine"]["hang_timeout_s"] = LIVE_TIMEOUT_S
    [generator] = [deployment for deployment in application.deployments if deployment.name == "Generator"]
    # A replica that is shut down hands its generations over after half of this time, which it is told only once.
    generator.graceful_shutdown_timeout_s = 4
    generator.graceful_shutdown_wait_loop_s = 0.5
    application.deployments.append(
        DeploymentSchema(name="following", ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
    )
    return config


@pytest.fixture(scope="session")
def service_url(service_config: ServeDeploySchema) -> Iterator[str]:
    # The service's processes find the weight transfer backend "gloo" by the entry point in the second folder.
    searched = (str(REPOSITORY), str(HERE / "gloo_plugin"), os.environ.get("PYTHONPATH", ""))
    with (
        patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, searched))),
        local_service(service_config, Console(stderr=True)) as url,
    ):
        yield url


@pytest.fixture(scope="session")
def client(service_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(service_url) as rollout_client:
        yield rollout_client
