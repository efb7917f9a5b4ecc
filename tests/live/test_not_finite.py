"""Weights with which the engine computes NaN: each sample fails with a typed error, and the answer can be read."""

import pytest
import torch

from rollout_client import RolloutClient
from tests.live.forward_pass import State, tiny_state
from tests.live.played_with_weights import play

LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


def overflowing() -> State:
    """Finite weights, which the service accepts; the logits are infinite."""
    state = tiny_state()
    return state | {"model.norm.weight": torch.full_like(state["model.norm.weight"], LARGEST_BFLOAT16)}


@pytest.fixture(autouse=True)
def usable_weights_afterwards(client: RolloutClient) -> object:
    yield
    client.push_weights(tiny_state())


def test_samples_without_finite_log_probabilities_fail_and_the_answer_can_be_read(client: RolloutClient) -> None:
    client.push_weights(overflowing())
    # Few, so that the replica is not replaced.
    for sample in play(client, 2, sample_retries=1).samples:
        assert sample.status == "error"
        assert sample.error is not None
        assert (sample.error.kind, sample.error.retryable) == ("generation", True)
        assert sample.error.message == "The engine gave nan as the log-probability of token 0 of 48."
