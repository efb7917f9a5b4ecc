"""The mismatch ledger: attribution, suspicion of a replica, bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.ledger import MOST_PERIODS, MOST_VALUES, MOST_WORST, PERIOD_S, MismatchLedger
from tests.deployments.rollout_records.reports import Sampler, log_softmax, record_of, reported

ROUNDING = 0.004
PERTURBED = 0.05


def fed(
    rollouts: int, group_size: int = 1, faulty: str = "", seed: int = 0, stop_at_suspicion: bool = True
) -> tuple[MismatchLedger, int, list[str]]:
    """A ledger of rollouts on four replicas; how many there were when one was suspected first; all that were."""
    random = np.random.default_rng(seed)
    sampler, ledger, suspected = Sampler(random), MismatchLedger(1.1), list[str]()
    hardness, replica = 1.0, "a"
    for number in range(rollouts):
        if number % group_size == 0:
            # The rollouts of a group are of one prompt, and mostly on one replica.
            hardness, replica = float(np.exp(random.normal(0, 0.5))), "abcd"[random.integers(4)]
        own = replica if random.random() < 0.9 else "abcd"[random.integers(4)]
        noise = PERTURBED if own == faulty else 0.0
        record, logits, chosen = sampler.rollout(f"r{number}", 12, own, noise=noise, group=f"g{number // group_size}")
        trained = log_softmax(logits + hardness * ROUNDING * random.normal(0, 1, logits.shape))
        ledger.add(reported(record, trained, chosen), "", 0.0)
        if (suspicion := ledger.suspicion()) is not None:
            suspected.append(suspicion.replica)
            if stop_at_suspicion:
                break
    return ledger, ledger.rollouts, suspected


@pytest.mark.parametrize("seed", range(5))
def test_one_replica_among_four_with_other_numbers_is_suspected_within_64_rollouts(seed: int) -> None:
    _, rollouts, suspected = fed(64, faulty="c", seed=seed)
    assert suspected == ["c"]
    assert rollouts <= 64


def test_sound_replicas_are_not_suspected_in_10_000_rollouts() -> None:
    _, rollouts, suspected = fed(10_000, seed=1)
    assert (rollouts, suspected) == (10_000, [])


def test_a_suspicion_names_rollouts_of_the_replica_and_is_told_once() -> None:
    ledger, _, _ = fed(64, faulty="b", seed=3, stop_at_suspicion=False)
    _, _, suspected = fed(200, faulty="b", seed=3, stop_at_suspicion=False)
    assert suspected == ["b"]
    found = ledger.convict("b", "It is at fault.", 5.0)
    assert [(one.kind, one.replica) for one in found] == [("replica", "b")]
    assert ledger.suspicion() is None


def test_each_token_is_counted_once_under_each_attribute() -> None:
    ledger = MismatchLedger(1.1)
    record, logits, chosen = Sampler().rollout("r0", 10, "a", "7")
    ledger.add(reported(record, log_softmax(logits), chosen), "", 0.0)
    counted = {name: {value: cell.sums.tokens for value, cell in cells.items()} for name, cells in ledger.by.items()}
    assert counted == {
        "replica": {"a": 10},
        "node": {"node of a": 10},
        "version": {"7": 10},
        "prefix_cache": {"hit": 10},
        "batch_size": {"2-8": 10},
        "position": {"head": 4, "rest": 6},
        "policy": {"unnamed": 10},
        "engine": {"e": 10},
    }
    assert (ledger.all.sums.mean_ratio, ledger.all.largest) == pytest.approx((1.0, 1.0))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_the_mean_and_the_largest_ratio_are_those_of_the_tokens(differences: list[float]) -> None:
    ledger, chosen = MismatchLedger(1.1), np.arange(len(differences))
    record = record_of("r0", chosen, [-4.0] * len(differences))
    trained = np.repeat(np.array([differences]).T - 4.0, len(differences), 1)
    ledger.add(reported(record, trained, chosen), "", 0.0)
    ratios = np.exp(np.abs(differences))
    assert ledger.all.sums.mean_ratio == pytest.approx(ratios.mean())
    assert ledger.all.largest == pytest.approx(ratios.max())


def test_memory_is_bounded_whatever_is_reported() -> None:
    ledger, chosen = MismatchLedger(1.1), np.array([1])
    for number in range(600):
        record = record_of(f"r{number}", chosen, [-1.0], replica=f"a{number}", version=str(number))
        ledger.add(reported(record, np.full((1, 2), -1.0), chosen), "", number * PERIOD_S)
    assert {len(cells) for name, cells in ledger.by.items() if name in ("replica", "version")} == {MOST_VALUES}
    assert len(ledger.history) == MOST_PERIODS
    assert len(ledger.worst("")) == MOST_WORST


def test_the_worst_rollouts_are_those_of_the_owner() -> None:
    ledger, chosen = MismatchLedger(1.1), np.array([1])
    for name, owner, trained in (("r0", "anna", -1.0), ("r1", "anna", -2.0), ("r2", "ben", -5.0)):
        record = record_of(name, chosen, [-1.0])
        ledger.add(reported(record, np.full((1, 2), trained), chosen), owner, 0.0)
    assert [one.rollout_id for one in ledger.worst("anna")] == ["r1", "r0"]


def test_a_trainer_that_is_wrong_is_told_and_another_ones_trainer_is_not() -> None:
    sampler, ledger = Sampler(), MismatchLedger(1.1)
    for number in range(80):
        owner = ("anna", "ben")[number % 2]
        record, logits, chosen = sampler.rollout(f"r{number}")
        trained = log_softmax(logits / 0.5 if owner == "anna" else logits)
        ledger.add(reported(record, trained, chosen), owner, 0.0)
    assert [finding.kind for finding in ledger.look(0.0)] == ["wrong_temperature"]
    assert [noted.finding.kind for noted in ledger.findings("anna")] == ["wrong_temperature"]
    assert ledger.findings("ben") == []


def test_policies_of_one_owner_have_trainers_of_their_own() -> None:
    sampler, ledger = Sampler(), MismatchLedger(1.1)
    for number in range(80):
        record, logits, chosen = sampler.rollout(f"r{number}")
        record["policy"] = ("a", "b")[number % 2]
        trained = log_softmax(logits / 0.5 if record["policy"] == "a" else logits)
        ledger.add(reported(record, trained, chosen), "", 0.0)
    [found] = ledger.look(0.0)
    assert found.kind == "wrong_temperature"
    assert float(found.message.split("temperature near ")[1].split(",")[0]) == pytest.approx(0.5, rel=0.1)


def test_a_replica_at_fault_is_told_to_all() -> None:
    ledger, _, _ = fed(64, faulty="b", seed=3, stop_at_suspicion=False)
    ledger.convict("b", "It is at fault.", 5.0)
    assert [noted.finding.replica for noted in ledger.findings("anna")] == ["b"]
