"""Versions that cannot be used: each is refused, and rollouts go on without a failed sample meanwhile."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from benchmarks.reference_model import State
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import RolloutResponse, Sampling
from tests.live.forward_pass import adapter_folder, perturbed, tiny_state
from tests.live.played_with_weights import CHECKSUMS_WITHIN_S, assert_of_weights, play, versions_of

LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
NORM = "model.norm.weight"
GOOD = 41


@pytest.fixture(scope="module", autouse=True)
def leaves_the_original_weights(client: RolloutClient) -> Iterator[None]:
    client.push_weights(perturbed(GOOD))
    yield
    client.push_weights(tiny_state())


def overflowing() -> State:
    """Finite weights, which the checks accept; the logits are infinite."""
    state = tiny_state()
    return state | {NORM: torch.full_like(state[NORM], LARGEST_BFLOAT16)}


def push_nan(client: RolloutClient, _folder: Path) -> None:
    state = tiny_state()
    state[NORM][5] = torch.nan
    client.push_weights(state)


def push_overflowing(client: RolloutClient, _folder: Path) -> None:
    client.push_weights(overflowing())


def put(client: RolloutClient, content: bytes) -> None:
    """Sends bytes that the client itself would not send; raises `ValueError` with what the service says of them."""
    version = client.policy.state().current + 1
    answer = httpx.put(f"{client.base_url}/policy/versions/{version}", content=content, timeout=60)
    assert answer.status_code == 422
    raise ValueError(answer.json()["detail"])


def push_cut_short(client: RolloutClient, _folder: Path) -> None:
    put(client, save(tiny_state())[:-3])


def push_dora(client: RolloutClient, folder: Path) -> None:
    """The service knows nothing of it; vLLM refuses it."""
    adapter_folder(folder / "adapter", seed=1, use_dora=True)
    client.push_weights(folder / "adapter", kind="adapter")


def push_adapter_of_no_module(client: RolloutClient, folder: Path) -> None:
    """For an attribute that the model does not have: vLLM itself would load it and generate without it."""
    adapter_folder(folder / "adapter", seed=1, prefix="base_model.model.lm.")
    client.push_weights(folder / "adapter", kind="adapter")


def push_other_shape(client: RolloutClient, _folder: Path) -> None:
    """The file is whole, and as long as one with the right shape."""
    put(client, save(tiny_state() | {NORM: torch.ones(2, 64, dtype=torch.bfloat16)}))


def push_adapter_of_another_model(client: RolloutClient, folder: Path) -> None:
    """Smaller matrices than the model's: vLLM itself would load them."""
    adapter_folder(folder / "adapter", seed=1, width=64)
    client.push_weights(folder / "adapter", kind="adapter")


@pytest.mark.parametrize(
    ("push", "says"),
    [
        (push_nan, "NaN or infinity"),
        (push_cut_short, "it is not whole"),
        (push_other_shape, r"the tensor is BF16 \[2, 64\]; the model has BF16 \[128\]"),
        (push_adapter_of_another_model, r"its shape is \[4, 64\]; model.layers.0.self_attn.o_proj takes \[rank, 128\]"),
        (push_adapter_of_no_module, r"base_model\.model\.lm\..*the model has no module lm\.model\.layers\.0"),
        (push_dora, "the engine cannot take them: .*vLLM does not yet support DoRA"),
        (push_overflowing, "could not generate with them and went back: GenerationNotFinite"),
    ],
)
def test_a_poisoned_version_is_refused_and_no_sample_fails_meanwhile(
    client: RolloutClient, tmp_path: Path, push: Callable[[RolloutClient, Path], None], says: str
) -> None:
    before = client.policy.state(CHECKSUMS_WITHIN_S)
    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(rollouts_under_way, client)
        with pytest.raises(Exception, match=says):
            push(client, tmp_path)
        played = playing.result()
    assert [sample.error for sample in played.samples] == [None] * len(played.samples)
    assert versions_of(played.samples) == {str(before.current)}
    after = client.policy.state(CHECKSUMS_WITHIN_S)
    assert after.current == before.current
    assert [replica.replica_id for replica in after.replicas] == [replica.replica_id for replica in before.replicas]
    assert [replica.checksum for replica in after.replicas] == [replica.checksum for replica in before.replicas]
    assert_of_weights(play(client).samples, before.current, perturbed(GOOD))


def rollouts_under_way(client: RolloutClient) -> RolloutResponse:
    games = client.example_samples("sliding_puzzle", 32, seed=3)
    # No retries: what a trial interrupts is nobody's failure.
    sampling = Sampling(temperature=1.5, max_new_tokens=96, ignore_eos=True)
    return client.rollout(games, sampling=sampling, max_rollout_turns=4, sample_retries=0)
