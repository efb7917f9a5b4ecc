"""The mismatch ledger: attribution, suspicion of a replica, bounds."""

import numpy as np
import pytest

from deployments.rollout_records.comparison import MOST_LABELS, UNKNOWN, TrainerReport, compared
from deployments.rollout_records.ledger import MOST_TRAINERS, MOST_VALUES, MOST_WORST, MismatchLedger, Suspicion
from deployments.rollout_records.trials import LEAST_AGAINST, Vote
from tests.deployments.rollout_records.reports import Sampler, log_softmax, record_of, reported


def suspicions(ledger: MismatchLedger, first: int = 0) -> list[Suspicion]:
    """Those that 64 rollouts on four replicas raise: the trainer parts from `b` by more than from the others."""
    raised = list[Suspicion]()
    for number in range(first, first + 64):
        replica = "abcd"[number // 2 % 4]
        record = record_of(f"r{number}", np.zeros(9, int), [-1.0] * 9, replica, group=f"g{number // 2}")
        ledger.add(reported(record, np.full((9, 1), -1.2 if replica == "b" else -1.01), np.zeros(9, int)), "")
        if (suspicion := ledger.look(0.0)[1]) is not None:
            raised.append(suspicion)
    return raised


def test_a_suspicion_names_one_rollout_of_a_group_and_convicts_nobody() -> None:
    ledger = MismatchLedger(1.1)
    raised = suspicions(ledger)
    assert {suspicion.replica for suspicion in raised} == {"b"}
    assert ledger.findings("") == []
    named = [one.rollout_id for suspicion in raised for one in suspicion.rollouts]
    groups = {int(name[1:]) // 2 for name in named}
    assert groups == {1, 5, 9, 13, 17, 21, 25, 29}
    assert len(named) == len(groups)


def test_a_rollout_that_is_reported_often_counts_once_against_its_replica() -> None:
    ledger, chosen = MismatchLedger(1.1), np.zeros(9, int)
    for number in range(240):
        # A liar has one rollout of `a`, and reports it again and again.
        name, replica, trained = ("r0", "a", -9.0) if number % 3 == 0 else (f"r{number}", "bcd"[number % 3], -1.01)
        ledger.add(reported(record_of(name, chosen, [-1.0] * 9, replica), np.full((9, 1), trained), chosen), "")
        assert ledger.look(0.0)[1] is None


def convicted(ledger: MismatchLedger, replica: str) -> str:
    [reason] = [said for _ in range(LEAST_AGAINST) if (said := ledger.vote(replica, Vote.AGAINST, 5.0)) is not None]
    return reason


def test_what_a_replica_at_fault_has_made_is_looked_at_no_more() -> None:
    ledger = MismatchLedger(1.1)
    suspicions(ledger)
    reason = convicted(ledger, "b")
    assert "of 4 rollouts that it and two others have scored again, 4 say so" in reason
    [noted] = ledger.findings("anna")
    assert (noted.kind, noted.replica) == ("replica", "b")
    assert noted.message == f"{reason} It was taken out of service."
    assert suspicions(ledger, first=64) == []


def test_each_token_is_counted_once_under_each_attribute() -> None:
    ledger = MismatchLedger(1.1)
    record, logits, chosen = Sampler().rollout("r0", 10, "a", "7")
    ledger.add(reported(record, log_softmax(logits), chosen), "")
    counted = {name: {value: sums.tokens for value, sums in values.items()} for name, values in ledger.by.items()}
    assert counted == {"replica": {"a": 10}, "version": {"7": 10}, "policy": {"unnamed": 10}}
    assert (ledger.all.mean_ratio, ledger.all.fields["largest_ratio"]) == pytest.approx((1.0, 1.0))


def test_memory_is_bounded_and_one_key_pushes_out_nothing_of_another() -> None:
    ledger, chosen = MismatchLedger(1.1), np.array([1])

    def report(name: str, owner: str, replica: str, version: int, trained: float, policy: str) -> None:
        record = {**record_of(name, chosen, [-1.0], replica, str(version)), "policy": policy}
        ledger.add(compared(record, TrainerReport(name, np.array([trained])), {"": 99_999})[0], owner)

    for number in range(100):
        report(f"r{number}", "anna", "a", number, -1.5 - number / 1000, f"p{number % 4}")
    for number in range(600):
        report(f"m{number}", "mallory", f"m{number}", 1000 + number, -20.0, f"m{number}")
    assert [version in ledger.by["version"] for version in map(str, range(100))] == [True] * 100
    assert len(ledger.by["version"]) == 100 + MOST_VALUES
    assert len(ledger.by["replica"]) == 1 + MOST_VALUES
    assert list(ledger.worst("anna")) == [f"r{99 - place}" for place in range(MOST_WORST)]


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("7", "7"),
        ("8", "unknown"),
        ("07", "unknown"),
        ("1" * 40, "unknown"),
        ("tutor/3", "tutor/3"),
        ("tutor/4", "unknown"),
        ("nobody/1", "unknown"),
    ],
)
def test_tokens_of_a_version_that_was_never_served_are_unknown(given: str, known: str) -> None:
    record = record_of("r0", np.array([5, 6]), [-1.0, -1.0], version=given)
    rollout, _ = compared(record, TrainerReport("r0", np.array([-1.0, -1.0])), {"": 7, "tutor": 3})
    assert rollout.by["version"] == {known: rollout.sums}


def test_a_log_of_31_000_versions_is_of_one_unknown_and_few_known_ones() -> None:
    count = 31_000
    record = record_of("r0", np.zeros(count, int), [-1.0] * count)
    spans = [{"version": str(10**6 + at if at % 2 else at), "start": at, "end": at + 1} for at in range(count)]
    record["rollout"]["message_log"][1]["weight_versions"] = spans
    ledger = MismatchLedger(1.1)
    ledger.add(compared(record, TrainerReport("r0", np.full(count, -1.0)), {"": 10**5})[0], "")
    told = ledger.by["version"]
    assert len(told) == MOST_LABELS + 1
    assert told[UNKNOWN].tokens == count - MOST_LABELS


def test_a_trainer_that_is_wrong_is_told_and_another_ones_trainer_is_not() -> None:
    sampler, ledger = Sampler(), MismatchLedger(1.1)
    for number in range(80):
        owner = ("anna", "ben")[number % 2]
        record, logits, chosen = sampler.rollout(f"r{number}")
        ledger.add(reported(record, log_softmax(logits / 0.5 if owner == "anna" else logits), chosen), owner)
    assert [finding.kind for finding in ledger.look(0.0)[0]] == ["wrong_temperature"]
    assert [finding.kind for finding in ledger.findings("anna")] == ["wrong_temperature"]
    assert ledger.findings("ben") == []


@pytest.mark.parametrize(("further", "finds"), [(0, 1), (MOST_TRAINERS - 2, 1), (MOST_TRAINERS - 1, 0)])
def test_policies_of_one_owner_have_trainers_of_their_own(further: int, finds: int) -> None:
    sampler, ledger = Sampler(), MismatchLedger(1.1)
    for number in range(80 + further):
        record, logits, chosen = sampler.rollout(f"r{number}")
        record["policy"] = "ab"[number % 2] if number < 80 else f"further {number}"
        ledger.add(reported(record, log_softmax(logits / 0.5 if record["policy"] == "a" else logits), chosen), "")
    found = ledger.look(0.0)[0]
    assert [finding.kind for finding in found] == ["wrong_temperature"] * finds, "the oldest ones go"
    for finding in found:
        assert float(finding.message.split("temperature near ")[1].split(",")[0]) == pytest.approx(0.5, rel=0.1)
