"""`AgentRolloutFunc`: agents of sessions as the rollouts of TRL's `GRPOTrainer`."""

from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollout_client import SampleInput
from rollout_client.contract.sessions import SessionLimits
from rollout_client.trainers.trl import service_reward
from rollout_client.trainers.trl_agents import AgentRolloutFunc, AgentsFailed
from tests.clients.agent_service import AgentService
from tests.clients.scripted_service import Json
from tests.clients.trainers.scripted_trainer import END, PROMPTS, PushingClient, trainer
from tests.service.scripted import outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:.*torch.jit.script_method"),
]


@pytest.fixture
def agents() -> AgentService:
    return AgentService()


def func(agents: AgentService, client: PushingClient, agent: Any, **options: Any) -> AgentRolloutFunc:
    return AgentRolloutFunc(client, agent, task_name="math", connect=agents.connected, **options)


def test_each_prompt_is_a_run_of_the_agent_with_the_engines_tokens(agents: AgentService, client: PushingClient) -> None:
    asked: list[Any] = []

    async def agent(base_url: str, api_key: str, sample: SampleInput) -> dict[str, float]:
        assert sample.messages is not None
        asked.append((sample.idx, sample.messages[0].content, sample.extra_env_info, api_key[:8]))
        await agents.generate(base_url, [30, END])
        return {"right": float(sample.idx or 0), "short": 0.5}

    columns = func(agents, client, agent)([PROMPTS[1], PROMPTS[0]], trainer())
    assert sorted(asked) == [
        (0, "What is 1 + 2?", {"ground_truth": "3"}, "session-"),
        (1, "What is 1 + 1?", {"ground_truth": "2"}, "session-"),
    ]
    assert columns == {
        "prompt_ids": [[1, 9]] * 2,
        "completion_ids": [[30, END]] * 2,
        "logprobs": [[-0.5, -0.5]] * 2,
        "env_mask": [[1, 1]] * 2,
        "total_reward": [0.5, 1.5],
        "rewards": [{"right": 0.0, "short": 0.5}, {"right": 1.0, "short": 0.5}],
        "status": ["completed"] * 2,
        "answer": [None] * 2,
        "finish_reason": ["stop"] * 2,
        "turn_rewards": [[0.5], [1.5]],
        "rollout_id": [None, None],
    }
    everything: dict[str, Any] = {"prompts": PROMPTS, **columns}
    assert service_reward(**everything) == [0.5, 1.5]


def test_the_environment_judges_an_agent_that_returns_no_reward(agents: AgentService, client: PushingClient) -> None:
    agents.http.environments["math"].script = [outcome(reward=0.25)]

    async def agent(base_url: str, _api_key: str, _sample: SampleInput) -> None:
        await agents.generate(base_url, [30])

    assert func(agents, client, agent)(PROMPTS[:1], trainer())["total_reward"] == [0.25]
    unjudged = func(agents, client, agent, judge=False)(PROMPTS[:1], trainer())
    assert (unjudged["total_reward"], unjudged["env_mask"]) == ([None], [[0]])


def test_failed_runs_and_runs_without_a_call_are_masked(agents: AgentService, client: PushingClient) -> None:
    async def agent(base_url: str, _api_key: str, sample: SampleInput) -> float:
        if sample.idx != 2:
            await agents.generate(base_url, [30, 31])
        if sample.idx == 1:
            raise KeyError("no such tool")
        return 1.0

    columns = func(agents, client, agent)([PROMPTS[0]] * 3, trainer())
    assert columns["completion_ids"] == [[30, 31], [30, 31], [256]]
    assert columns["env_mask"] == [[1, 1], [0, 0], [0]]
    assert columns["total_reward"] == [1.0, None, None]
    assert columns["status"] == ["completed", "error", "error"]


def test_sessions_have_the_trainers_sampling_the_version_and_the_limits(
    agents: AgentService, client: PushingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    opens = agents.store.open

    async def noted(opening: Any, *rest: Any) -> Any:
        opened.append(opening.request)
        return await opens(opening, *rest)

    async def agent(base_url: str, _api_key: str, _sample: SampleInput) -> float:
        await agents.generate(base_url, [30])
        return 1.0

    monkeypatch.setattr(agents.store, "open", noted)
    func(agents, client, agent, limits=SessionLimits(max_calls=3), deadline_s=60)(PROMPTS[:1], trainer())
    [request] = opened
    sampling = {"temperature": 0.75, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "max_new_tokens": 8}
    assert request.sampling.model_dump(exclude_unset=True) == sampling
    assert (request.policy.min_version, request.limits.max_calls, request.deadline_s) == (101, 3, 60)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({}, {"max_seq_len": 64, "max_rollout_turns": 2}, "have no max_rollout_turns, max_seq_len"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, "have no chat_template_kwargs"),
        ({}, {"sampling": {"seed": 1}}, "With a seed, the rollouts of a group would be equal"),
    ],
)
def test_what_a_session_does_not_have_is_a_value_error(
    agents: AgentService, client: PushingClient, args: Json, options: Json, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        func(agents, client, AsyncMock(return_value=0.0), **options)(PROMPTS, trainer(**args))


def test_an_agent_that_fails_for_every_prompt_ends_the_training(agents: AgentService, client: PushingClient) -> None:
    agent = AsyncMock(side_effect=KeyError("no such tool"))
    with pytest.raises(AgentsFailed, match=r"All 2 runs of the agent failed; the first: KeyError\('no such tool'\)"):
        func(agents, client, agent)(PROMPTS, trainer())
