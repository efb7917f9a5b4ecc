"""Two replicas of one environment, on a simulated engine: they share the steps, and abandoned steps end."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema
from rich.console import Console

from rollout_client import RolloutClient
from rollout_client.contract import SampleInput
from service.local import local_service
from service.startup.config import read_config
from service.startup.ports import free_port
from tests.deployments.environments.test_worker_pool import until
from tests.paths import REPOSITORY

REPLICAS = 2
STEPS = 512


@pytest.fixture(scope="module")
def ended_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def two_replicas(ended_folder: Path) -> Iterator[RolloutClient]:
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    path = "tests.live.waiting_environment:WaitingEnvironment"
    application.args["environments"] = {
        "waiting": {"import_path": path, "arguments": {"ended_folder": str(ended_folder)}}
    }
    application.args["engine"]["simulated"] |= {"time_to_first_token_s": 0.2, "time_per_token_s": 0.0}
    application.deployments = [
        *(deployment for deployment in application.deployments if deployment.name in ("Ingress", "Generator")),
        DeploymentSchema(name="waiting", num_replicas=REPLICAS, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1)),
    ]
    with local_service(config, Console(stderr=True)) as url, RolloutClient(url) as client:
        yield client


def samples(count: int, seconds: float = 0.0) -> list[SampleInput]:
    return [
        SampleInput.model_validate(
            {
                "task_name": "waiting",
                "messages": [{"role": "user", "content": "Wait."}],
                "extra_env_info": {"seconds": seconds},
            }
        )
        for _ in range(count)
    ]


def test_steps_of_one_instant_are_shared_evenly_from_the_first_request_on(two_replicas: RolloutClient) -> None:
    response = two_replicas.rollout(samples(STEPS), sampling={"max_new_tokens": 1})
    shares = Counter(sample.answer for sample in response.samples)
    assert sum(shares.values()) == STEPS
    assert len(shares) == REPLICAS
    for share in shares.values():
        assert share == pytest.approx(STEPS / REPLICAS, rel=0.1)


def test_steps_of_rollouts_that_reach_their_deadline_end(two_replicas: RolloutClient, ended_folder: Path) -> None:
    waiting, quick = samples(8, seconds=600), samples(1)
    response = two_replicas.rollout([*waiting, *quick], deadline_s=3.0, sampling={"max_new_tokens": 1})
    assert [sample.status for sample in response.samples] == ["deadline"] * 8 + ["completed"]
    asyncio.run(until(lambda: len(list(ended_folder.iterdir())) == 8))


def test_one_call_carries_the_steps_of_a_request_in_lockstep(two_replicas: RolloutClient) -> None:
    response = two_replicas.rollout(samples(STEPS), schedule="lockstep", sampling={"max_new_tokens": 1})
    assert len({sample.answer for sample in response.samples}) == 1
