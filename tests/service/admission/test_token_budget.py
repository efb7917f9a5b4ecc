"""Tokens a minute: what is saved up, what is owed, and the law that bounds what is used."""

from hypothesis import given
from hypothesis import strategies as st

from service.admission.key_usage import TokenBudget


def test_a_minutes_worth_is_there_at_the_start_and_no_more_is_saved_up() -> None:
    budget = TokenBudget(60, now=0.0)
    assert budget.wait_s(1000.0) == 0
    budget.charge(60, 1000.0)
    assert budget.wait_s(1000.0) == 1.0


def test_what_is_owed_is_waited_for() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(90, 0.0)
    assert budget.wait_s(0.0) == 31.0
    assert budget.wait_s(20.0) == 11.0
    assert budget.wait_s(31.0) == 0


def test_what_is_given_back_can_be_used_and_is_not_saved_up_beyond_a_minute() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(90, 0.0)
    budget.charge(-30, 0.0)
    assert budget.wait_s(0.0) == 1.0
    budget.charge(-1000, 0.0)
    budget.charge(60, 0.0)
    assert budget.wait_s(0.0) == 1.0


def test_a_changed_quota_forgives_nothing_that_is_owed() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(120, 0.0)
    budget.change(600, 0.0)
    assert budget.wait_s(0.0) == 6.1
    budget.change(30, 0.0)
    assert budget.wait_s(0.0) == 122.0


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20_000)), max_size=50))
def test_no_more_is_used_than_the_quota_allows_and_one_charge(
    per_minute: int, steps: list[tuple[float, float]]
) -> None:
    budget, now, used, last = TokenBudget(per_minute, 0.0), 0.0, 0.0, 0.0
    for seconds, tokens in steps:
        now += seconds
        if budget.wait_s(now) == 0:
            budget.charge(tokens, now)
            used, last = used + tokens, tokens
            assert used - last <= per_minute * (1 + now / 60) * (1 + 1e-9)
