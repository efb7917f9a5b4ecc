"""The mismatch ledger on the running service: a trainer that is right, and trainers that are wrong in one way each."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.reference_model import logprobs_of, token_ids_of
from rollout_client import RolloutClient
from rollout_client.contract.records import ReportAnswer
from rollout_client.contract.rollouts import SampleResult, Sampling
from tests.live.forward_pass import model_of, perturbed, tiny_state
from tests.live.played_with_weights import play

ROLLOUTS = 32
WINDOW = 256
Trainer = Callable[[Any, list[int]], torch.Tensor]
"""From the right model and the tokens of a log to the log-probabilities of each but the first."""


@pytest.fixture(scope="module")
def played(client: RolloutClient) -> list[SampleResult]:
    # Another test may have pushed other weights.
    client.push_weights(tiny_state())
    return play(client, ROLLOUTS, sampling=Sampling(temperature=1.0, max_new_tokens=48, seed=9)).samples


def report(client: RolloutClient, results: Sequence[SampleResult], logprobs: list[Any], **options: Any) -> ReportAnswer:
    """Reports so often that the service looks at nothing else."""
    answers = [client.report_logprobs(results, logprobs, **options) for _ in range(WINDOW // len(results))]
    assert [answer.refused for answer in answers] == [[]] * len(answers)
    return answers[-1]


def test_a_ledger_of_the_services_own_scores_has_ratio_1(client: RolloutClient, played: list[SampleResult]) -> None:
    scores = client.score([token_ids_of(result) for result in played]).scores
    answer = report(client, played, [score.logprobs for score in scores])
    assert answer.compared == ROLLOUTS
    assert 1 <= answer.mean_ratio < 1.02
    assert answer.causes == []
    ledger = client.mismatch()
    assert set(ledger.by["replica"]) == {one.replica for result in played for one in generations(client, result)}


def test_a_record_divides_time_by_queue_engines_and_steps(client: RolloutClient, played: list[SampleResult]) -> None:
    for result in played:
        record = client.rollout_record(str(result.rollout_id))
        began = [made.began_at or 0 for made in record.generations]
        assert 0 < began[0] <= began[-1] < record.ended_at
        assert record.began_at is not None
        spent = sum(made.waited_s + made.took_s for made in record.generations)
        spent += sum(step.took_s for step in record.steps)
        # The two clocks of a machine may part by some milliseconds.
        assert 0 < spent < record.ended_at - record.began_at + 0.05
        assert [step.turn for step in record.steps] == list(range(result.metrics.turn_count))
        assert record.priority == "train"


def generations(client: RolloutClient, result: SampleResult) -> Any:
    assert result.rollout_id is not None
    return client.rollout_record(result.rollout_id).generations


def shifted(model: Any, ids: list[int]) -> torch.Tensor:
    return logprobs_of(model, ids).roll(1)


def of_other_weights(_: Any, ids: list[int]) -> torch.Tensor:
    return logprobs_of(model_of(perturbed(41)), ids)


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [
        (lambda model, ids: logprobs_of(model, ids, 0.5), "wrong_temperature"),
        (of_other_weights, "wrong_version"),
        (shifted, "misaligned"),
    ],
    ids=["temperature", "weights", "shift"],
)
def test_a_trainer_that_is_wrong_in_one_way_is_told_which(
    client: RolloutClient, played: list[SampleResult], trainer: Trainer, kind: str
) -> None:
    model = model_of(tiny_state())
    answer = report(client, played, [trainer(model, token_ids_of(result)) for result in played])
    assert [cause.kind for cause in answer.causes] == [kind]
    assert kind in [cause.kind for cause in client.mismatch().causes]
