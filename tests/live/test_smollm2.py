"""SmolLM2-135M-Instruct, on a real engine, plain and with drafts: 49,152 tokens, and the logits of a trained model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest
import torch
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.reference_model import model_of, perturbed
from examples.task_configs import config_for, tasks_of
from models.smollm2.recipe import made
from rollout_client import PolicyPusher, RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, Sampling
from tests.live.engines import NGRAM
from tests.live.forward_pass import logprob_differences
from tests.live.played_with_weights import versions_of, wait_until_generating
from tests.live.services import CONFIG, RUNNING
from tests.paths import SMOLLM2

SAMPLES = 16
NUM_GENERATIONS = 2
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 1e-4, 1e-2
"""Of log-probabilities in float32, which every processor computes in minutes."""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[None, NGRAM], ids=["plain", "drafts"])
def client(request: pytest.FixtureRequest) -> Iterator[RolloutClient]:
    made(Console(stderr=True))

    def config() -> ServeDeploySchema:
        config = config_for(CONFIG, SMOLLM2, tasks_of(SMOLLM2))
        config.applications[0].args["engine"] |= {"speculative_config": request.param, "dtype": "float32"}
        return config

    url = RUNNING.url(f"smollm2 {request.param}", config)
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
    assert_near(response, {version: model_of(SMOLLM2, dtype=torch.float32)})


def test_tokens_beside_pushes_are_those_of_the_weights_that_they_name(client: RolloutClient) -> None:
    original = load_file(SMOLLM2 / "model.safetensors")
    half = dict(list(original.items())[::2])
    samples = client.example_samples("larger_number", SAMPLES, seed=4)
    sampling = Sampling(temperature=0.7, max_new_tokens=200, ignore_eos=True)
    before = str(client.policy.state().current)
    states = {before: original}
    with ThreadPoolExecutor(1) as threads:
        pusher = PolicyPusher(client)
        playing = threads.submit(client.rollout, samples, num_generations=2, sampling=sampling)
        wait_until_generating(playing, SAMPLES)
        for seed, part in enumerate((original, half), 1):
            state = original | perturbed(part, seed, 0.03)
            states[str(pusher.push(state).version)] = state
        response = playing.result()
    assert len(versions_of(response.samples)) > 1
    assert_near(response, {name: model_of(SMOLLM2, state, torch.float32) for name, state in states.items()}, 0.7)


def assert_near(response: RolloutResponse, models: dict[str, Any], temperature: float = 1.0) -> None:
    for differences in logprob_differences(response.samples, models, temperature).values():
        assert len(differences) > 100
        assert differences.mean().item() <= MEAN_DIFFERENCE
        assert differences.max().item() <= LARGEST_DIFFERENCE
