"""Which replica a step goes to: laws on simulated replicas."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.remote.step_spreading import AVOIDED_S, StepSpreading


def spreading(times: Sequence[float] = (0.0,)) -> StepSpreading:
    """At the last one of the times."""
    return StepSpreading(random.Random(0), lambda: times[-1])


def give(steps: StepSpreading, replicas: list[str], count: int) -> dict[str, int]:
    """Gives as many steps at one time, and counts them by replica."""
    given_to = dict.fromkeys(replicas, 0)
    for _ in range(count):
        given_to[steps.begin(replicas) or "none"] += 1
    return given_to


@given(st.integers(1, 8), st.integers(0, 200))
def test_equally_busy_replicas_get_shares_that_differ_by_at_most_one(replicas: int, count: int) -> None:
    shares = give(spreading(), [f"{number}" for number in range(replicas)], count).values()
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def test_a_replica_that_lost_a_step_gets_none_for_a_while() -> None:
    times = [0.0]
    steps = spreading(times)
    steps.mark_failed("a")
    assert give(steps, ["a", "b"], 4) == {"a": 0, "b": 4}
    assert give(steps, ["a"], 1) == {"a": 1}
    times.append(AVOIDED_S)
    assert give(steps, ["a", "b"], 3) == {"a": 3, "b": 0}


def test_a_replica_that_answers_is_not_avoided_any_longer() -> None:
    steps = spreading()
    steps.mark_failed("a")
    steps.note_answer("a")
    assert give(steps, ["a", "b"], 4) == {"a": 2, "b": 2}


def test_a_replica_that_is_gone_is_forgotten() -> None:
    steps = spreading()
    steps.mark_failed("a")
    steps.forget_all_but(["b"])
    assert set(give(steps, ["a", "b"], 2).values()) == {1}


def test_steps_in_lockstep_share_a_replica_until_all_have_ended() -> None:
    steps = spreading()
    replicas = ["a", "b"]
    first = steps.begin(replicas, "lockstep")
    assert first is not None
    [other] = {"a", "b"} - {first}
    assert [steps.begin(replicas, "lockstep") for _ in range(5)] == [first] * 5
    assert [steps.begin(replicas) for _ in range(3)] == [other] * 3
    for _ in range(6):
        steps.end(first, "lockstep")
    assert steps.begin(replicas) == first
    assert {steps.begin(replicas, "lockstep") for _ in range(2)} == {first}


def test_steps_in_lockstep_move_from_a_replica_that_is_gone() -> None:
    steps = spreading()
    assert steps.begin(["a"], "lockstep") == "a"
    assert steps.begin(["b"], "lockstep") == "b"
    steps.end("a", "lockstep")
    assert steps.begin(["b"], "lockstep") == "b"
    steps.end("b", "lockstep")
    steps.end("b", "lockstep")
    assert give(steps, ["a", "b"], 4) == {"a": 2, "b": 2}


def test_without_replicas_there_is_none() -> None:
    assert spreading().begin([]) is None


def test_ties_are_broken_at_random() -> None:
    assert {StepSpreading(random.Random(seed)).begin(["a", "b", "c"]) for seed in range(50)} == {"a", "b", "c"}
