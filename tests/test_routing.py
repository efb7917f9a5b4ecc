"""Conversations on several generators: each finds its prefix in the cache, and the load is even. By vLLM's counters."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ServeDeploySchema

from deployments.protocols import PrefixCacheTokens
from rollout_client.client import RolloutClient
from rollout_client.contract import SampleInput, Sampling
from tests.conftest import scale_generators

REPLICAS = 2
TURNS = 5
PROMPT_TOKENS = 520
CACHE_BLOCK_TOKENS = 128
FOUND_A_TURN = PROMPT_TOKENS // CACHE_BLOCK_TOKENS * CACHE_BLOCK_TOKENS
"""At least: the cache knows whole blocks only."""
FEW_NEW = Sampling(temperature=2.0, max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def two_generators(client: RolloutClient, service_config: ServeDeploySchema) -> Iterator[None]:
    scale_generators(service_config, REPLICAS)
    client.wait_until_ready()
    yield
    scale_generators(service_config, 1)


def conversations(prompts: int, first_id: int) -> list[SampleInput]:
    """Prompts of which no two begin with the same tokens, played for all turns."""
    return [
        SampleInput.model_validate(
            {
                "task_name": "following",
                "message_log": [
                    {
                        "role": "user",
                        "content": "",
                        "token_ids": [5 + (first_id + number) // 64, 5 + (first_id + number) % 64]
                        + [7] * (PROMPT_TOKENS - 2),
                    }
                ],
                "extra_env_info": {"turns": [{"observation": "go"}] * TURNS},
            }
        )
        for number in range(prompts)
    ]


def cached_tokens(client: RolloutClient) -> list[PrefixCacheTokens]:
    handle: Any = serve.get_deployment_handle("Generator", app_name="rollout")
    names = [replica.replica_id for replica in client.policy().replicas]
    return [handle.options(session_id=name).prefix_cache_tokens.remote().result() for name in names]


def played(client: RolloutClient, samples: list[SampleInput], num_generations: int = 1) -> tuple[list[int], list[int]]:
    """Of each replica, the tokens looked up and found while the samples were played."""
    before = cached_tokens(client)
    response = client.rollout(samples, num_generations=num_generations, sampling=FEW_NEW, max_rollout_turns=TURNS)
    assert [sample.metrics.turn_count for sample in response.samples] == [TURNS] * len(samples) * num_generations
    after = cached_tokens(client)
    looked_up = [now.looked_up - then.looked_up for then, now in zip(before, after, strict=True)]
    found = [now.found - then.found for then, now in zip(before, after, strict=True)]
    return looked_up, found


def test_each_turn_after_the_first_finds_its_prefix_and_the_replicas_get_as_much(client: RolloutClient) -> None:
    samples = 32
    looked_up, found = played(client, conversations(samples, first_id=0))
    assert sum(found) >= samples * (TURNS - 1) * FOUND_A_TURN
    assert max(looked_up) == min(looked_up)


def test_a_group_finds_the_prompt_that_its_first_has_left(client: RolloutClient) -> None:
    groups, generations = 8, 8
    looked_up, found = played(client, conversations(groups, first_id=1000), generations)
    without_groups = groups * generations * (TURNS - 1) * FOUND_A_TURN
    assert sum(found) > without_groups
    assert max(looked_up) <= 1.5 * min(looked_up)
