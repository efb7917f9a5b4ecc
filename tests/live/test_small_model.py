"""The embedded model with tools and thoughts, on a real engine with the parsers of its format."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, Sampling
from tests.live.forward_pass import logprob_differences
from tests.live.played_with_weights import LOGPROB_TOLERANCE
from tests.paths import SMALL_MODEL

SAMPLES = 16
SOLVED_SHARE = 0.2
"""Of greedy rollouts. A model that has not learnt a skill solves none."""
FILLER_TOKENS = 15_000
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def client(small_client: RolloutClient) -> RolloutClient:
    return small_client


@pytest.fixture(scope="module")
def with_tools(client: RolloutClient) -> RolloutResponse:
    samples = [one for task in ("tool_calls", "retrieval") for one in client.example_samples(task, SAMPLES, seed=3)]
    return client.rollout(samples, sampling=Sampling(greedy=True, max_new_tokens=192), max_rollout_turns=6)


def assert_as_by_transformers(response: RolloutResponse) -> None:
    version = str(response.policy.newest)
    model: Any = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.bfloat16)
    differences = logprob_differences(response.samples, {version: model.eval()})[version]
    assert differences.mean().item() <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("task_name", ["tool_calls", "retrieval"])
def test_it_calls_tools_and_answers_from_their_results(with_tools: RolloutResponse, task_name: str) -> None:
    rollouts = [sample for sample in with_tools.samples if sample.task_name == task_name]
    solved = [sample for sample in rollouts if sample.total_reward == 1.0]
    assert len(solved) / SAMPLES > SOLVED_SHARE
    for sample in solved:
        [call, result] = next(pair for pair in pairwise(sample.message_log) if pair[1].role == "tool")
        assert call.tool_calls is not None
        assert result.tool_call_id == call.tool_calls[0]["id"]


def test_its_thoughts_are_parsed_beside_the_text(client: RolloutClient) -> None:
    samples = client.example_samples("math", SAMPLES, seed=3)
    played = client.rollout(samples, sampling=Sampling(greedy=True, max_new_tokens=192)).samples
    replies = [message for one in played for message in one.message_log if message.role == "assistant"]
    thoughts = [reply for reply in replies if reply.reasoning_content]
    assert len(thoughts) > SAMPLES / 2
    assert all(f"<think>{reply.reasoning_content}</think>" in reply.content for reply in thoughts)


def test_log_probabilities_over_turns_with_tools_are_those_of_transformers(client: RolloutClient) -> None:
    samples = client.example_samples("retrieval", SAMPLES, seed=4)
    response = client.rollout(samples, sampling=Sampling(max_new_tokens=192, seed=1), max_rollout_turns=6)
    assert_as_by_transformers(response)


def test_a_prompt_of_nearly_all_its_context_has_transformers_logprobs(client: RolloutClient) -> None:
    message = {"role": "user", "content": f"{'. ' * (FILLER_TOKENS // 2)}What is 2 + 3?"}
    sample = {"task_name": "math", "messages": [message], "extra_env_info": {"ground_truth": "5"}}
    response = client.rollout([sample], sampling=Sampling(max_new_tokens=16, seed=1))
    assert len(response.samples[0].message_log[0].token_ids) > FILLER_TOKENS
    assert_as_by_transformers(response)
