"""Replicas killed in the middle of 64 games: none is lost, and under greedy decoding none is changed."""

import time
from concurrent.futures import ThreadPoolExecutor

from ray import serve
from ray.serve._private.common import ReplicaState

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, Sampling
from service.startup.processes import wait_for_ends
from tests.live.running_service import controller, ended_generations, replicas

GONE_WITHIN_S = 60.0
GREEDY = Sampling(greedy=True, max_new_tokens=32)


def play(client: RolloutClient) -> RolloutResponse:
    games = client.example_samples("sliding_puzzle", 64, seed=11)
    return client.rollout(games, sampling=GREEDY, max_rollout_turns=8, sample_retries=8)


def test_a_killed_generator_costs_no_sample_and_changes_none(client: RolloutClient) -> None:
    undisturbed = play(client)
    [killed] = replicas("Generator")
    # Its engine: what would outlive it keeps its cores and memory from the next one.
    below = killed.children(recursive=True)
    with ThreadPoolExecutor(1) as thread:
        ended, turns = ended_generations(), sum(result.metrics.turn_count for result in undisturbed.samples)
        playing = thread.submit(play, client)
        while ended_generations() - ended < turns / 4:
            assert not playing.done()
            time.sleep(0.02)
        killed.kill()
        assert not playing.done(), "the games were over before the replica was killed"
        disturbed = playing.result()
    assert wait_for_ends([killed, *below], GONE_WITHIN_S) == []
    assert [result.status for result in disturbed.samples] == [result.status for result in undisturbed.samples]
    for before, after in zip(undisturbed.samples, disturbed.samples, strict=True):
        assert [each.token_ids for each in after.message_log] == [each.token_ids for each in before.message_log]
        assert after.total_reward == before.total_reward


def all_replicas_run() -> bool:
    """Waits while the controller restarts."""
    deployments = serve.status().applications["rollout"].deployments.values()
    return all(set(deployment.replica_states) == {ReplicaState.RUNNING} for deployment in deployments)


def test_a_killed_controller_is_replaced_and_keeps_the_replicas(client: RolloutClient) -> None:
    before = [replicas(deployment) for deployment in ("Ingress", "Generator", "sliding_puzzle")]
    killed = controller()
    killed.kill()
    wait_for_ends([killed], GONE_WITHIN_S)
    assert {result.status for result in play(client).samples} <= {"completed", "max_turns", "truncated"}
    while not all_replicas_run():
        time.sleep(0.5)
    assert [replicas(deployment) for deployment in ("Ingress", "Generator", "sliding_puzzle")] == before
