"""Two replicas of each environment, on a simulated engine: shared steps, steps that end, and sessions."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleInput, SampleResult
from tests.clients.rollout_env.test_worker_pool import until
from tests.live.abandoned_rollouts import begin_and_abandon
from tests.live.running_service import replicas, scale
from tests.live.services import REPLICAS, SimulatedService

STEPS = 512
GIVEN_UP_WITHIN_S = 60.0


@pytest.fixture
def folder(simulated: SimulatedService) -> Path:
    """Where the environments write down what they do, without what they wrote in earlier tests."""
    for left in (*simulated.folder.glob("began-*"), *simulated.folder.glob("ended-*")):
        left.unlink()
    return simulated.folder


def found(folder: Path, kind: str) -> int:
    return len(list(folder.glob(f"{kind}-*")))


def samples(count: int, task_name: str = "waiting", **state: float) -> list[SampleInput]:
    prompt = [{"role": "user", "content": "Go."}]
    sample = {"task_name": task_name, "messages": prompt, "extra_env_info": state}
    return [SampleInput.model_validate(sample) for _ in range(count)]


def test_steps_of_one_instant_are_shared_evenly_from_the_first(simulated_client: RolloutClient, folder: Path) -> None:
    held = folder / "held"
    # None ends before all have come: a replica that is faster gets no more than the other.
    held.touch()
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(
            simulated_client.rollout, samples(STEPS, while_held=True), sampling={"max_new_tokens": 1}
        )
        asyncio.run(until(lambda: found(folder, "began") == STEPS or playing.done()))
        held.unlink()
        shares = Counter(sample.answer for sample in playing.result().samples)
    assert list(shares.values()) == [STEPS // REPLICAS] * REPLICAS


def test_steps_of_rollouts_that_reach_their_deadline_end(simulated_client: RolloutClient, folder: Path) -> None:
    waiting, quick = samples(8, seconds=600), samples(1)
    # Enough for all steps to begin, and the quick one to end, on a machine that is busy.
    response = simulated_client.rollout([*waiting, *quick], deadline_s=12.0, sampling={"max_new_tokens": 1})
    assert [sample.status for sample in response.samples] == ["deadline"] * 8 + ["completed"]
    asyncio.run(until(lambda: found(folder, "ended") == 8))


def test_one_call_carries_the_steps_of_a_request_in_lockstep(simulated_client: RolloutClient) -> None:
    response = simulated_client.rollout(samples(STEPS), schedule="lockstep", sampling={"max_new_tokens": 1})
    assert len({sample.answer for sample in response.samples}) == 1


def counts(sample: SampleResult) -> tuple[set[int], list[int]]:
    """The processes that stepped the rollout, and the counts that it was told."""
    told = [message.content.split(":") for message in sample.message_log if ":" in message.content]
    return {int(process) for process, _ in told}, [int(count) for _, count in told]


def test_sessions_stay_restart_if_their_replica_dies_and_close(simulated_client: RolloutClient, folder: Path) -> None:
    held = folder / "held"
    held.touch()
    victim = replicas("holding")[0]

    def kill() -> None:
        victim.kill()
        for left in folder.glob(f"open-{victim.pid}-*"):
            left.unlink()
        held.unlink()

    async def kill_once_all_wait() -> None:
        await until(lambda: found(folder, "open") == 16)
        await asyncio.to_thread(kill)

    async def played() -> list[SampleResult]:
        killing = asyncio.create_task(kill_once_all_wait())
        holding = samples(16, "holding", waits_at=3)
        response = await asyncio.to_thread(simulated_client.rollout, holding, sampling={"max_new_tokens": 1})
        await killing
        return response.samples

    results = asyncio.run(played())
    assert [result.status for result in results] == ["completed"] * 16
    for result in results:
        processes, told = counts(result)
        assert len(processes) == 1
        assert victim.pid not in processes
        assert told == [1, 2, 3, 4]
    asyncio.run(until(lambda: not found(folder, "open")))
    endless = samples(4, "holding", steps=10**6)
    cut = simulated_client.rollout(endless, deadline_s=2.0, max_rollout_turns=1000, sampling={"max_new_tokens": 1})
    assert {sample.status for sample in cut.samples} == {"deadline"}
    asyncio.run(until(lambda: not found(folder, "open")))


def test_hanging_up_gives_up_the_steps_and_closes_the_sessions(simulated: SimulatedService, folder: Path) -> None:
    held = folder / "held"
    held.touch()
    endless = [*samples(8, while_held=True), *samples(8, "holding", steps=10**6)]
    body = {
        "samples": [sample.model_dump(exclude_unset=True) for sample in endless],
        "sampling": {"max_new_tokens": 1},
        "max_rollout_turns": 10**6,
    }

    async def hang_up_once_all_have_begun() -> None:
        async with httpx.AsyncClient(**simulated.of_client()) as client:
            playing = asyncio.create_task(client.post("/v1/rollout", json=body))
            await until(lambda: playing.done() or (found(folder, "began"), found(folder, "open")) == (8, 8))
            assert not playing.done()
            playing.cancel()
            await asyncio.wait([playing])
        await until(lambda: found(folder, "ended") == 8 and not found(folder, "open"))

    asyncio.run(hang_up_once_all_have_begun())
    held.unlink()


@pytest.mark.parametrize(
    "way", ["leave_stream", "delete_keyed", pytest.param("reach_deadline", marks=pytest.mark.long)]
)
def test_what_nobody_waits_for_leaves_no_generation_step_or_session(simulated: SimulatedService, way: str) -> None:
    asyncio.run(begin_and_abandon(simulated.of_client(), way, GIVEN_UP_WITHIN_S))


def test_steps_of_a_replica_that_is_shut_down_are_made_at_the_other(
    simulated_client: RolloutClient, simulated: SimulatedService, folder: Path
) -> None:
    """The last test: it leaves one replica."""
    held = folder / "held"
    held.touch()
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(
            simulated_client.rollout, samples(16, while_held=True), sampling={"max_new_tokens": 1}, sample_retries=0
        )
        asyncio.run(until(lambda: found(folder, "began") == 16))
        scale(simulated.config, "waiting", 1)
        asyncio.run(until(lambda: found(folder, "ended") == 8))
        held.unlink()
        results = playing.result().samples
    assert [result.status for result in results] == ["completed"] * 16
    [left] = replicas("waiting")
    assert {result.answer for result in results} == {str(left.pid)}
