"""When a replica is unhealthy: its engine hangs, or its log-probabilities are not finite."""

import subprocess
import sys

import pytest

from deployments.generation.health import (
    LEAST_GROUPS,
    LEAST_OBSERVATIONS,
    MOST_NOT_FINITE,
    RECENT_GENERATIONS,
    EngineWatch,
    OutputHealth,
    ReplicaUnusable,
)

KILLING = """
import subprocess, sys
import psutil
from deployments.generation.health import kill_child_processes
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
psutil.Process(child.pid).suspend()
kill_child_processes()
print(child.wait(timeout=60))
"""


def test_killing_the_children_ends_stopped_ones_too() -> None:
    """In a process of its own: this one may have other children."""
    command = [sys.executable, "-c", KILLING]
    assert subprocess.run(command, capture_output=True, text=True, timeout=150, check=True).stdout == "-9\n"


def test_an_engine_that_has_work_and_takes_no_step_hangs_after_the_timeout() -> None:
    watch = EngineWatch(10.0)
    assert not watch.hangs(0.0, steps=5, ongoing=1, is_paused=False)
    assert [watch.hangs(now, 5, 1, False) for now in (1.0, 6.0, 10.9, 11.0)] == [False, False, False, True]


def test_each_step_begins_the_timeout_anew() -> None:
    watch = EngineWatch(10.0)
    assert not any(watch.hangs(5.0 * number, number // 2, 1, False) for number in range(40))


@pytest.mark.parametrize(("ongoing", "is_paused"), [(0, False), (1, True), (0, True)])
def test_an_engine_without_work_or_paused_never_hangs(ongoing: int, is_paused: bool) -> None:
    watch = EngineWatch(10.0)
    watch.hangs(0.0, 5, 1, False)
    assert not any(watch.hangs(100.0 * number, 5, ongoing, is_paused) for number in range(1, 9))
    assert not watch.hangs(1000.0, 5, 1, False)


def test_an_observer_that_stalled_itself_looks_again_before_it_judges() -> None:
    watch = EngineWatch(10.0)
    watch.hangs(0.0, 5, 1, False)
    watch.hangs(1.0, 5, 1, False)
    assert not watch.hangs(100.0, 5, 1, False)
    assert not watch.hangs(101.0, 9, 1, False)
    assert not any(watch.hangs(200.0 + number, 9, 1, False) for number in range(LEAST_OBSERVATIONS))


def test_without_a_timeout_no_engine_hangs() -> None:
    watch = EngineWatch(None)
    assert not any(watch.hangs(100.0 * number, 5, 1, False) for number in range(9))


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
    with pytest.raises(ReplicaUnusable) as raised:
        after(FINE, *faulty(MOST_NOT_FINITE, LEAST_GROUPS)).check()
    assert str(raised.value) == "16 of the last 17 generations had log-probabilities that are NaN or infinite."


def test_the_rollouts_of_few_prompts_do_not_make_it_unhealthy() -> None:
    after(*faulty(RECENT_GENERATIONS, LEAST_GROUPS - 1)).check()


def test_only_the_recent_generations_count() -> None:
    others = RECENT_GENERATIONS - MOST_NOT_FINITE
    with pytest.raises(ReplicaUnusable):
        after(*faulty(MOST_NOT_FINITE, LEAST_GROUPS), *[FINE] * others).check()
    after(*faulty(MOST_NOT_FINITE, LEAST_GROUPS), *[FINE] * (others + 1)).check()
