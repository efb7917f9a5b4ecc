"""Weights that a trainer sends straight into the engines of the running service, over gloo."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from requests import HTTPError

from rollout_client import RolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from tests.live.forward_pass import float32_model_of, logprob_differences, model_of, perturbed
from tests.live.played_with_weights import CHECKSUMS_WITHIN_S, SAME_WEIGHTS_TOLERANCE, assert_of_weights, play
from tests.live.running_transfer import ConnectedTrainer

pytestmark = pytest.mark.usefixtures("leaves_the_original_weights")


def saved(client: RolloutClient, version: int) -> str:
    """Returns the checksum of a transferred version once the policy store has its weights."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        [info] = [info for info in client.policy.state().versions if info.version == version]
        if info.checksum is not None:
            return info.checksum
        time.sleep(0.1)
    raise TimeoutError(f"version {version} was not saved")


def test_a_transfer_its_saved_version_and_an_equal_push_make_equal_engines(client: RolloutClient) -> None:
    before = client.policy.state(CHECKSUMS_WITHIN_S)
    state = perturbed(32)
    ConnectedTrainer(client, model_of(state)).send_weights()
    version = before.current + 1
    checksum = saved(client, version)
    transferred = client.policy.state(CHECKSUMS_WITHIN_S)
    assert (transferred.versions[-1].version, transferred.versions[-1].kind) == (version, "transfer")
    assert transferred.current == version
    client.push_weights(perturbed(45))
    assert client.policy.rollback(version).checksum == checksum
    back = client.policy.state(CHECKSUMS_WITHIN_S)
    assert client.push_weights(state).checksum == checksum
    pushed = client.policy.state(CHECKSUMS_WITHIN_S)
    engines = [[replica.checksum for replica in policy.replicas] for policy in (transferred, back, pushed)]
    assert engines == [engines[0]] * 3
    assert transferred.replicas[0].checksum not in (None, before.replicas[0].checksum)


def test_one_connection_carries_each_step_and_numbers_go_up(client: RolloutClient) -> None:
    before = client.policy.state()
    model = model_of(perturbed(33))
    engine = ConnectedTrainer(client, model)
    versions = []
    for seed in (34, 35):
        model.load_state_dict(perturbed(seed), strict=False)
        engine.send_weights()
        versions.append(client.policy.state().current)
    assert versions == [before.current + 1, before.current + 2]
    assert_of_weights(play(client).samples, versions[-1], perturbed(35))


def test_a_transfer_during_rollouts_loses_none_and_tokens_name_weights(client: RolloutClient) -> None:
    old, new = perturbed(36), perturbed(37)
    before = client.push_weights(old).version
    engine = ConnectedTrainer(client, model_of(new))
    # Hot enough to babble: most generations are long, and many are under way when the weights change.
    sampling = Sampling(temperature=1.5, max_new_tokens=96)
    results: list[SampleResult] = []
    with client.stream(
        client.example_samples("sliding_puzzle", 48, seed=3), sampling=sampling, max_rollout_turns=4
    ) as rollouts:
        results.append(next(iter(rollouts)))
        engine.send_weights()
        results.extend(rollouts)
    assert [result.error for result in results] == [None] * 48
    models = {str(before): float32_model_of(old), str(before + 1): float32_model_of(new)}
    for version, difference in logprob_differences(results, models, temperature=1.5).items():
        assert len(difference) > 500, f"hardly a token is of version {version}"
        assert difference.mean().item() <= SAME_WEIGHTS_TOLERANCE


@pytest.mark.parametrize("sent", [7, pytest.param(0, marks=pytest.mark.long)])
def test_replicas_go_back_in_place_when_the_trainer_falls_silent(client: RolloutClient, sent: int) -> None:
    """Before the first tensor, or in the middle of a layer."""
    state = perturbed(40)
    version = client.push_weights(state).version
    before = client.policy.state(CHECKSUMS_WITHIN_S)
    trainer = ConnectedTrainer(client, model_of(perturbed(41)))
    trainer.calls.start_weight_update()
    with ThreadPoolExecutor(2) as threads:
        playing = threads.submit(play, client)
        receiving = threads.submit(trainer.calls.update_weights, trainer.update_info)
        trainer.endpoint.send(islice(trainer.source, sent), receiving)
        with pytest.raises(HTTPError) as refused:
            receiving.result()
        assert refused.value.response is not None
        said = refused.value.response.json()["error"]["message"]
        assert re.search(r"go back to the weights before it: .*the trainer sent nothing for 5 s", said)
        assert_of_weights(playing.result().samples, version, state)
    after = client.policy.state(CHECKSUMS_WITHIN_S)
    assert (after.current, after.replicas) == (version, before.replicas)
    sent_state = perturbed(42)
    ConnectedTrainer(client, model_of(sent_state)).send_weights()
    assert_of_weights(play(client).samples, version + 1, sent_state)
