"""Agents of sessions in TRL's own rollout loop for harnesses of OpenEnv, with the real packages."""

import asyncio
import queue
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState  # type: ignore[import-untyped]
from transformers import AutoTokenizer
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from rollout_client import SampleInput
from rollout_client.trainers.trl_async.harness import AgentSessionFactory, training_trace
from tests.clients.agent_service import AgentService
from tests.clients.trainers.scripted_trainer import PROMPTS, ROWS
from tests.paths import TINY_MODEL
from tests.service.agents.agent_runs import branch, generated, said

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def factory(agents: AgentService, agent: Any, sampling: Mapping[str, float] = SAMPLING) -> AgentSessionFactory:
    return AgentSessionFactory(
        "http://service", agent, rows=ROWS, sampling=sampling, task_name="math", connect=agents.connected
    )


def test_a_run_ends_with_its_trace_and_its_reward() -> None:
    agents = AgentService()
    asked: list[Any] = []

    async def agent(base_url: str, _api_key: str, sample: SampleInput) -> float:
        asked.append((sample.id, sample.idx, sample.messages, sample.extra_env_info))
        await agents.generate(base_url, [30, 31])
        return 0.5

    session = factory(agents, agent).create(PROMPTS[1], seed=4, episode_id="mine")
    assert session.wait_for_completion() == 0
    [turn] = session.fetch_training_trace().turns
    assert (turn.prompt_token_ids, turn.completion_token_ids) == ([1, 9], [30, 31])
    assert (turn.per_token_logps, turn.loss_mask) == ([-0.5, -0.5], [0, 0, 1, 1])
    assert turn.request["messages"] == [{"role": "user", "content": "Go on."}]
    assert session.verify([]).env_reward == 0.5
    [(sample_id, idx, messages, info)] = asked
    assert (sample_id, idx, info) == ("mine", 4, {"ground_truth": "3"})
    assert [message.content for message in messages] == ["What is 1 + 2?"]


def test_what_an_agent_raises_is_raised_and_leaves_what_was_generated_without_a_reward() -> None:
    agents = AgentService()

    async def agent(base_url: str, _api_key: str, _sample: SampleInput) -> float:
        await agents.generate(base_url, [30])
        raise KeyError("no such tool")

    session = factory(agents, agent).create(PROMPTS[0])
    with pytest.raises(KeyError, match="no such tool"):
        session.wait_for_completion()
    assert len(session.fetch_training_trace().turns) == 1
    assert session.verify([]).env_reward is None


def test_closing_a_session_cancels_its_agent() -> None:
    agents, begun, cancelled = AgentService(), threading.Event(), threading.Event()

    async def agent(_base_url: str, _api_key: str, _sample: SampleInput) -> float:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0.0

    session = factory(agents, agent).create(PROMPTS[0])
    assert begun.wait(40)
    session.close()
    assert cancelled.wait(40)


def test_a_prompt_that_is_not_in_the_dataset_is_a_value_error() -> None:
    async def agent(_base_url: str, _api_key: str, _sample: SampleInput) -> float:
        return 0.0

    with pytest.raises(ValueError, match="A prompt of the worker is not in the dataset"):
        factory(AgentService(), agent).create("What is 9 + 9?")


def test_a_response_that_branches_share_is_one_turn() -> None:
    first = branch(said("user", "Q"), generated("A"), said("user", "on"), generated("BC"), ids=["a", "b"])
    second = branch(said("user", "Q"), generated("A"), said("user", "again"), generated("D"), ids=["a", "d"])
    second.shared_messages.append(1)
    turns = training_trace([first, second]).turns
    assert [turn.node_id for turn in turns] == ["a", "b", "d"]
    for turn, sample in zip(turns[1:], (first, second), strict=True):
        ids = [token_id for message in sample.message_log for token_id in message.token_ids]
        assert turn.prompt_token_ids + turn.completion_token_ids == ids
    assert [message["content"] for message in turns[2].request["messages"]] == ["Q", "A", "again"]


def test_a_response_that_may_not_be_trained_is_part_of_the_prompt_alone() -> None:
    log = branch(said("user", "Q"), generated("A"), said("user", "on"), generated("B"), ids=["a", "b"])
    log.message_log[1].constrained = True
    [turn] = training_trace([log]).turns
    assert turn.node_id == "b"
    assert turn.prompt_token_ids == [token_id for message in log.message_log[:3] for token_id in message.token_ids]


@pytest.mark.slow
def test_trls_own_loop_plays_groups_of_runs_and_scores_them() -> None:
    agents = AgentService()
    rewards = iter([1.0, 0.0, 1.0, 0.0])

    async def agent(base_url: str, _api_key: str, _sample: SampleInput) -> float:
        await agents.generate(base_url, [30, 31])
        await agents.generate(base_url, [32])
        return next(rewards, 0.0)

    PartialState()  # as the process does in which TRL runs the loop
    samples: queue.Queue[Any] = queue.Queue()
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    # TRL parses responses that it samples itself with it, and none here.
    tokenizer.response_template = ""
    loop = _HarnessRolloutLoop(
        harness_session_factory=partial(factory, agents, agent),
        model_name=str(TINY_MODEL),
        dataset=ROWS,
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[261],
        rollout_buffer=samples,
        model_version_value=SimpleNamespace(value=3),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=2,
        max_inflight_tasks=1,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    rows = [samples.get(timeout=60) for _ in range(4)]
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    thread.join(60)
    assert [row.input_ids.tolist() for row in rows] == [[1, 9, 30, 31], [1, 9, 32]] * 2
    assert [row.completion_mask.tolist() for row in rows] == [[0, 0, 1, 1], [0, 0, 1]] * 2
    assert [row.old_log_probs.tolist() for row in rows] == [[0, 0, -0.5, -0.5], [0, 0, -0.5]] * 2
    assert [row.advantage for row in rows] == pytest.approx([1, 1, -1, -1], abs=1e-4)
    assert rows[0].metrics["rewards/harness_reward"] == 1
    assert (rows[0].model_version, rows[0].prompt) == (3, PROMPTS[0])
