"""The running services of the tests of this folder, each on a free port, and the order of the tests."""

import json
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from ray.serve.schema import ServeDeploySchema

from examples.task_configs import config_for
from rollout_client import RolloutClient
from service.startup.config import free_port, read_config
from tests.deployments.agents.harbor_rollouts import COMMAND, TASKS
from tests.deployments.agents.test_harbor_program import works
from tests.live.certificate import Certificate
from tests.live.forward_pass import tiny_state
from tests.live.services import CONFIG, RUNNING, SimulatedService, replicas_of, shared_simulated_config
from tests.paths import REPOSITORY, SMALL_MODEL
from tests.service_scheduling import TINY, group_of, place_in_group, place_of_group

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
    """Runs the tests of this folder first, those that share a service together, in the order of their files.

    Starting services and stopping replicas takes most of their time. In random order (as pytest-randomly puts all other
    tests) a second generator would be started several times: the file that starts it is the last one of its service.
    """

    def place(item: pytest.Item) -> tuple[tuple[int, str], bool, int, Path, int, int]:
        """By the service, within it by the file; the tests with one `folder` of a model are together."""
        file = item.path.name
        model = item.callspec.indices.get("folder", 0) if hasattr(item, "callspec") else 0
        line = item.reportinfo()[1] or 0
        return place_of_group(file), file == SCALES_UP, place_in_group(file), item.path, model, line

    live = sorted((item for item in items if item.path.is_relative_to(HERE)), key=place)
    items[:] = live + [item for item in items if not item.path.is_relative_to(HERE)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops a service after the last of the tests that share it, so that it takes no time of those that follow."""
    is_live = nextitem is not None and nextitem.path.is_relative_to(HERE)
    following = group_of(nextitem.path.name) if nextitem is not None and is_live else None
    if following != group_of(item.path.name):
        RUNNING.stop()


def pytest_sessionfinish() -> None:
    """Stops the service of tests that were interrupted."""
    RUNNING.stop()


@pytest.fixture(scope="session", autouse=True)
def quick_controller() -> Iterator[None]:
    """Ray Serve's controller looks for work three times a second, not once: a start takes several of its steps."""
    with patch.dict(os.environ, RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.3"):
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
    config = read_config(CONFIG, port=free_port())
    [application] = config.applications
    application.args["environments"]["following"] = {
        "import_path": "tests.live.following_environment:FollowingEnvironment",
        "data": {"files": str(data_file), "held_out": {"validation": 0.2}},
    }
    application.args |= {"rollout_records": {}, "trainers": {"pause_s": 4}}
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
    application.deployments += replicas_of({"following": 1})
    return config


@pytest.fixture(scope="module")
def service_url(service_config: ServeDeploySchema) -> str:
    # The service's processes find the weight transfer backend "gloo" by the entry point in the second folder.
    searched = (str(REPOSITORY), str(HERE / "gloo_plugin"), os.environ.get("PYTHONPATH", ""))
    # Metrics reach Ray's exporter every two seconds, not every ten.
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, searched)), "RAY_metrics_report_interval_ms": "2000"}
    return RUNNING.url(TINY, lambda: service_config, **variables)


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(service_url) as rollout_client:
        yield rollout_client


@pytest.fixture(scope="module")
def leaves_the_original_weights(client: RolloutClient) -> Iterator[None]:
    yield
    client.push_weights(tiny_state())


FEW_TOKENS = {"max_tokens": 64, "temperature": 0}


def small_config(tasks: Sequence[str]) -> ServeDeploySchema:
    """The embedded model with tools and thoughts, with sessions, these tasks and several kinds of agents."""
    config = config_for(CONFIG, SMALL_MODEL, tasks)
    [application] = config.applications
    math, played_by = "deployments.tasks.math:MathEnvironment", "tests.live.played_by_agents"
    application.args["sessions"] = {}
    application.args["engine"]["num_cpus"] = 0.3
    command = {"argv": [sys.executable, str(HERE / "command_agent.py")]}
    application.args["environments"] |= {
        "asked_twice": {"agent": {"import_path": f"{played_by}:asks_twice", "scored_by": "agent"}},
        "commanded": {"import_path": math, "agent": {"command": command, "timeout_s": 300, "limits": {"max_calls": 2}}},
        "echo": {"agent": {"game": {"import_path": f"{played_by}:Echo", "rivals": {"parameters": FEW_TOKENS}}}},
        "conversation": {
            "import_path": "deployments.tasks.conversation:ConversationEnvironment",
            "arguments": {"judge": {"import_path": math}},
            "models": {"customer": {"parameters": FEW_TOKENS}},
            "user_simulator": {"model": "customer", "persona": "You are curt."},
        },
    }
    if works():
        harbor = {"harbor": {"tasks": str(TASKS)}, "command": COMMAND, "max_concurrent_runs": 6}
        application.args["environments"]["tasks"] = {"agent": harbor}
    return config


@pytest.fixture(scope="module")
def small_url(pytestconfig: pytest.Config) -> str:
    of_long_tests = ("tool_calls", "retrieval") if "not long" not in pytestconfig.option.markexpr else ()
    return RUNNING.url("small", partial(small_config, ("math", *of_long_tests)))


@pytest.fixture(scope="module")
def small_client(small_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(small_url) as rollout_client:
        yield rollout_client


@pytest.fixture(scope="session")
def unstarted(tmp_path_factory: pytest.TempPathFactory) -> SimulatedService:
    """The service behind keys, with its files; it has no address yet."""
    folder = tmp_path_factory.mktemp("simulated")
    certificate = Certificate(folder)
    config = shared_simulated_config(folder, certificate)
    service = SimulatedService("", config, folder, ssl.create_default_context(cafile=str(certificate.certificate)), {})
    service.add_key("admin", "admin")
    service.add_key("trainer", "rollout", "read")
    service.add_key("reader", "read")
    return service


@pytest.fixture(scope="module")
def simulated(unstarted: SimulatedService) -> SimulatedService:
    return replace(unstarted, url=RUNNING.url("simulated", lambda: unstarted.config))


@pytest.fixture(scope="module")
def simulated_client(simulated: SimulatedService) -> Iterator[RolloutClient]:
    with simulated.client() as rollout_client:
        yield rollout_client
