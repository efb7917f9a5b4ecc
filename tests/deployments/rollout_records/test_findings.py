"""Each cause of a mismatch is told by its pattern, and named with what to do."""

from typing import Any

import numpy as np
import pytest

from deployments.rollout_records.comparison import ReportRefused, TrainerReport, compared
from deployments.rollout_records.findings import MismatchFinding
from deployments.rollout_records.ledger import MismatchLedger
from tests.deployments.rollout_records.reports import LATEST, PROMPT, Sampler, Trainer, log_softmax, record_of, reported

ROLLOUTS = 40


def findings(
    trainer: Trainer, sampler: Sampler | None = None, version: str = "3", trained_version: str | None = None
) -> list[MismatchFinding]:
    """What the ledger finds after some rollouts of this trainer."""
    sampler, ledger = sampler or Sampler(), MismatchLedger(most_mean_ratio=1.1)
    found = []
    for number in range(ROLLOUTS):
        record, logits, chosen = sampler.rollout(f"r{number}", version=version)
        ledger.add(reported(record, trainer(logits, number), chosen, trained_version), "")
        found += ledger.look(0.0)[0]
    assert trained_version is None or ledger.all.mean_ratio > 1.1, "tokens of another version are counted all the same"
    return found


def test_a_trainer_that_agrees_up_to_rounding_is_no_finding() -> None:
    random = np.random.default_rng(1)
    assert findings(lambda logits, _: log_softmax(logits + random.normal(0, 0.01, logits.shape))) == []


@pytest.mark.parametrize("parts_by", [8.0, 10.0, 20.0])
def test_one_token_of_many_that_parts_is_no_finding(parts_by: float) -> None:
    random, ledger, tokens = np.random.default_rng(1), MismatchLedger(1.1), 400
    for number in range(256):
        sampled = -random.exponential(0.7, tokens)
        trained = sampled + random.normal(0, 0.004, tokens)
        trained[37] -= parts_by * (number == 5)
        record = record_of(f"r{number}", np.zeros(tokens, int), sampled)
        ledger.add(compared(record, TrainerReport(f"r{number}", trained), LATEST)[0], "")
    assert ledger.look(0.0)[0] == []
    assert ledger.all.mean_ratio == pytest.approx(1.003, abs=0.001)
    assert ledger.all.fields["share_beyond"] == 1 / (256 * tokens)
    assert ledger.all.fields["largest_ratio"] == pytest.approx(np.exp(parts_by), rel=0.02)


@pytest.mark.parametrize(
    ("sampled_at", "trained_at", "one_part"),
    [
        (1.0, 0.6, 0),
        (1.0, 0.8, 0),
        (1.0, 1.3, 0),
        # The trainer forgets the temperature of the request.
        (0.7, 1.0, 0),
        # Most tokens are certain: two in three hundred part by more than what a token counts at most.
        (0.06, 0.03, 0),
        # One token that parts does not hide it.
        (1.0, 0.6, 20),
    ],
)
def test_another_trainer_temperature_is_told_by_value(sampled_at: float, trained_at: float, one_part: int) -> None:
    def trainer(logits: np.ndarray, number: int) -> np.ndarray:
        trained = log_softmax(logits / trained_at)
        trained[3] -= one_part * (number % 2)
        return trained

    [found] = findings(trainer, Sampler(temperature=sampled_at))
    assert found.kind == "wrong_temperature"
    assert f"sampled was at {sampled_at:g}" in found.message
    if sampled_at == 1.0 and not one_part:
        assert float(found.message.split("temperature near ")[1].split(",")[0]) == pytest.approx(trained_at, rel=0.2)


def test_other_weights_at_the_trainer_are_told_with_the_sampled_version() -> None:
    random = np.random.default_rng(2)
    [found] = findings(lambda logits, _: log_softmax(logits + random.normal(0, 0.7, logits.shape)), version="8")
    assert found.kind == "wrong_version"
    assert "the trainer has other weights than the service had as version 8" in found.message


def test_a_trainer_that_has_one_version_of_several_is_told_which() -> None:
    random, sampler, ledger = np.random.default_rng(3), Sampler(), MismatchLedger(1.1)
    for number in range(ROLLOUTS):
        is_old = number % 2 == 0
        record, logits, chosen = sampler.rollout(f"r{number}", version="3" if is_old else "4")
        ledger.add(reported(record, log_softmax(logits + random.normal(0, 0.7, logits.shape) * is_old), chosen), "")
    [found] = ledger.look(0.0)[0]
    assert found.kind == "wrong_version"
    assert "tokens of version 4 agree, those of 3 do not" in found.message


def test_tokens_of_another_version_than_the_trainers_are_no_finding() -> None:
    random = np.random.default_rng(3)
    assert (
        findings(lambda logits, _: log_softmax(logits + random.normal(0, 0.7, logits.shape)), trained_version="4") == []
    )


def test_numbers_of_other_tokens_are_told_to_be_misaligned() -> None:
    sampler, ledger = Sampler(), MismatchLedger(1.1)
    for number in range(ROLLOUTS):
        record, logits, chosen = sampler.rollout(f"r{number}")
        shifted = np.roll(log_softmax(logits)[np.arange(len(chosen)), chosen], 1)
        ledger.add(compared(record, TrainerReport(f"r{number}", shifted), LATEST)[0], "")
    [found] = ledger.look(0.0)[0]
    assert found.kind == "misaligned"


