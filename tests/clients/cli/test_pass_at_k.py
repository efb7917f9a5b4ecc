"""pass@k: exact values, no bias, and intervals that hold what they promise."""

from itertools import combinations
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import SampleResult
from rollout_client.cli.commands.evaluate import PassAtK, estimate, pass_at_k
from rollout_client.results import wilson_interval
from tests.clients.message_logs import generated, rollout


def group(*rewards: float | None, task_name: str = "math") -> list[SampleResult]:
    """A reward of `None` is a rollout that failed."""
    statuses = ["error" if reward is None else "completed" for reward in rewards]
    return [
        rollout(generated(1), reward=reward, generation_index=generation, task_name=task_name, status=status)
        for generation, (reward, status) in enumerate(zip(rewards, statuses, strict=True))
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_the_estimate_is_the_share_of_draws_that_hold_a_pass(passes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passes)))
    draws = [any(drawn) for drawn in combinations(passes, k)]
    assert isclose(estimate(len(passes), sum(passes), k), sum(draws) / len(draws), abs_tol=1e-12)


def test_values_are_means_over_prompts_by_task_and_for_all() -> None:
    groups = [group(1.0, 0.0), group(0.0, 0.0), group(1.0, 0.9, task_name="code")]
    found = pass_at_k(groups, [1, 2], passes_at=1.0, confidence=0.95)
    assert [(row.task_name, row.k, row.value, row.prompts) for row in found] == [
        ("math", 1, 0.25, 2),
        ("math", 2, 0.5, 2),
        ("code", 1, 0.5, 1),
        ("code", 2, 1.0, 1),
        ("all", 1, pytest.approx(1 / 3), 3),
        ("all", 2, pytest.approx(2 / 3), 3),
    ]


def test_a_prompt_with_too_few_final_rewards_is_left_out_and_counted() -> None:
    found = pass_at_k([group(None, 1.0), group(None, None)], [1, 2], passes_at=1.0, confidence=0.95)
    assert [(row.value, row.prompts, row.left_out) for row in found] == [(1.0, 1, 1), (None, 0, 2)]
    assert found[1] == PassAtK("math", 2, None, None, None, 0, 2, 0.0)


def test_each_task_has_its_ratio_of_clipped_responses() -> None:
    cut, whole = (rollout(generated(1, finish_reason=reason)) for reason in ("length", "stop"))
    other = rollout(generated(1, finish_reason="length"), task_name="code")
    found = pass_at_k([[cut, whole], [whole, whole], [other]], [1], passes_at=1.0, confidence=0.95)
    assert [(row.task_name, row.clipped_ratio) for row in found] == [("math", 0.25), ("code", 1.0), ("all", 0.4)]


def test_the_interval_is_wilsons() -> None:
    low, high = wilson_interval(0.7, 10, 0.95)
    assert (round(low, 4), round(high, 4)) == (0.3968, 0.8922)


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0.5, 0.99))
def test_an_interval_within_0_and_1_holds_the_mean_and_has_a_width(count: int, mean: float, confidence: float) -> None:
    low, high = wilson_interval(mean, count, confidence)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert low < high
