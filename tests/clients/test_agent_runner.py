"""A program of the caller's played over many samples, against the service's own routes and session store."""

import asyncio
from copy import deepcopy
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest

from rollout_client import AgentRollout, AsyncRolloutClient, RequestRejected, SampleInput, play_agent
from rollout_client.agent_runner import agent_rollouts
from rollout_client.errors import NotJson, StatusError
from tests.clients.agent_service import AgentService
from tests.fakes.model_server import ScriptedModelServer
from tests.growing_limits import in_the_middle
from tests.service.scripted import outcome
from tests.service.scripted_http import ScriptedHttp

PROMPTS = [{"task_name": "math", "messages": [{"role": "user", "content": f"What is {n} + 1?"}]} for n in range(3)]


def test_each_sample_gets_a_group_in_input_order_with_its_rewards() -> None:
    service = AgentService()
    given: list[tuple[str | int, bool]] = []

    async def agent(base_url: str, api_key: str, sample: SampleInput) -> dict[str, float]:
        assert sample.messages is not None
        given.append((str(sample.messages[0].content), api_key.startswith("session-")))
        await service.generate(base_url, [3, 4])
        assert sample.idx is not None
        await asyncio.sleep(0.05 * (3 - sample.idx))
        return {"style": 0.25, "sum": float(sample.idx)}

    groups: list[list[AgentRollout]] = service.call(lambda http: play_agent(http, agent, PROMPTS, num_generations=2))
    places = [[(rollout.idx, rollout.generation_index) for rollout in group] for group in groups]
    assert places == [[(idx, 0), (idx, 1)] for idx in range(3)]
    assert sorted(given) == sorted([(f"What is {n} + 1?", True) for n in range(3)] * 2)
    for idx, group in enumerate(groups):
        for rollout in group:
            assert (rollout.total_reward, rollout.error, rollout.generated_tokens) == (idx + 0.25, None, 2)
            [branch] = rollout.samples
            assert (branch.idx, branch.generation_index) == (idx, rollout.generation_index)
            assert branch.rewards == {"style": 0.25, "sum": float(idx)}
            assert branch.message_log[-1].token_ids == [3, 4]


@pytest.mark.parametrize("typed", [False, True])
def test_each_run_gets_a_sample_of_its_own_which_it_may_change(typed: bool) -> None:
    service = AgentService()
    seen: list[tuple[int, list[int], Any]] = []

    async def agent(_base_url: str, _api_key: str, sample: SampleInput) -> float:
        assert sample.messages is not None
        extra = sample.model_extra or {}
        seen.append((len(sample.messages), cast(list[int], sample.extra_env_info["tried"]).copy(), extra["notes"]["n"]))
        await asyncio.sleep(0)
        sample.messages += sample.messages * 4
        cast(list[int], sample.extra_env_info["tried"]).append(1)
        extra["notes"]["n"] += 1
        return 0.0

    given = deepcopy({**PROMPTS[0], "extra_env_info": {"tried": []}, "notes": {"n": np.int64(0)}})
    samples: list[Any] = [SampleInput.model_validate(given) if typed else given]
    before = deepcopy(samples)
    [group] = service.call(lambda http: play_agent(http, agent, samples, num_generations=4, concurrency=2, include=[]))
    assert [rollout.error for rollout in group] == [None] * 4
    assert seen == [(1, [], 0)] * 4
    assert samples == before


def test_a_sample_that_is_not_json_is_named_before_a_run_begins() -> None:
    agent = AsyncMock(side_effect=AssertionError("A run has begun."))
    samples: list[Any] = [PROMPTS[0], {**PROMPTS[1], "extra_env_info": {"handle": object()}}]
    with pytest.raises(NotJson, match=r"^samples\[1\]\.extra_env_info\.handle: "):
        AgentService().call(lambda client: play_agent(client, agent, samples))


def test_a_run_is_one_rollout_with_its_last_branch_as_the_log() -> None:
    service = AgentService()

    async def agent(base_url: str, _api_key: str, sample: SampleInput) -> float | None:
        for token_ids in ([3], [4, 5]):
            await service.generate(base_url, token_ids)
        return 0.5 if sample.idx else None

    [[unknown], [rewarded], _] = service.call(lambda client: play_agent(client, agent, PROMPTS))
    assert len(rewarded.samples) == 2
    result = rewarded.as_result()
    assert [message.token_ids for message in result.message_log] == [[1, 9], [4, 5]]
    [other] = result.branches
    assert ([message.token_ids for message in other.message_log], other.shared_messages) == ([[1, 9], [3]], [])
    assert (result.idx, result.total_reward, rewarded.samples[-1].branches) == (1, 0.5, [])
    assert unknown.as_result().total_reward is None


