"""Who is convicted by scores of the service's own: no sound replica, whoever suspects it, and a perturbed one soon."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.rollout_records.comparison import ComparedRollout, TrainerReport, compared
from deployments.rollout_records.ledger import MismatchLedger
from deployments.rollout_records.trials import (
    LEAST_AGAINST,
    LEAST_TOKENS,
    MOST_CHECKS,
    TRIAL_S,
    MadeRollout,
    ReplicaTrials,
    Vote,
    votes,
)
from tests.deployments.rollout_records.reports import LATEST, record_of

ROLLOUTS, TOKENS = 100_000, 12
ROUNDING = 0.01
"""Median of what two computations of a token differ by."""
PERTURBED = 0.2
GROUPS, SIGMAS = (1, 8, 16), (0.0, 0.3, 0.5, 0.8, 1.1)


def made(number: int, group: int | None = None) -> MadeRollout:
    return MadeRollout("anna", f"r{number}", f"g{number if group is None else group}")


def rounded(random: np.random.Generator, scales: np.ndarray, tokens: int = TOKENS) -> np.ndarray:
    """By how much a computation of each token is off, [*scales, tokens]. One is rounded more than another is."""
    own: np.ndarray = scales * np.exp(0.3 * random.standard_normal(scales.shape, np.float32))
    return own[..., None] * random.standard_normal((*scales.shape, tokens), np.float32)


@pytest.mark.parametrize("run", range(3))
def test_no_sound_replica_is_convicted_whoever_suspects_it(run: int) -> None:
    """Somebody suspects every replica, at the groups that were rounded the most, and by the worst rollout of each."""
    random, group, replicas = np.random.default_rng(run), GROUPS[1 - run % 3], 3 + run % 6
    groups = ROLLOUTS // group
    scales = ROUNDING * np.exp(random.choice(SIGMAS, groups) * random.standard_normal(groups)).astype(np.float32)
    of_group = rounded(random, np.repeat(scales[:, None], group, 1))
    sampled = of_group[np.arange(groups), np.abs(of_group).mean(-1).argmax(-1)]
    # Idle engines may score alike, to the last bit.
    scored = scales * random.choice(np.array([0, 1, 1], np.float32), groups)
    said = votes(sampled, *(rounded(random, scored) for _ in range(3)))
    sizes = np.abs(sampled).mean(-1)
    trials, looked_at = ReplicaTrials(), 0
    for place, number in enumerate(np.flatnonzero(sizes > np.quantile(sizes, 0.95)).tolist()):
        by, now = f"R{number % replicas}", place * 60.0
        for _ in trials.to_check(by, [made(number)], now):
            looked_at += 1
            assert trials.vote(by, Vote(said[number]), now) is None
    assert looked_at > groups / 40


@dataclass
class SimulatedReplicas:
    """Groups go to the replicas in turn. `R1` has other weights: it differs by `PERTURBED` in each of its numbers."""

    seed: int
    group: int
    sigma: float
    replicas: int
    ledger: MismatchLedger = field(default_factory=lambda: MismatchLedger(1.1))

    def named_after(self, rollouts: int, per_report: int) -> tuple[str, int] | None:
        """The replica that is convicted first, and after how many rollouts, of which one comes every 10 ms."""
        random, scales, differences = np.random.default_rng(self.seed), list[float](), list[np.ndarray]()
        for number in range(rollouts):
            if number % self.group == 0:
                scale = ROUNDING * float(np.exp(self.sigma * random.normal()))
            by = number // self.group % self.replicas
            scales.append(scale)
            differences.append(PERTURBED * random.normal(size=4 * TOKENS) * (by == 1))
            trained = sum(rounded(random, np.array(scale), 4 * TOKENS) for _ in range(2)) - differences[-1]
            self.ledger.add(self.compared(number, trained, f"R{by}"), "anna")
            if (number + 1) % per_report == 0:
                for replica, said in self.looked_at(random, scales, differences, number / 100):
                    if self.ledger.vote(replica, said, number / 100) is not None:
                        return replica, number + 1
        return None

    def compared(self, number: int, difference: np.ndarray, replica: str) -> ComparedRollout:
        name, sampled = f"r{number}", np.full(len(difference), -1.0)
        record = record_of(name, sampled.astype(int), sampled, replica, group=f"g{number // self.group}")
        return compared(record, TrainerReport(name, sampled + difference), LATEST)[0]

    def looked_at(
        self, random: np.random.Generator, scales: list[float], differences: list[np.ndarray], now: float
    ) -> Iterator[tuple[str, Vote]]:
        if (suspicion := self.ledger.look(now)[1]) is None:
            return
        for one in suspicion.rollouts:
            number = int(one.rollout_id[1:])
            sampled, again, first, second = rounded(random, np.full(4, scales[number]), 4 * TOKENS)
            apart = differences[number]
            yield suspicion.replica, Vote(votes(sampled + apart, again + apart, first, second).item())


@pytest.mark.parametrize("sigma", SIGMAS[::2])
@pytest.mark.parametrize(
    ("group", "replicas", "rollouts"), [(1, 3, 256), (1, 8, 256), (8, 4, 256), (16, 3, 256), (16, 8, 1024)]
)
def test_a_perturbed_replica_is_named_soon(group: int, replicas: int, rollouts: int, sigma: float) -> None:
    named = SimulatedReplicas(1, group, sigma, replicas).named_after(rollouts, per_report=rollouts // 16)
    assert (named or [""])[0] == "R1"


def convicted(
    trials: ReplicaTrials, said: list[Vote], replica: str = "a", now: float = 0.0, first: int = 0
) -> list[int]:
    """How many of the votes there were when the replica was convicted, each of a rollout and group of its own."""
    found = []
    for number, vote in enumerate(said, 1):
        assert len(trials.to_check(replica, [made(first + number)], now)) <= 1
        if trials.vote(replica, vote, now) is not None:
            found.append(number)
    return found


AGAINST, NOTHING, IN_FAVOUR = Vote.AGAINST, Vote.NOTHING, Vote.IN_FAVOUR


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([AGAINST] * LEAST_AGAINST, [4]),
        ([AGAINST] * (LEAST_AGAINST - 1) + [NOTHING] * 9, []),
        ([NOTHING, AGAINST] * LEAST_AGAINST, [8]),
        ([AGAINST, AGAINST, AGAINST, IN_FAVOUR, AGAINST], [5]),
        ([IN_FAVOUR, IN_FAVOUR, *[AGAINST] * 5], []),
        ([IN_FAVOUR, IN_FAVOUR, *[AGAINST] * 6], [8]),
        ([IN_FAVOUR] * LEAST_AGAINST + [AGAINST] * 12, []),
        ([NOTHING] * (MOST_CHECKS - 1) + [AGAINST] * 6, []),
    ],
)
def test_a_replica_is_convicted_by_four_and_by_three_times_its_defenders(said: list[Vote], found: list[int]) -> None:
    assert convicted(ReplicaTrials(), said) == found


def test_a_rollout_is_looked_at_once_and_one_of_a_group() -> None:
    trials = ReplicaTrials()
    assert trials.to_check("a", [made(1), made(2, group=1), made(1), made(3)], 0.0) == [made(1), made(3)]
    assert trials.to_check("a", [made(1), made(2, group=1), made(3)], 9.0) == []
    other_owner = MadeRollout("ben", "r1", "g1")
    assert trials.to_check("a", [other_owner], 9.0) == [other_owner]
    assert trials.to_check("b", [made(1), made(4)], 9.0) == [made(4)], "not for another suspect either"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 60)), max_size=300))
def test_the_rate_of_checks_is_bounded_whoever_is_suspected(suspected: list[tuple[str, float]]) -> None:
    trials, now, looked_at = ReplicaTrials(), 0.0, 0
    for number, (replica, later) in enumerate(suspected):
        now += later
        looked_at += len(trials.to_check(replica, [made(2 * number), made(2 * number + 1)], now))
        trials.vote(replica, IN_FAVOUR, now)
    assert looked_at <= 3 * MOST_CHECKS * (1 + now / TRIAL_S)


def test_a_trial_takes_at_most_16_rollouts_and_ends_in_time() -> None:
    trials, everything = ReplicaTrials(), [made(number) for number in range(100)]
    assert trials.to_check("a", everything, 0.0) == everything[:MOST_CHECKS]
    assert trials.to_check("a", everything, TRIAL_S / 2) == []
    assert trials.to_check("b", everything, TRIAL_S / 2) == everything[MOST_CHECKS : 2 * MOST_CHECKS]
    for _ in range(MOST_CHECKS):
        assert trials.vote("a", NOTHING, TRIAL_S / 2) is None
    assert len(trials.to_check("a", everything, TRIAL_S)) == MOST_CHECKS


def test_after_a_conviction_nobody_else_is_looked_at_for_a_while() -> None:
    """A replica that is at fault was a judge of the others."""
    trials = ReplicaTrials()
    assert trials.to_check("b", [made(90)], 0.0) == [made(90)]
    assert convicted(trials, [AGAINST] * 4) == [4]
    assert convicted(trials, [AGAINST] * 4, "b", TRIAL_S - 1, first=10) == []
    assert convicted(trials, [AGAINST] * 4, "b", TRIAL_S, first=20) == [4]


SAMPLED = np.full(LEAST_TOKENS, -1.0)


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ((0.2, 0.2, 0.0, 0.0), AGAINST),
        ((0.0, 0.0, 0.2, 0.2), AGAINST),
        ((0.0, 0.0, 0.0, 0.0), NOTHING),
        ((0.04, 0.04, 0.0, 0.0), NOTHING),
        # It scores as the others do: sampling differs from scoring, as with a cache of low precision.
        ((0.2, 0.0, 0.0, 0.0), NOTHING),
        # One of the others is at fault.
        ((0.0, 0.0, 0.2, 0.0), NOTHING),
        # They do not agree.
        ((0.0, 0.0, 0.2, -0.2), IN_FAVOUR),
        ((0.3, -0.3, 0.0, 0.0), IN_FAVOUR),
        ((float("nan"), 0.2, 0.0, 0.0), IN_FAVOUR),
    ],
)
def test_a_rollout_accuses_a_replica_that_parts_from_two(off: tuple[float, float, float, float], said: Vote) -> None:
    assert votes(*(SAMPLED + one for one in off)).item() == said
