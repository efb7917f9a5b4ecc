"""What the scheduler achieves on a fleet of simulated engines: shares, waits, and how load spreads."""

from collections import Counter
from functools import partial

import pytest

from benchmarks.simulation.timing import Timing
from tests.service.scheduling.simulated_fleet import Batch, Fleet

TIMING = Timing(time_per_token_s=0.01, max_num_seqs=16)
TURN_S = 1.0
"""Of the longest turn: 100 tokens."""


def turns_in(fleet: Fleet, begin: float, end: float) -> Counter[str]:
    return Counter(replica for at, replica in fleet.turns_by_replica if begin <= at < end)


@pytest.mark.slow
def test_an_evaluation_beside_training_has_half_of_the_fleet() -> None:
    alone = Fleet(2, TIMING)
    alone.post(Batch("evaluation", rollouts=32, turns=4))
    alone.run()
    shared = Fleet(4, TIMING)
    shared.post(Batch("training", rollouts=1024, turns=4))
    shared.at(5.0, lambda: shared.post(Batch("evaluation", rollouts=32, turns=4)))
    shared.run(lambda: "evaluation" in shared.ended)
    assert shared.seconds("evaluation") <= 1.3 * alone.seconds("evaluation")


@pytest.mark.slow
@pytest.mark.parametrize(("window_factor", "longest_s"), [(2.0, 1.5 * TURN_S), (None, 10 * TURN_S)])
def test_single_samples_do_not_wait_for_a_training_batch(window_factor: float | None, longest_s: float) -> None:
    fleet = Fleet(4, TIMING, window_factor)
    fleet.post(Batch("training", rollouts=1024, turns=4))
    for number in range(20):
        fleet.at(2.0 + 0.1 * number, partial(fleet.post, Batch(f"{number}", rollouts=1, turns=1)))
    fleet.run(lambda: len(fleet.ended) == 20)
    assert (max(fleet.seconds(f"{number}") for number in range(20)) <= longest_s) == (window_factor is not None)


@pytest.mark.parametrize("ingresses", [1, 2])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_requests_share_the_engines_by_their_weights(ingresses: int, weight: float) -> None:
    fleet = Fleet(2, TIMING, ingresses=ingresses)
    fleet.post(Batch("one", rollouts=1000, turns=4))
    fleet.post(Batch("other", rollouts=1000, turns=4, weight=weight, ingress=ingresses - 1))
    fleet.run(lambda: fleet.now > 20.0)
    assert fleet.turns_ended["other"] / fleet.turns_ended["one"] == pytest.approx(weight, rel=0.1)


def test_three_new_replicas_carry_a_quarter_each_within_two_turns() -> None:
    fleet = Fleet(1, TIMING)
    fleet.post(Batch("training", rollouts=1024, turns=8, prompt_tokens=1000))
    fleet.at(40.0, lambda: fleet.scale(4))
    fleet.run(lambda: fleet.now > 80.0)
    before = turns_in(fleet, 20.0, 40.0).total() / 20.0
    after = turns_in(fleet, 40.0 + 2 * TURN_S, 80.0)
    assert [count / after.total() for count in after.values()] == pytest.approx([0.25] * 4, rel=0.05)
    assert after.total() / (40.0 - 2 * TURN_S) >= 3.9 * before


def test_two_ingresses_exceed_one_window_by_no_more_than_one() -> None:
    fleet = Fleet(2, TIMING, ingresses=2)
    for ingress in (0, 1):
        fleet.post(Batch(f"{ingress}", rollouts=500, turns=4, ingress=ingress))
    fleet.run(lambda: fleet.now > 5.0)
    for replica in fleet.replicas.values():
        replica.most_ongoing = 0
    fleet.run(lambda: fleet.now > 20.0)
    assert max(replica.most_ongoing for replica in fleet.replicas.values()) <= 2 * TIMING.max_num_seqs + 1


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_keys_share_the_engines_by_their_weights(weight: float) -> None:
    fleet = Fleet(2, TIMING)
    # From then on the scheduler expects generations of the right length.
    fleet.post(Batch("first", rollouts=128, turns=1))
    fleet.run(lambda: "first" in fleet.ended)
    for number in range(20):
        fleet.post(Batch(f"other {number}", 100, turns=4, key="many"))
    fleet.post(Batch("weighted", 1000, turns=4, key="weighted", key_weight=weight))
    fleet.run(lambda: fleet.now > 10.0)
    before = Counter(fleet.turns_ended)
    fleet.run(lambda: fleet.now > 25.0)
    turns = fleet.turns_ended - before
    assert turns["weighted"] / (turns.total() - turns["weighted"]) == pytest.approx(weight, rel=0.1)