def test_a_run_in_which_nothing_was_generated_is_no_rollout() -> None:
    with pytest.raises(ValueError, match="Nothing was generated in the run of sample 7"):
        AgentRollout(7, 0, [], None).as_result()


def test_an_agent_that_raises_or_takes_too_long_is_data_beside_the_others() -> None:
    def attempt(timeout_s: float) -> list[AgentRollout]:
        service = AgentService()

        async def agent(base_url: str, _api_key: str, sample: SampleInput) -> float:
            await service.generate(base_url, [3])
            if sample.idx == 0:
                raise KeyError("no such tool")
            if sample.idx == 1:
                await asyncio.sleep(60)
            return 1.0

        groups: list[list[AgentRollout]] = service.call(
            lambda client: play_agent(client, agent, PROMPTS, timeout_s=timeout_s)
        )
        return [rollout for [rollout] in groups]

    def have_begun(rollouts: list[AgentRollout]) -> bool:
        return all(rollout.generated_tokens for rollout in rollouts) and rollouts[2].error is None

    failed, late, good = in_the_middle(attempt, have_begun)
    assert isinstance(failed.error, KeyError)
    assert isinstance(late.error, TimeoutError)
    assert [failed.total_reward, late.total_reward, good.total_reward] == [None, None, 1.0]
    assert [rollout.generated_tokens for rollout in (failed, late, good)] == [1, 1, 1]


def test_the_environment_judges_what_an_agent_did_that_returned_no_reward() -> None:
    service = AgentService()
    service.http.environments["math"].script = [outcome(reward={"right": 0.5, "form": 0.25})]

    async def agent(base_url: str, _api_key: str, sample: SampleInput) -> float | None:
        if sample.idx != 2:
            await service.generate(base_url, [3, 4])
        return 1.0 if sample.idx == 0 else None

    own, judged, without = service.call(lambda client: play_agent(client, agent, PROMPTS, judge=True))
    assert (own[0].total_reward, own[0].samples[0].rewards) == (1.0, {"reward": 1.0})
    assert (judged[0].total_reward, judged[0].samples[0].rewards) == (0.75, {"right": 0.5, "form": 0.25})
    assert (without[0].total_reward, type(without[0].error)) == (None, RequestRejected)
    assert len(service.http.environments["math"].requests) == 1


def test_no_more_than_so_many_run_at_once_and_each_is_yielded_when_it_ends() -> None:
    service, running, most = AgentService(), 0, 0
    others_ended = asyncio.Event()

    async def agent(_base_url: str, _api_key: str, sample: SampleInput) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await (others_ended.wait() if sample.idx == 0 else asyncio.sleep(0.01))
        running -= 1
        return 0.0

    async def order(client: AsyncRolloutClient) -> list[int]:
        ended = []
        async for rollout in agent_rollouts(client, agent, PROMPTS, concurrency=2):
            ended.append(rollout.idx)
            if len(ended) == 2:
                others_ended.set()
        return ended

    assert service.call(order) == [1, 2, 0]
    assert most == 2


def test_leaving_early_cancels_the_runs_and_ends_their_sessions() -> None:
    service, begun, cancelled = AgentService(), 0, 0

    async def agent(_base_url: str, _api_key: str, sample: SampleInput) -> float:
        nonlocal begun, cancelled
        begun += 1
        try:
            # The first ends once all have begun.
            while sample.idx or begun < len(PROMPTS):
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return 0.0

    async def first(client: AsyncRolloutClient) -> list[str]:
        rollouts = agent_rollouts(client, agent, PROMPTS)
        assert (await anext(rollouts)).idx == 0
        await rollouts.aclose()
        return [session.status for session in await client.sessions.all()]

    assert service.call(first) == ["ended"] * 3
    assert cancelled == 2


def test_a_session_that_is_refused_ends_all() -> None:
    agent = AsyncMock(return_value=0.0)
    without_sessions = ScriptedHttp(model_server=ScriptedModelServer())
    with pytest.raises(StatusError, match="sessions") as refused:
        without_sessions.call(lambda client: play_agent(client, agent, PROMPTS))
    assert refused.value.status == 501


@pytest.mark.parametrize("bounds", [{"num_generations": 0}, {"concurrency": 0}])
def test_no_run_at_all_is_refused(bounds: dict[str, Any]) -> None:
    agent: Any = None
    with pytest.raises(ValueError, match="at least 1"):
        AgentService().call(lambda client: play_agent(client, agent, PROMPTS, **bounds))
