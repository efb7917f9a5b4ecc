"""Two replicas of each environment, on a simulated engine: shared steps, steps that end, and sessions."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema
from rich.console import Console

from rollout_client import RolloutClient
from rollout_client.contract import SampleInput, SampleResult
from service.local import local_service
from service.startup.config import read_config
from service.startup.ports import free_port
from tests.deployments.environments.test_worker_pool import until
from tests.live.running_service import replicas
from tests.paths import REPOSITORY

REPLICAS = 2
STEPS = 512


@pytest.fixture(scope="module")
def ended_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def sessions_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def two_replicas(ended_folder: Path, sessions_folder: Path) -> Iterator[RolloutClient]:
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    path = "tests.live.waiting_environment:WaitingEnvironment"
    application.args["environments"] = {
        "waiting": {"import_path": path, "arguments": {"ended_folder": str(ended_folder)}},
        "holding": {
            "import_path": "tests.live.holding_environment:HoldingEnvironment",
            "arguments": {"folder": str(sessions_folder)},
        },
    }
    application.args["engine"]["simulated"] |= {"time_to_first_token_s": 0.2, "time_per_token_s": 0.0}
    application.deployments = [
        *(deployment for deployment in application.deployments if deployment.name in ("Ingress", "Generator")),
        *(
            DeploymentSchema(name=name, num_replicas=REPLICAS, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1))
            for name in ("waiting", "holding")
        ),
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


def holding_samples(count: int, **state: int) -> list[SampleInput]:
    prompt = [{"role": "user", "content": "Hold."}]
    sample = {"task_name": "holding", "messages": prompt, "extra_env_info": state}
    return [SampleInput.model_validate(sample) for _ in range(count)]


def counts(sample: SampleResult) -> tuple[set[int], list[int]]:
    """The processes that stepped the rollout, and the counts that it was told."""
    told = [message.content.split(":") for message in sample.message_log if ":" in message.content]
    return {int(process) for process, _ in told}, [int(count) for _, count in told]


def test_sessions_stay_at_their_replicas_are_played_anew_when_one_dies_and_are_all_closed(
    two_replicas: RolloutClient, sessions_folder: Path
) -> None:
    held = sessions_folder / "held"
    held.touch()
    victim = replicas("holding")[0]

    def open_sessions() -> list[Path]:
        return list(sessions_folder.glob("open-*"))

    def kill() -> None:
        victim.kill()
        for left in sessions_folder.glob(f"open-{victim.pid}-*"):
            left.unlink()
        held.unlink()

    async def kill_once_all_wait() -> None:
        await until(lambda: len(open_sessions()) == 16)
        await asyncio.to_thread(kill)

    async def played() -> list[SampleResult]:
        killing = asyncio.create_task(kill_once_all_wait())
        samples = holding_samples(16, waits_at=3)
        response = await asyncio.to_thread(two_replicas.rollout, samples, sampling={"max_new_tokens": 1})
        await killing
        return response.samples

    results = asyncio.run(played())
    assert [result.status for result in results] == ["completed"] * 16
    for result in results:
        processes, told = counts(result)
        assert len(processes) == 1
        assert victim.pid not in processes
        assert told == [1, 2, 3, 4]
    asyncio.run(until(lambda: not open_sessions()))
    endless = holding_samples(4, steps=10**6)
    cut = two_replicas.rollout(endless, deadline_s=2.0, max_rollout_turns=1000, sampling={"max_new_tokens": 1})
    assert {sample.status for sample in cut.samples} == {"deadline"}
    asyncio.run(until(lambda: not open_sessions()))
