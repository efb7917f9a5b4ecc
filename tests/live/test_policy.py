"""New weights for the running service: what every token is of then, and what refuses to become current."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from benchmarks.reference_model import merged
from rollout_client import PolicyPusher, RequestRejected, RolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from rollout_client.weights.checksum import Checksum
from tests.live.following_environment import following
from tests.live.forward_pass import (
    adapter_folder,
    differences_where_weights_change,
    float32_model_of,
    logprob_differences,
    model_of,
    perturbed,
    tiny_state,
)
from tests.live.played_with_weights import (
    CHECKSUMS_WITHIN_S,
    SAME_WEIGHTS_TOLERANCE,
    assert_of_weights,
    play,
    versions_of,
    wait_until_generating,
)
from tests.live.running_service import replicas

pytestmark = pytest.mark.usefixtures("leaves_the_original_weights")

NORM = "model.norm.weight"
BABBLING = Sampling(temperature=1.5, max_new_tokens=96, ignore_eos=True)
"""Hot enough for long generations."""


def put(client: RolloutClient, version: int, **options: Any) -> httpx.Response:
    return httpx.put(f"{client.base_url}/policy/versions/{version}", timeout=60, **options)


def next_version(client: RolloutClient) -> int:
    return client.policy.state().current + 1


def test_after_a_push_every_token_is_of_the_new_weights(client: RolloutClient) -> None:
    state = perturbed(1)
    before = client.policy.state()
    update = client.push_weights(state)
    assert update.version == before.current + 1
    assert [replica.status for replica in update.replicas] == ["swapped"]
    played = play(client)
    assert_of_weights(played.samples, update.version, state, before=tiny_state())
    said = str(update.version)
    assert (played.policy.oldest, played.policy.newest, played.policy.current) == (said, said, said)


def test_the_policy_says_what_is_current_and_what_each_replica_holds(client: RolloutClient) -> None:
    state = perturbed(2)
    before = client.policy.state(CHECKSUMS_WITHIN_S)
    update = client.push_weights(state)
    after = client.policy.state(CHECKSUMS_WITHIN_S)
    checksum = Checksum()
    for name, tensor in state.items():
        checksum.add(name, "BF16", tensor.shape, [tensor.contiguous().view(torch.uint8).numpy().tobytes()])
    assert (after.current, after.updating_to) == (update.version, None)
    assert after.versions[-1].version == update.version
    assert after.versions[-1].checksum == update.checksum == checksum.hexdigest()
    assert [replica.version for replica in after.replicas] == [update.version]
    assert after.replicas[0].checksum not in (None, before.replicas[0].checksum)


def test_a_push_during_64_rollouts_loses_none_and_tokens_name_weights(client: RolloutClient) -> None:
    old, new = perturbed(5), perturbed(6)
    before = client.push_weights(old).version
    games = client.example_samples("sliding_puzzle", 64, seed=3)
    # Hot enough to babble: most generations are long, and many are under way when the weights change.
    sampling = Sampling(temperature=1.5, max_new_tokens=96)
    results: list[SampleResult] = []
    with client.stream(games, sampling=sampling, max_rollout_turns=4) as rollouts:
        results.append(next(iter(rollouts)))
        after = client.push_weights(new).version
        results.extend(rollouts)
    assert [result.error for result in results] == [None] * 64
    weights = {str(before): old, str(after): new}
    models = {version: float32_model_of(state) for version, state in weights.items()}
    differences = logprob_differences(results, models, temperature=1.5)
    for version, difference in differences.items():
        assert len(difference) > 500, f"hardly a token is of version {version}"
        assert difference.mean().item() <= SAME_WEIGHTS_TOLERANCE
    cut = [m for result in results for m in result.message_log if len(m.weight_versions or ()) == 2]
    assert len(cut) > 20, "hardly a generation was under way when the weights changed"
    for message in cut:
        [first, second] = message.weight_versions or []
        assert (first.version, first.start, second.version) == (str(before), 0, str(after))
        assert (second.start, second.end) == (first.end, len(message.token_ids))
    models = {version: model_of(state) for version, state in weights.items()}
    own, other = differences_where_weights_change(results, models, temperature=1.5).median(dim=0).values
    assert (own < other / 5).all()
    assert (rollouts.summary.policy.oldest, rollouts.summary.policy.newest) == (str(before), str(after))


@pytest.mark.parametrize(("mode", "goes_on"), [("wait", False), ("abort", True)])
def test_generations_are_awaited_or_go_on_with_the_new_weights(client: RolloutClient, mode: Any, goes_on: bool) -> None:
    before = client.policy.state().current
    # When the first one's single turn is over, the others have five to go.
    samples = [following({"observation": "."})] + [following(*[{"observation": "."}] * 6)] * 15
    sampling = Sampling(max_new_tokens=48, ignore_eos=True)
    results: list[SampleResult] = []
    # No retries: what an update interrupts is nobody's failure.
    with client.stream(samples, sampling=sampling, sample_retries=0) as rollouts:
        results.append(next(iter(rollouts)))
        after = client.push_weights(perturbed(7), mode=mode).version
        results.extend(rollouts)
    assert [result.error for result in results] == [None] * 16
    generated = [m for result in results for m in result.message_log if m.generation_logprobs is not None]
    assert {len(m.token_ids) for m in generated} == {48}
    of_both = [spans for m in generated if len(spans := m.weight_versions or []) > 1]
    assert bool(of_both) == goes_on
    for first, second in of_both:
        assert (first.version, first.start, second.version) == (str(before), 0, str(after))
        assert (second.start, second.end) == (first.end, 48)
    assert versions_of(results) == {str(before), str(after)}


def test_the_service_reads_a_checkpoint_under_its_roots(client: RolloutClient, checkpoint_root: Path) -> None:
    state = perturbed(9)
    folder = checkpoint_root / "step-1"
    folder.mkdir()
    names = sorted(state)
    # In two files, as large models are.
    save_file({name: state[name] for name in names[:20]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[20:]}, folder / "model-00002-of-00002.safetensors")
    update = client.load_checkpoint(folder)
    assert_of_weights(play(client).samples, update.version, state)


def test_what_changed_can_be_pushed_alone(client: RolloutClient) -> None:
    state = perturbed(10)
    pusher = PolicyPusher(client)
    full = pusher.push(state)
    changed = {**state, NORM: state[NORM] * 1.5}
    delta = pusher.push(changed)
    kinds = {stored.version: (stored.kind, stored.base) for stored in client.policy.state().versions}
    assert kinds[full.version] == ("full", None)
    assert kinds[delta.version] == ("delta", full.version)
    assert_of_weights(play(client).samples, delta.version, changed)


def test_an_upload_goes_on_where_it_broke_off(client: RolloutClient) -> None:
    state = perturbed(11)
    data = save(state)
    version = next_version(client)
    first, second = data[:1_000_000], data[1_000_000:]

    def put_chunk(content: bytes, begin: int) -> httpx.Response:
        span = f"bytes {begin}-{begin + len(content) - 1}/{len(data)}"
        return put(client, version, content=content, headers={"content-range": span})

    assert put_chunk(first, 0).status_code == 202
    misplaced = put_chunk(second[5:], 1_000_005)
    assert misplaced.status_code == 409
    assert "1000000 bytes have arrived; go on from there" in misplaced.json()["detail"]
    replicas("Policy")[0].kill()
    client.wait_until_ready()
    arrived = httpx.get(f"{client.base_url}/policy/versions/{version}/upload", timeout=60)
    while arrived.status_code == 503:
        arrived = httpx.get(f"{client.base_url}/policy/versions/{version}/upload", timeout=60)
    state_of_upload = arrived.json()
    assert state_of_upload["received_bytes"] == 1_000_000
    assert put_chunk(second, 1_000_000).status_code == 200
    assert_of_weights(play(client).samples, version, state)


def test_an_adapter_is_a_version_on_top_of_the_full_weights(client: RolloutClient, tmp_path: Path) -> None:
    state = perturbed(12)
    base = client.push_weights(state).version
    added = adapter_folder(tmp_path / "adapter", seed=1, prefix="module.base_model.model.")
    update = client.push_weights(tmp_path / "adapter", kind="adapter", base=base)
    assert (update.base, update.warnings) == (base, [])
    assert_of_weights(play(client).samples, update.version, merged(state, added))
    full = client.push_weights(state)
    assert_of_weights(play(client).samples, full.version, state)


def test_generations_end_with_their_adapter_after_newer_ones_have_come(client: RolloutClient, tmp_path: Path) -> None:
    base = perturbed(16)
    client.push_weights(base)
    added = [adapter_folder(tmp_path / str(seed), seed) for seed in range(4)]
    first = client.push_weights(tmp_path / "0", kind="adapter").version
    with ThreadPoolExecutor(1) as thread:
        sampling = Sampling(max_new_tokens=400, ignore_eos=True)
        playing = thread.submit(client.rollout, client.example_samples("math", 16), sampling=sampling, sample_retries=0)
        wait_until_generating(playing, 16)
        # More than the engine has room for.
        for seed in (1, 2, 3):
            client.push_weights(tmp_path / str(seed), kind="adapter")
        assert not playing.done()
        results = playing.result().samples
    assert [result.error for result in results] == [None] * 16
    assert_of_weights(results, first, merged(base, added[0]))


def test_a_rollout_waits_for_the_weights_that_it_demands(client: RolloutClient) -> None:
    version = next_version(client)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(play, client, 4, policy={"min_version": version})
        client.push_weights(perturbed(13))
        assert versions_of(waiting.result().samples) == {str(version)}


def test_an_update_cuts_off_stale_rollouts_and_fails_demands_of_the_old(client: RolloutClient) -> None:
    before = client.push_weights(perturbed(14)).version
    samples = [following(*[{"observation": "."}] * 10)] * 16
    sampling = Sampling(max_new_tokens=48, ignore_eos=True)
    results: dict[str, list[SampleResult]] = {}
    with ThreadPoolExecutor(2) as threads:
        demands = {"stale": {"max_staleness": 0}, "exact": {"version": before}}
        playing = {
            name: threads.submit(client.rollout, samples, sampling=sampling, policy=demand)
            for name, demand in demands.items()
        }
        with client.stream([following({"observation": "."})], sampling=sampling) as first:
            list(first)
        client.push_weights(perturbed(15))
        results = {name: rollouts.result().samples for name, rollouts in playing.items()}
    assert versions_of(results["exact"]) == {str(before)}
    assert [result.status for result in results["stale"]] == ["stale"] * 16
    assert {result.total_reward for result in results["exact"]} == {None}
    errors = [result.error for result in results["exact"] if result.error is not None]
    assert {(error.kind, error.retryable) for error in errors} == {("policy", False)}
    assert len(errors) == 16
    metrics = playing["stale"].result().metrics
    assert metrics == {"histogram/staleness": [], "stale_rate": 1.0}


def test_a_version_that_the_engine_refuses_costs_no_sample_and_no_replica(client: RolloutClient) -> None:
    good = perturbed(41)
    client.push_weights(good)
    before = client.policy.state(CHECKSUMS_WITHIN_S)
    games = client.example_samples("sliding_puzzle", 32, seed=3)
    # No retries: what a trial interrupts is nobody's failure.
    options: dict[str, Any] = {"sampling": BABBLING, "max_rollout_turns": 4, "sample_retries": 0}
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(client.rollout, games, **options)
        # Finite, which the checks accept; the logits are infinite.
        overflowing = tiny_state() | {NORM: torch.full((128,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)}
        with pytest.raises(RequestRejected, match="could not generate with them and went back: GenerationNotFinite"):
            client.push_weights(overflowing)
        played = playing.result()
    assert [sample.error for sample in played.samples] == [None] * len(played.samples)
    assert versions_of(played.samples) == {str(before.current)}
    after = client.policy.state(CHECKSUMS_WITHIN_S)
    assert after.current == before.current
    assert [(each.replica_id, each.checksum) for each in after.replicas] == [
        (each.replica_id, each.checksum) for each in before.replicas
    ]
    assert_of_weights(play(client).samples, before.current, good)
