"""Worker processes: only a call's own processor time counts against it, and whatever else goes wrong is a lost step."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerPool
from tests.virtual_time import end_by_cancellation, runs

pytestmark = pytest.mark.slow

LIMIT_S = 0.5
"""Of processor time."""
LOST_AFTER_S = 30.0


def nothing() -> None:
    """Calls need no preparation."""


def stop_and_burn(seconds: float) -> float:
    """Stops until the process is resumed, then uses `seconds` of processor time. Returns how long all of it took."""
    started = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return time.monotonic() - started


def touch_and_sleep(file: str, seconds: float) -> None:
    Path(file).touch()
    time.sleep(seconds)


def never_return() -> None:
    """Uses the processor and holds the interpreter's lock; no Python code of the process runs meanwhile."""
    10 ** (10**10)


def fail() -> None:
    raise KeyError("board")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, nothing, [__name__], LOST_AFTER_S)
    yield pool
    pool.close()


async def worker_of(pool: WorkerPool) -> psutil.Process:
    """The worker, known to run because it has just returned from a call."""
    return psutil.Process(await pool.run(LIMIT_S, os.getpid))


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the limit of the test bounds the wait."""
    while not condition():
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_call_raises_what_its_function_raises(pool: WorkerPool) -> None:
    with pytest.raises(KeyError, match="board"):
        asyncio.run(pool.run(LIMIT_S, fail))


def test_a_call_beyond_its_processor_time_is_ended_and_the_next_runs(pool: WorkerPool) -> None:
    with pytest.raises(ProcessorTimeExceeded, match=r"^more than 0\.5 s of processor time$"):
        asyncio.run(pool.run(LIMIT_S, never_return))
    assert asyncio.run(pool.run(LIMIT_S, divmod, 1, 1)) == (1, 0)


@runs
async def test_a_call_that_the_machine_holds_up_has_its_result_however_late(pool: WorkerPool) -> None:
    worker = await worker_of(pool)
    calling = asyncio.create_task(pool.run(LIMIT_S, stop_and_burn, 0.4 * LIMIT_S))
    await until(lambda: worker.status() == psutil.STATUS_STOPPED)
    await asyncio.sleep(LIMIT_S)
    worker.resume()
    assert await calling > LIMIT_S


@runs
async def test_a_call_without_a_result_is_lost_and_its_worker_replaced(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = await worker_of(pool)
    monkeypatch.setattr(pool, "lost_after_s", 0.5)
    with pytest.raises(TemporaryFailure, match=r"^A worker process had no result after 0\.5 s\.$"):
        await pool.run(LIMIT_S, time.sleep, 60.0)
    monkeypatch.undo()
    await until(lambda: is_gone(stuck.pid))
    assert await pool.run(LIMIT_S, divmod, 1, 1) == (1, 0)


@runs
async def test_a_worker_that_dies_between_calls_is_replaced(pool: WorkerPool) -> None:
    (await worker_of(pool)).kill()
    # The pool may have noticed already.
    with suppress(TemporaryFailure):
        await pool.run(LIMIT_S, nothing)
    assert await pool.run(LIMIT_S, divmod, 1, 1) == (1, 0)


@runs
async def test_a_worker_that_dies_during_a_call_loses_it(pool: WorkerPool, tmp_path: Path) -> None:
    worker, begun = await worker_of(pool), tmp_path / "begun"
    calling = asyncio.create_task(pool.run(LIMIT_S, touch_and_sleep, str(begun), 60.0))
    await until(begun.exists)
    worker.kill()
    with pytest.raises(TemporaryFailure, match=r"^A worker process ended with exit code -9\.$"):
        await calling


@runs
async def test_the_call_of_a_cancelled_caller_ends_and_its_worker_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    worker, begun = await worker_of(pool), tmp_path / "begun"
    abandoned = asyncio.create_task(pool.run(LIMIT_S, touch_and_sleep, str(begun), 0.3))
    await until(begun.exists)
    await end_by_cancellation(abandoned)
    assert await worker_of(pool) == worker


@pytest.mark.parametrize("function", ["nothing", "never_return"], ids=["idle", "busy"])
def test_the_worker_ends_when_its_parent_is_killed(function: str, tmp_path: Path) -> None:
    program = f"""
        import asyncio, os
        from rollout_env.worker_pool import WorkerPool
        from tests.clients.rollout_env.test_worker_pool import {function}, nothing

        async def main():
            pool = WorkerPool(1, nothing, [], 60.0)
            worker = await pool.run(1.0, os.getpid)
            asyncio.get_running_loop().call_later(0.3, lambda: print(worker, flush=True))
            await pool.run(2.0, {function})
            await asyncio.sleep(60)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(program))
    same_imports = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, cwd=tmp_path, env=same_imports, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not is_gone(worker)
        parent.kill()
    asyncio.run(until(lambda: is_gone(worker)))
