"""Versions that are published in the folder that the running service follows."""

import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import save

from rollout_client import RolloutClient
from service.startup.processes import wait_for_ends
from tests.deployments.policy.published_files import publish_delta, publish_whole
from tests.live.forward_pass import perturbed, tiny_state
from tests.live.played_with_weights import assert_of_weights, play, versions_of
from tests.live.running_service import replicas

pytestmark = pytest.mark.usefixtures("leaves_the_original_weights")

REFUSED_WITHIN_S = 60.0
GONE_WITHIN_S = 60.0


def next_version(client: RolloutClient) -> int:
    version = client.policy.state().next_version
    assert version is not None
    return version


def test_a_published_checkpoint_and_delta_are_used_if_whole(client: RolloutClient, followed_folder: Path) -> None:
    first = next_version(client)
    states = [tiny_state(), perturbed(51), perturbed(52)]
    publish_whole(followed_folder, first, save(states[1]))
    played = play(client, policy={"min_version": first})
    assert_of_weights(played.samples, first, states[1], before=states[0])

    publish_delta(followed_folder, first + 1, save(states[1]), save(states[2]), "overwrite", "blake3")
    played = play(client, policy={"min_version": first + 1})
    assert_of_weights(played.samples, first + 1, states[2], before=states[1])

    damaged = publish_delta(followed_folder, first + 2, save(states[1]), save(states[0]))
    deadline = time.monotonic() + REFUSED_WITHIN_S
    while not (state := client.info().follow) or not state.refused:
        assert time.monotonic() < deadline, str(state)
        time.sleep(0.2)
    [refused] = state.refused
    assert (refused.version, state.taken, state.newest) == (first + 2, first + 1, first + 2)
    assert "damaged, or of other weights than the base" in refused.reason
    assert versions_of(play(client, count=8).samples) == {str(first + 1)}
    shutil.rmtree(damaged)


@pytest.mark.long
def test_a_killed_replica_comes_back_with_the_folders_newest(client: RolloutClient, followed_folder: Path) -> None:
    version, state = next_version(client), perturbed(53)
    publish_whole(followed_folder, version, save(perturbed(54)))
    play(client, count=1, policy={"min_version": version})
    [killed] = replicas("Generator")
    below = killed.children(recursive=True)
    killed.kill()
    publish_delta(followed_folder, version + 1, save(perturbed(54)), save(state))
    played = play(client, policy={"min_version": version + 1}, sample_retries=8)
    assert wait_for_ends([killed, *below], GONE_WITHIN_S) == []
    assert_of_weights(played.samples, version + 1, state, before=perturbed(54))
