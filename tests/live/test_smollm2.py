"""SmolLM2-135M-Instruct, on a real engine: a vocabulary of 49,152 tokens, and the logits of a trained model."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.task_configs import config_for, tasks_of
from models.smollm2.recipe import made
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, Sampling
from tests.live.forward_pass import logprob_differences
from tests.live.services import CONFIG, RUNNING
from tests.paths import SMOLLM2

SAMPLES = 16
NUM_GENERATIONS = 2
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.06, 0.6
"""Of log-probabilities in bfloat16 from those in float32."""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    made(Console(stderr=True))
    url = RUNNING.url("smollm2", lambda: config_for(CONFIG, SMOLLM2, tasks_of(SMOLLM2)))
    with RolloutClient(url) as rollout_client:
        yield rollout_client


@pytest.fixture(scope="module")
def response(client: RolloutClient) -> RolloutResponse:
    samples = [one for task in tasks_of(SMOLLM2) for one in client.example_samples(task, SAMPLES, seed=3)]
    sampling = Sampling(temperature=1.0, max_new_tokens=64, seed=1)
    return client.rollout(samples, num_generations=NUM_GENERATIONS, sampling=sampling)


def test_its_prompts_are_those_of_its_chat_template(response: RolloutResponse) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2)
    for rollout in response.samples:
        prompt = rollout.message_log[:-2]  # The rest is the reply, and what the environment says of it.
        messages = [{"role": message.role, "content": message.content} for message in prompt]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert [token_id for message in prompt for token_id in message.token_ids] == rendered


def test_it_ends_its_turns_and_gets_some_of_each_task_right_and_not_all(response: RolloutResponse) -> None:
    for task_name, rollouts in groupby(response.samples, key=lambda rollout: rollout.task_name):
        rewards = [rollout.total_reward for rollout in rollouts]
        assert len(rewards) == SAMPLES * NUM_GENERATIONS
        assert {0.0, 1.0} == set(rewards), task_name
    ended = [rollout.message_log[-2].finish_reason == "stop" for rollout in response.samples]
    assert sum(ended) > len(ended) / 2


def test_its_log_probabilities_are_those_of_transformers_in_float32(response: RolloutResponse) -> None:
    version = str(response.policy.newest)
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    differences = logprob_differences(response.samples, {version: model.eval()})[version]
    assert len(differences) > 1000
    assert differences.mean().item() <= MEAN_DIFFERENCE
    assert differences.max().item() <= LARGEST_DIFFERENCE
