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


WORKS, IDLE, PAUSED = (1, False), (0, False), (1, True)


@pytest.mark.parametrize(
    ("timeout_s", "seen", "hangs_at"),
    [
        (10.0, [(now, 5, WORKS) for now in (0.0, 1.0, 6.0, 10.9, 11.0)], [11.0]),
        (10.0, [(5.0 * number, number // 2, WORKS) for number in range(40)], []),
        *((10.0, [(100.0 * number, 5, state) for number in range(9)], []) for state in (IDLE, PAUSED, (0, True))),
        (10.0, [(0.0, 5, WORKS), (100.0, 5, IDLE), (1000.0, 5, WORKS)], []),
        # The observer has stalled itself: it looks again before it judges.
        (10.0, [(0.0, 5, WORKS), (1.0, 5, WORKS), (100.0, 5, WORKS), (101.0, 9, WORKS)], []),
        (10.0, [(0.0, 5, WORKS), *((200.0 + number, 9, WORKS) for number in range(LEAST_OBSERVATIONS))], []),
        (None, [(100.0 * number, 5, WORKS) for number in range(9)], []),
    ],
)
def test_an_engine_that_has_work_and_takes_no_step_hangs_after_the_timeout(
    timeout_s: float | None, seen: list[tuple[float, int, tuple[int, bool]]], hangs_at: list[float]
) -> None:
    watch = EngineWatch(timeout_s)
    assert [now for now, steps, state in seen if watch.hangs(now, steps, *state)] == hangs_at


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
