"""When a replica is unhealthy by what it generates."""

import pytest

from deployments.generation.output_health import (
    LEAST_GROUPS,
    MOST_NOT_FINITE,
    RECENT_GENERATIONS,
    OutputHealth,
    OutputsNotFinite,
)


def after(*generations: tuple[str, bool]) -> OutputHealth:
    health = OutputHealth()
    for group, is_finite in generations:
        health.record(group, is_finite)
    return health


def faulty(count: int, groups: int) -> list[tuple[str, bool]]:
    return [(f"group {number % groups}", False) for number in range(count)]


FINE = ("fine", True)


def test_too_many_that_are_not_finite_make_it_unhealthy() -> None:
    after(*faulty(MOST_NOT_FINITE - 1, LEAST_GROUPS)).check()
    with pytest.raises(OutputsNotFinite) as raised:
        after(FINE, *faulty(MOST_NOT_FINITE, LEAST_GROUPS)).check()
    assert str(raised.value) == "16 of the last 17 generations had log-probabilities that are NaN or infinite."


def test_the_rollouts_of_few_prompts_do_not_make_it_unhealthy() -> None:
    after(*faulty(RECENT_GENERATIONS, LEAST_GROUPS - 1)).check()


def test_only_the_recent_generations_count() -> None:
    others = RECENT_GENERATIONS - MOST_NOT_FINITE
    with pytest.raises(OutputsNotFinite):
        after(*faulty(MOST_NOT_FINITE, LEAST_GROUPS), *[FINE] * others).check()
    after(*faulty(MOST_NOT_FINITE, LEAST_GROUPS), *[FINE] * (others + 1)).check()
