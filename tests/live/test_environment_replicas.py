"""Two replicas of each environment, on a simulated engine: shared steps, steps that end, and sessions."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from rollout_client import RolloutClient, RolloutTimeout
from rollout_client.contract.rollouts import SampleInput, SampleResult
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.clients.rollout_env.test_worker_pool import until
from tests.live.abandoned_rollouts import TASK_NAME as ENDLESS
from tests.live.abandoned_rollouts import WAYS, begin_and_abandon
from tests.live.running_service import replicas, scale
from tests.paths import REPOSITORY

REPLICAS = 2
STEPS = 512
GIVEN_UP_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def ended_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def sessions_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def config(ended_folder: Path, sessions_folder: Path) -> ServeDeploySchema:
    config = read_config(REPOSITORY / "serve_config.scale.yaml", port=free_port())
    [application] = config.applications
    path = "tests.live.waiting_environment:WaitingEnvironment"
    application.args["environments"] = {
        "waiting": {"import_path": path, "arguments": {"ended_folder": str(ended_folder)}},
        "holding": {
            "import_path": "tests.live.holding_environment:HoldingEnvironment",
            "arguments": {"folder": str(sessions_folder)},
        },
        ENDLESS: {"import_path": "tests.live.abandoned_rollouts:EndlessEnvironment"},
    }
    application.args["jobs"] = {}
    application.args["engine"]["simulated"] |= {"time_to_first_token_s": 0.2, "time_per_token_s": 0.02}
    application.deployments = [
        *(deployment for deployment in application.deployments if deployment.name == "Ingress"),
        DeploymentSchema(name="Generator", num_replicas=1),
        *(
            DeploymentSchema(
                name=name,
                num_replicas=count,
                ray_actor_options=RayActorOptionsSchema(num_cpus=0.1),
                # A replica that is shut down hands its steps over after half of this time.
                graceful_shutdown_timeout_s=4,
                graceful_shutdown_wait_loop_s=0.5,
            )
            for name, count in {"waiting": REPLICAS, "holding": REPLICAS, ENDLESS: 1}.items()
        ),
    ]
    return config


@pytest.fixture(scope="module")
def url(config: ServeDeploySchema) -> Iterator[str]:
    with local_service(config, Console(stderr=True)) as url:
        yield url


@pytest.fixture(scope="module")
def two_replicas(url: str) -> Iterator[RolloutClient]:
    with RolloutClient(url) as client:
        yield client


def samples(count: int, **state: float) -> list[SampleInput]:
    return [
        SampleInput.model_validate(
            {
                "task_name": "waiting",
                "messages": [{"role": "user", "content": "Wait."}],
                "extra_env_info": state,
            }
        )
        for _ in range(count)
    ]


def test_steps_of_one_instant_are_shared_evenly_from_the_first_request_on(
    two_replicas: RolloutClient, ended_folder: Path
) -> None:
    held = ended_folder / "held"
    # None ends before all have come: a replica that is faster gets no more than the other.
    held.touch()
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(two_replicas.rollout, samples(STEPS, while_held=True), sampling={"max_new_tokens": 1})
        asyncio.run(until(lambda: len(list(ended_folder.glob("began-*"))) == STEPS or playing.done()))
        held.unlink()
        shares = Counter(sample.answer for sample in playing.result().samples)
    assert list(shares.values()) == [STEPS // REPLICAS] * REPLICAS


def test_steps_of_rollouts_that_reach_their_deadline_end(two_replicas: RolloutClient, ended_folder: Path) -> None:
    waiting, quick = samples(8, seconds=600), samples(1)
    response = two_replicas.rollout([*waiting, *quick], deadline_s=6.0, sampling={"max_new_tokens": 1})
    assert [sample.status for sample in response.samples] == ["deadline"] * 8 + ["completed"]
    asyncio.run(until(lambda: len(list(ended_folder.glob("ended-*"))) == 8))
    for ended in ended_folder.glob("ended-*"):
        ended.unlink()


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


def test_a_caller_that_hangs_up_has_its_steps_given_up_and_its_sessions_closed(
    two_replicas: RolloutClient, ended_folder: Path, sessions_folder: Path
) -> None:
    endless = [*samples(8, seconds=600), *holding_samples(8, steps=10**6)]
    with pytest.raises(RolloutTimeout):
        two_replicas.rollout(endless, max_rollout_turns=10**6, sampling={"max_new_tokens": 1}, timeout_s=6.0)
    asyncio.run(
        until(lambda: len(list(ended_folder.glob("ended-*"))) == 8 and not list(sessions_folder.glob("open-*")))
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_waits_for_leaves_no_generation_no_step_and_no_session(url: str, way: str) -> None:
    asyncio.run(begin_and_abandon(url, way, GIVEN_UP_WITHIN_S))


def test_steps_of_a_replica_that_is_shut_down_are_made_at_the_other_and_cost_no_retry(
    two_replicas: RolloutClient, config: ServeDeploySchema, ended_folder: Path
) -> None:
    """The last test: it leaves one replica."""
    for earlier in ended_folder.iterdir():
        earlier.unlink()
    held = ended_folder / "held"
    held.touch()
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(
            two_replicas.rollout, samples(16, while_held=True), sampling={"max_new_tokens": 1}, sample_retries=0
        )
        asyncio.run(until(lambda: len(list(ended_folder.glob("began-*"))) == 16))
        scale(config, "waiting", 1)
        asyncio.run(until(lambda: len(list(ended_folder.glob("ended-*"))) == 8))
        held.unlink()
        results = playing.result().samples
    assert [result.status for result in results] == ["completed"] * 16
    [left] = replicas("waiting")
    assert {result.answer for result in results} == {str(left.pid)}
