"""When an engine is taken for hung."""

import pytest

from deployments.generation.engine_health import LEAST_OBSERVATIONS, EngineWatch


def test_an_engine_that_has_work_and_takes_no_step_hangs_after_the_timeout() -> None:
    watch = EngineWatch(10.0)
    assert watch.observe(0.0, steps=5, ongoing=1, is_paused=False) == "moves"
    assert [watch.observe(now, 5, 1, False) for now in (1.0, 6.0, 10.9, 11.0)] == ["moves", "moves", "moves", "hangs"]


def test_each_step_begins_the_timeout_anew() -> None:
    watch = EngineWatch(10.0)
    assert {watch.observe(5.0 * number, number // 2, 1, False) for number in range(40)} == {"moves"}


@pytest.mark.parametrize(
    ("ongoing", "is_paused", "verdict"), [(0, False, "idle"), (1, True, "moves"), (0, True, "moves")]
)
def test_an_engine_without_work_or_paused_never_hangs(ongoing: int, is_paused: bool, verdict: str) -> None:
    watch = EngineWatch(10.0)
    watch.observe(0.0, 5, 1, False)
    assert {watch.observe(100.0 * number, 5, ongoing, is_paused) for number in range(1, 9)} == {verdict}
    assert watch.observe(1000.0, 5, 1, False) == "moves"


def test_an_observer_that_stalled_itself_looks_again_before_it_judges() -> None:
    watch = EngineWatch(10.0)
    watch.observe(0.0, 5, 1, False)
    watch.observe(1.0, 5, 1, False)
    assert watch.observe(100.0, 5, 1, False) == "moves"
    assert watch.observe(101.0, 9, 1, False) == "moves"
    verdicts = [watch.observe(200.0 + number, 9, 1, False) for number in range(LEAST_OBSERVATIONS)]
    assert set(verdicts) == {"moves"}


def test_without_a_timeout_no_engine_hangs() -> None:
    watch = EngineWatch(None)
    assert {watch.observe(100.0 * number, 5, 1, False) for number in range(9)} == {"moves"}


def test_an_engine_without_a_step_is_suspected_after_a_third_of_the_timeout() -> None:
    watch = EngineWatch(30.0)
    for now in (0.0, 5.0, 10.0):
        watch.observe(now, 5, 1, False)
    assert [watch.suspected_for(now, 5, 1, False) for now in (14.9, 15.0, 20.0)] == [None, 10.0, 15.0]


@pytest.mark.parametrize(("steps", "ongoing", "is_paused"), [(6, 1, False), (5, 0, False), (5, 1, True)])
def test_an_engine_that_has_moved_is_idle_or_paused_is_not_suspected(steps: int, ongoing: int, is_paused: bool) -> None:
    watch = EngineWatch(30.0)
    for now in (0.0, 5.0, 10.0):
        watch.observe(now, 5, 1, False)
    assert watch.suspected_for(100.0, steps, ongoing, is_paused) is None


def test_asking_does_not_count_as_seeing_the_engine() -> None:
    watch = EngineWatch(30.0)
    watch.observe(0.0, 5, 1, False)
    watch.observe(5.0, 5, 1, False)
    assert [watch.suspected_for(100.0, 5, 1, False) for _ in range(5)] == [None] * 5


def test_without_a_timeout_no_engine_is_suspected() -> None:
    watch = EngineWatch(None)
    for number in range(9):
        watch.observe(100.0 * number, 5, 1, False)
    assert watch.suspected_for(1000.0, 5, 1, False) is None
