"""Two generators: conversations find their prefix, the load is even, and both hold the same weights come what may."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ServeDeploySchema

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleInput, Sampling
from tests.live.forward_pass import model_of, perturbed
from tests.live.played_with_weights import CHECKSUMS_WITHIN_S, assert_of_weights, play
from tests.live.running_service import READY_WITHIN_S, replicas, scale
from tests.live.running_transfer import ConnectedTrainer

REPLICAS = 2
TURNS = 5
PROMPT_TOKENS = 520
CACHE_BLOCK_TOKENS = 128
FOUND_A_TURN = PROMPT_TOKENS // CACHE_BLOCK_TOKENS * CACHE_BLOCK_TOKENS
"""At least: the cache knows whole blocks only."""
FEW_NEW = Sampling(temperature=2.0, max_new_tokens=4, ignore_eos=True)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def version(client: RolloutClient, service_config: ServeDeploySchema) -> int:
    """The current one: a trainer sent it into the first replica, the second has started with what was saved of it."""
    ConnectedTrainer(client, model_of(perturbed(14))).send_weights()
    scale(service_config, "Generator", REPLICAS)
    sent = client.policy.state().current
    wait_for_replicas(client, REPLICAS, sent)
    return sent


def wait_for_replicas(client: RolloutClient, count: int, version: int) -> None:
    """Once `count` replicas, and no other, hold `version`."""
    waited = threading.Event()
    for _ in range(int(READY_WITHIN_S)):
        state = client.policy.state()
        if [replica.version for replica in state.replicas] == [version] * count:
            return
        waited.wait(1.0)
    pytest.fail(f"{count} replicas at version {version} are wanted, and these there are: {state.replicas}")


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


def of_each_replica(client: RolloutClient, method: str) -> dict[str, Any]:
    """By replica, what it returns for a call of the method."""
    handle: Any = serve.get_deployment_handle("Generator", app_name="rollout")
    names = [replica.replica_id for replica in client.policy.state().replicas]
    return {name: getattr(handle.options(session_id=name), method).remote().result() for name in names}


def cached_tokens(client: RolloutClient) -> dict[str, tuple[int, int]]:
    return of_each_replica(client, "prefix_cache_tokens")


def ongoing_generations(client: RolloutClient) -> list[int]:
    return list(of_each_replica(client, "ongoing_generations").values())


def played(client: RolloutClient, samples: list[SampleInput], num_generations: int = 1) -> tuple[list[int], list[int]]:
    """Of each replica, the tokens looked up and found while the samples were played."""
    before = cached_tokens(client)
    response = client.rollout(samples, num_generations=num_generations, sampling=FEW_NEW, max_rollout_turns=TURNS)
    assert [sample.metrics.turn_count for sample in response.samples] == [TURNS] * len(samples) * num_generations
    after = cached_tokens(client)
    looked_up = [now[0] - before[name][0] for name, now in after.items()]
    found = [now[1] - before[name][1] for name, now in after.items()]
    return looked_up, found


def test_each_later_turn_finds_its_prefix_and_replicas_get_as_much(client: RolloutClient) -> None:
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


def assert_equal_engines(client: RolloutClient) -> None:
    [checksum] = {replica.checksum for replica in client.policy.state(CHECKSUMS_WITHIN_S).replicas}
    assert checksum is not None


def test_a_replica_that_started_after_a_transfer_has_its_weights(client: RolloutClient, version: int) -> None:
    assert_equal_engines(client)
    assert_of_weights(play(client, 64).samples, version, perturbed(14))


def test_a_replica_that_dies_during_an_update_returns_with_new_weights(client: RolloutClient, version: int) -> None:
    old, young = replicas("Generator")
    sampling = Sampling(temperature=2.0, max_new_tokens=800, ignore_eos=True)
    with client.stream(client.example_samples("math", 128, seed=6), sampling=sampling, sample_retries=20) as rollouts:
        with ThreadPoolExecutor(1) as thread:
            # It waits for the generations under way, so that it is under way itself when the replica dies.
            while sum(ongoing_generations(client)) < 64:
                time.sleep(0.01)
            pushing = thread.submit(client.push_weights, perturbed(15), mode="wait")
            while client.policy.state().updating_to != version + 1:
                time.sleep(0.01)
            old.kill()
            update = pushing.result()
        results = list(rollouts)
    assert sorted(replica.status for replica in update.replicas) == ["replaced", "swapped"]
    assert [result.error for result in results] == [None] * 128
    wait_for_replicas(client, REPLICAS, version + 1)
    assert_equal_engines(client)
    # Now the newest has to play, and one more takes the place of this one.
    young.kill()
    assert_of_weights(play(client, 64, sample_retries=20).samples, version + 1, perturbed(15))
    wait_for_replicas(client, REPLICAS, version + 1)


def test_a_replica_shut_down_hands_generations_over(client: RolloutClient, service_config: ServeDeploySchema) -> None:
    """The last test: it leaves one replica."""
    # A replica that the store knows may not take generations yet.
    looked_up = list[int]()
    while len(looked_up) < REPLICAS or len(set(looked_up)) > 1:
        time.sleep(0.1)
        looked_up, _ = played(client, conversations(2 * REPLICAS, first_id=3000))
    rollouts, tokens = 8, 3000
    before = cached_tokens(client)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(
            client.rollout,
            conversations(rollouts, first_id=2000),
            sampling=Sampling(temperature=1.0, max_new_tokens=tokens, ignore_eos=True),
            max_rollout_turns=1,
            # A generation that is lost with its tokens fails its rollout.
            sample_retries=0,
        )
        while sum(ongoing_generations(client)) < rollouts and not playing.done():
            time.sleep(0.05)
        scale(service_config, "Generator", 1)
        results = playing.result().samples

    assert [(each.status, each.metrics.turn_gen_tokens) for each in results] == [("max_turns", [tokens])] * rollouts
    for response in [result.message_log[1] for result in results]:
        assert len(response.token_ids) == len(response.generation_logprobs or []) == tokens
        assert [(span.start, span.end) for span in response.weight_versions or []] == [(0, tokens)]
    [(name, after)] = cached_tokens(client).items()
    # The other replica's tokens have come to this one as parts of prompts.
    assert after[0] - before[name][0] > rollouts * PROMPT_TOKENS
