"""What a health check does with an engine: gives it a token when it is idle, and kills it when it hangs."""

import asyncio
import subprocess
import sys

import pytest

from deployments.failures import GenerationLost, GenerationNotFinite, RolloutFailure
from deployments.generation.engine_health import LEAST_OBSERVATIONS, EngineHangs, EngineHealth, EngineWatch
from tests import virtual_time


class ScriptedEngine:
    """Generates each token of a health check at once, unless it hangs."""

    def __init__(self, timeout_s: float | None = 10.0) -> None:
        self.steps = 0
        self.ongoing = 0
        self.hangs = False
        self.tokens = 0
        self.kills = 0
        self.failure: RolloutFailure | None = None
        self.health = EngineHealth(timeout_s, lambda: (self.steps, self.ongoing, False), self._generate, self._kill)

    async def _generate(self) -> None:
        self.ongoing += 1
        if self.hangs:
            await asyncio.Event().wait()
        self.steps += 1
        self.tokens += 1
        self.ongoing -= 1
        if self.failure is not None:
            raise self.failure

    def _kill(self) -> None:
        self.kills += 1

    async def checked(self, times: int) -> None:
        for _ in range(times):
            self.health.check()
            await asyncio.sleep(5.0)


@pytest.fixture(autouse=True)
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deployments.generation.engine_health.time.monotonic", lambda: asyncio.get_running_loop().time()
    )


def test_an_idle_engine_is_given_a_token_at_every_check() -> None:
    engine = ScriptedEngine()
    virtual_time.run(engine.checked(7))
    assert (engine.tokens, engine.kills) == (7, 0)


def test_a_busy_engine_is_given_nothing() -> None:
    engine = ScriptedEngine(timeout_s=None)
    engine.ongoing = 1
    virtual_time.run(engine.checked(7))
    assert engine.tokens == 0


@pytest.mark.parametrize("ongoing", [0, 3])
def test_an_engine_that_hangs_is_killed_whether_it_was_idle_or_busy(ongoing: int) -> None:
    engine = ScriptedEngine()
    engine.hangs, engine.ongoing = True, ongoing

    async def check() -> None:
        try:
            await engine.checked(9)
        finally:
            engine.health.close()

    with pytest.raises(EngineHangs, match=r"^The engine has work and took no step for 10 s\.$"):
        virtual_time.run(check())
    assert engine.kills == 1


def test_a_token_that_is_not_finite_fails_the_next_check_and_is_tried_again() -> None:
    engine = ScriptedEngine()

    async def check() -> list[bool]:
        failed = []
        for number in range(4):
            engine.failure = GenerationNotFinite("nan") if number < 2 else None
            try:
                await engine.checked(1)
            except GenerationNotFinite:
                failed.append(True)
                await asyncio.sleep(5.0)
            else:
                failed.append(False)
        return failed

    assert virtual_time.run(check()) == [False, True, True, False]


def test_a_token_that_an_update_aborts_says_nothing() -> None:
    engine = ScriptedEngine()
    engine.failure = GenerationLost("aborted")
    virtual_time.run(engine.checked(5))
    assert engine.kills == 0


KILLING = """
import subprocess, sys
import psutil
from deployments.generation.engine_health import kill_child_processes
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