def test_a_mask_with_tokens_of_the_environment_is_told_with_the_rollout() -> None:
    record, logits, chosen = Sampler().rollout("r0")
    sampled = log_softmax(logits)[np.arange(len(chosen)), chosen]
    whole = np.concatenate([np.full(PROMPT, np.nan), sampled, [-1.0, -1.0]])
    mask = np.concatenate([np.zeros(PROMPT, bool), np.ones(len(chosen) + 2, bool)])
    ledger = MismatchLedger(1.1)
    ledger.add(compared(record, TrainerReport("r0", whole, mask=mask), LATEST)[0], "")
    [found] = ledger.look(0.0)[0]
    assert found.kind == "missing_mask"
    assert "2 in r0" in found.message
    assert ledger.all.mean_ratio == pytest.approx(1)


def record_of_three() -> dict[str, Any]:
    """A response that a call has bound, one of the policy, and one that was sampled colder than the request says."""
    record = record_of("r0", np.array([5, 6]), [-1.0, -2.0])
    log = record["rollout"]["message_log"]
    forced = log[1] | {"generation_logprobs": [0.0, 0.0], "constrained": True}
    colder = log[1] | {"generation_logprobs": [-0.25, -0.25], "sampled_with": {"temperature": 0.5}}
    record["rollout"]["message_log"] = [log[0], forced, log[1], colder, log[2]]
    record["generations"][0]["message"] = 2
    return record


@pytest.mark.parametrize("count", [4, 6, 8, 10, 11])
def test_only_what_the_policy_sampled_as_the_request_says_is_compared(count: int) -> None:
    """With a report of the trained tokens, of the generated ones, and of those from the prompt on or from its begin."""
    numbers = [-7.0, -7.0, -1.5, -2.5, -9.0, -9.0]
    whole = np.array([np.nan] * PROMPT + numbers + [np.nan] * 2)
    given = {4: whole[5:9], 6: whole[3:9], 8: whole[3:], 10: whole[1:], 11: whole}[count]
    rollout, noted = compared(record_of_three(), TrainerReport("r0", given), LATEST)
    assert [*noted["logprobs"]] == [-1.5, -2.5]
    assert rollout.sums.mean_ratio == pytest.approx(np.exp(0.5))
    assert rollout.by["replica"] == {"a": rollout.sums}


def test_a_mask_with_tokens_that_may_not_be_trained_is_told() -> None:
    mask = np.array([False] * PROMPT + [True] * 6 + [False] * 2)
    rollout, _ = compared(record_of_three(), TrainerReport("r0", np.zeros(len(mask)), mask=mask), LATEST)
    assert rollout.unmasked == 2


RECORD = record_of("r0", np.array([5, 6, 7]), [-1.0, -2.0, -3.0])
"""Three generated tokens after a prompt of three, and two of the environment."""


@pytest.mark.parametrize(
    ("theirs", "start", "place"),
    [
        ([1, 9, 1, 5, 6, 7, 2, 2], None, "token 1 of the log"),
        ([1, 1, 1, 5, 6], None, "token 5 of the log"),
        ([1, 1, 1, 5, 6, 7, 2, 2, 2], None, "token 8 of the log"),
        ([1, 1, 5, 6, 7], 3, "token 2 of the log"),
    ],
)
def test_other_token_ids_are_told_with_the_first_that_differs(theirs: list[int], start: int | None, place: str) -> None:
    report = TrainerReport("r0", np.full(3, -1.0), token_ids=np.array(theirs), start=start)
    ledger = MismatchLedger(1.1)
    ledger.add(compared(RECORD, report, LATEST)[0], "")
    [found] = ledger.look(0.0)[0]
    assert found.kind == "other_tokens"
    assert place in found.message


@pytest.mark.parametrize(("start", "given", "compared_tokens"), [(3, 2, [0, 1]), (1, 4, [0, 1]), (4, 4, [1, 2])])
def test_a_report_that_says_its_start_may_omit_the_rest(start: int, given: int, compared_tokens: list[int]) -> None:
    log = np.array([np.nan] * PROMPT + [-1.5, -2.25, -3.125] + [np.nan] * 2)
    own_ids = np.array([1, 1, 1, 5, 6, 7, 2, 2])[: start + given]
    report = TrainerReport("r0", log[start : start + given], token_ids=own_ids, start=start)
    rollout, noted = compared(RECORD, report, LATEST)
    assert [*noted["logprobs"]] == [[-1.5, -2.25, -3.125][token] for token in compared_tokens]
    assert (noted["start"], rollout.other_token) == (compared_tokens[0], None)
    assert rollout.by["replica"] == {"a": rollout.sums}


@pytest.mark.parametrize(
    ("given", "start", "message"),
    [
        ([-1.0] * 4, None, "4 logprobs for a rollout of 3 generated tokens, 5 after its prompt and 8 in all"),
        ([-1.0, float("nan"), -1.0], None, "not a finite number"),
        ([-1.0, float("inf"), -1.0], None, "not a finite number"),
        ([-1.0] * 3, -1, "3 logprobs from token -1 on for a rollout of 8 tokens"),
        ([-1.0] * 3, 6, "3 logprobs from token 6 on for a rollout of 8 tokens"),
    ],
)
def test_a_report_that_misfits_is_refused_with_the_counts(given: list[float], start: int | None, message: str) -> None:
    with pytest.raises(ReportRefused, match=message):
        compared(RECORD, TrainerReport("r0", np.array(given), start=start), LATEST)
