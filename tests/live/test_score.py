"""`POST /score` on the running service: its log-probabilities are those of transformers and of the rollouts."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.reference_model import State, chosen, logprobs_of, logprobs_of_next, token_ids_of
from rollout_client import RolloutClient
from rollout_client.contract.rollouts import Sampling
from tests.live.conftest import ON_GPU_RUNNER
from tests.live.forward_pass import model_of, perturbed
from tests.live.played_with_weights import LOGPROB_TOLERANCE, SAME_WEIGHTS_TOLERANCE, play

pytestmark = pytest.mark.usefixtures("leaves_the_original_weights")

SEQUENCES = [[5, 17, 8, 31, 9, 2], list(range(200)), [3, 4]]
WHILE_PUSHED = 40 if ON_GPU_RUNNER else 200
"""Sequences that are scored while weights are pushed: Triton's interpreter takes most of a minute for two dozen."""
ROUNDING = 2**-8
"""What bfloat16 rounds, as a share: the tokens of these sequences are improbable, so their logits are large."""


def mean_difference(logprobs: Sequence[float | None], said: torch.Tensor) -> float:
    return (torch.tensor([value for value in logprobs if value is not None]) - said).abs().mean().item()


def are_equal(logprobs: Sequence[float | None], said: torch.Tensor) -> bool:
    return mean_difference(logprobs, said) <= LOGPROB_TOLERANCE + ROUNDING * said.abs().mean().item()


def test_scores_are_the_logprobs_of_transformers_under_pushed_weights(client: RolloutClient) -> None:
    state = perturbed(21)
    version = client.push_weights(state).version
    model = model_of(state)
    response = client.score(SEQUENCES, top_k=3, policy={"version": version})
    said = str(version)
    assert (response.policy.oldest, response.policy.newest) == (said, said)
    assert [score.weight_version for score in response.scores] == [said] * 3
    best, likeliest = list[float | None](), list[torch.Tensor]()
    for sequence, score in zip(SEQUENCES, response.scores, strict=True):
        assert score.logprobs is not None
        assert score.top_token_ids is not None
        assert score.top_logprobs is not None
        assert len(score.logprobs) == len(score.top_token_ids) == len(score.top_logprobs) == len(sequence)
        assert (score.logprobs[0], score.top_token_ids[0], score.top_logprobs[0]) == (None, None, None)
        expected = logprobs_of_next(model, sequence)
        assert are_equal(score.logprobs, chosen(expected, sequence))
        best += [logprob for row in score.top_logprobs if row is not None for logprob in row]
        likeliest.append(expected[:-1].topk(3).values.flatten())
    # Of all sequences together: one position may differ by a whole step of bfloat16, which is 0.06 for logits above 8.
    assert are_equal(best, torch.cat(likeliest))


def test_scores_of_rollouts_are_what_they_were_sampled_with(client: RolloutClient) -> None:
    results = play(client, 32, sampling=Sampling(temperature=1.0, max_new_tokens=48)).samples
    scores = client.score([token_ids_of(result) for result in results]).scores
    differences = []
    for result, score in zip(results, scores, strict=True):
        assert score.logprobs is not None
        position = 0
        for message in result.message_log:
            if message.generation_logprobs is not None:
                scored = score.logprobs[position : position + len(message.token_ids)]
                differences.append(mean_difference(scored, torch.tensor(message.generation_logprobs)))
            position += len(message.token_ids)
    assert sum(differences) / len(differences) <= SAME_WEIGHTS_TOLERANCE


def test_a_sequence_may_be_as_long_as_the_model_takes(client: RolloutClient) -> None:
    most = client.info().model.max_model_len
    sequence = [5 + place % 50 for place in range(most)]
    client.push_weights(perturbed(22))
    [score] = client.score([sequence]).scores
    assert score.logprobs is not None
    assert len(score.logprobs) == most
    assert are_equal(score.logprobs, logprobs_of(model_of(perturbed(22)), sequence))


def test_each_sequence_is_scored_by_one_version_while_weights_are_pushed(client: RolloutClient) -> None:
    states = pushed(client, 31, 32)
    sequence = list(range(150))
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(client.score, [sequence] * WHILE_PUSHED)
        states |= pushed(client, 33, 34, 35)
        scores = scoring.result().scores
    expected = expected_of(states, sequence)
    for score in scores:
        assert score.error is None
        assert score.logprobs is not None
        assert score.weight_version is not None
        assert [said for said in expected if are_equal(score.logprobs, expected[said])] == [score.weight_version]


def pushed(client: RolloutClient, *seeds: int) -> dict[int, State]:
    """The weights of these seeds by the versions that they became."""
    states = {seed: perturbed(seed) for seed in seeds}
    return {client.push_weights(state).version: state for state in states.values()}


def expected_of(states: Mapping[int, State], sequence: Sequence[int]) -> dict[str, torch.Tensor]:
    """By version, the log-probabilities of all tokens but the first."""
    return {str(version): logprobs_of(model_of(state), sequence) for version, state in states.items()}
