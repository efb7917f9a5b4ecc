"""Replicas killed in the middle of 64 games: none is lost, and under greedy decoding none is changed."""

import threading
import time

import psutil
import pytest

from rollout_client import RolloutClient
from rollout_client.contract import RolloutResponse, Sampling
from tests.live.running_service import replicas

GREEDY = Sampling(greedy=True, max_new_tokens=32)


def play(client: RolloutClient) -> RolloutResponse:
    games = client.example_samples("sliding_puzzle", 64, seed=11)
    return client.rollout(games, sampling=GREEDY, max_rollout_turns=8, sample_retries=8)


@pytest.mark.parametrize("deployment", ["sliding_puzzle", "Generator"])
def test_a_killed_replica_costs_no_sample_and_changes_none(client: RolloutClient, deployment: str) -> None:
    undisturbed = play(client)
    [killed] = replicas(deployment)
    killer = threading.Timer(0.7, killed.kill)
    killer.start()
    started = time.monotonic()
    disturbed = play(client)
    assert time.monotonic() - started > 0.7, "the games were over before the replica was killed"
    killer.join()
    assert not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE
    assert [result.status for result in disturbed.samples] == [result.status for result in undisturbed.samples]
    for before, after in zip(undisturbed.samples, disturbed.samples, strict=True):
        assert [message.token_ids for message in after.message_log] == [
            message.token_ids for message in before.message_log
        ]
        assert after.total_reward == before.total_reward
