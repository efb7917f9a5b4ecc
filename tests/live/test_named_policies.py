"""Several policies at once on the running service: which weights make the tokens of each, and what ends one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.reference_model import State, merged
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import Sampling
from rollout_client.errors import RequestRejected
from tests.live.forward_pass import adapter_folder, perturbed, tiny_state
from tests.live.played_with_weights import assert_of_weights, play, versions_of, wait_until_generating

NAMES = ("run-a", "run-b", "run-c")
"""One more than the engine takes in one batch."""


@pytest.fixture(scope="module")
def base() -> State:
    return perturbed(41)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """An adapter for each name, and what it adds to the weights."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: (root / name, adapter_folder(root / name, seed)) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module", autouse=True)
def served(client: RolloutClient, base: State, folders: dict[str, tuple[Path, State]]) -> Iterator[None]:
    """All of them, over `base`. Pushing other full weights at the end drops them."""
    client.push_weights(base)
    for name, (folder, _) in folders.items():
        update = client.push_weights(folder, kind="adapter", name=name)
        assert [(replica.status, replica.pause_s) for replica in update.replicas] == [("swapped", 0.0)]
    yield
    client.push_weights(tiny_state())
    assert [state.current for state in client.policy.state().named if state.name in NAMES] == [None] * 3


def current(client: RolloutClient, name: str) -> str:
    [state] = [state for state in client.policy.state().named if state.name == name]
    return f"{name}/{state.current}"


def test_rollouts_of_several_policies_at_once_have_the_tokens_of_their_own(
    client: RolloutClient, base: State, folders: dict[str, tuple[Path, State]]
) -> None:
    version = client.policy.state().current
    with ThreadPoolExecutor(4) as threads:
        playing = {name: threads.submit(play, client, policy={"name": name}) for name in NAMES}
        unnamed = threads.submit(play, client)
        responses = {name: response.result() for name, response in playing.items()}
    assert_of_weights(unnamed.result().samples, version, base)
    for name, response in responses.items():
        label = current(client, name)
        assert_of_weights(response.samples, label, merged(base, folders[name][1]))
        assert (response.policy.oldest, response.policy.newest, response.policy.current) == (label, label, label)


def test_a_version_is_demanded_and_scored_by_its_name(client: RolloutClient) -> None:
    label = current(client, "run-b")
    number = int(label.rpartition("/")[2])
    scored = client.score([[5, 17, 8, 31]], policy={"name": "run-b", "version": number})
    other = client.score([[5, 17, 8, 31]], policy={"name": "run-a"})
    assert (scored.scores[0].weight_version, scored.policy.newest) == (label, label)
    assert scored.scores[0].logprobs != other.scores[0].logprobs
    with pytest.raises(RequestRejected, match=f"version {number} is current") as rejected:
        play(client, 1, policy={"name": "run-b", "min_version": number + 1, "wait_s": 0.1})
    assert rejected.value.problem.status == 409


def test_a_completion_is_made_by_the_policy_and_version_in_its_address(client: RolloutClient, service_url: str) -> None:
    label, sequence = current(client, "run-b"), [5, 17, 8, 31]
    number = int(label.rpartition("/")[2])
    address = f"{service_url}/v1/completions?policy=run-b"
    body = {"prompt": sequence, "echo": True, "logprobs": 0, "max_tokens": 1}
    [choice] = httpx.post(f"{address}&version={number}", json=body, timeout=60).raise_for_status().json()["choices"]
    assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 1}]
    [scored] = client.score([sequence], policy={"name": "run-b"}).scores
    assert scored.logprobs is not None
    assert choice["logprobs"]["token_logprobs"][1:4] == pytest.approx(scored.logprobs[1:], abs=0.06)
    unknown = httpx.post(f"{service_url}/v1/completions?policy=run-d", json=body, timeout=60)
    assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:rollout:problem:policy-unknown")


def test_a_dropped_policy_ends_the_rollouts_that_need_more_of_it(client: RolloutClient, tmp_path: Path) -> None:
    adapter_folder(tmp_path / "adapter", seed=5)
    label = client.push_weights(tmp_path / "adapter", kind="adapter", name="run-e").label
    samples = client.example_samples("sliding_puzzle", 8, seed=3)
    sampling = Sampling(max_new_tokens=64, ignore_eos=True)
    with ThreadPoolExecutor(1) as thread:
        options: dict[str, Any] = {"sampling": sampling, "max_rollout_turns": 8, "policy": {"name": "run-e"}}
        playing = thread.submit(client.rollout, samples, **options)
        wait_until_generating(playing, 8)
        client.policy.drop("run-e")
        results = playing.result().samples
    errors = [result.error for result in results if result.error is not None]
    assert [(error.kind, error.retryable) for error in errors] == [("policy", False)] * 8
    assert versions_of(results) == {label}
    with pytest.raises(RequestRejected, match=f"the policy was dropped after {label}"):
        play(client, 1, policy={"name": "run-e"})
