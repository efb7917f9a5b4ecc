"""The clock of tests jumps over what is slept through, and over nothing else."""

import asyncio
import threading

import pytest

from tests import virtual_time


@virtual_time.test
async def test_the_clock_waits_for_a_thread_whose_task_was_cancelled() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(virtual_time.STUCK_AFTER_S)
        has_ended.set()

    task = asyncio.create_task(asyncio.to_thread(work))
    await virtual_time.settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Nothing else is left to do, so the clock would jump over the seconds.
    threading.Timer(0.2, may_end.set).start()
    await asyncio.sleep(600)
    assert has_ended.is_set()
    assert virtual_time.now() == 600.0
