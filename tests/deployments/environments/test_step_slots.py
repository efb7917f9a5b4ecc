"""Slots of steps: never too many at once, and nothing that is cancelled keeps one."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.environments.sessions import FairSlots
from tests import virtual_time

STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 3), st.none() | st.integers(0, 6)), max_size=20
)
"""Of each step its request, when it comes, how long it runs, and after how long its caller cancels it."""


@given(st.integers(1, 4), STEPS)
def test_steps_run_once_and_no_more_than_the_limit(limit: int, steps: list[tuple[str, int, int, int | None]]) -> None:
    slots = FairSlots(limit)
    running, most, ran = 0, 0, Counter[int]()

    async def run_step(number: int) -> None:
        nonlocal running, most
        request_id, comes_at, runs_s, _ = steps[number]
        await asyncio.sleep(comes_at)
        await slots.acquire(request_id)
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(runs_s)
            ran[number] += 1
        finally:
            running -= 1
            slots.release()

    async def run() -> None:
        tasks = [asyncio.create_task(run_step(number)) for number in range(len(steps))]
        for task, (_, _, _, cancelled_after_s) in zip(tasks, steps, strict=True):
            if cancelled_after_s is not None:
                asyncio.get_running_loop().call_later(cancelled_after_s, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        # All slots are free again.
        async with asyncio.timeout(1):
            for _ in range(limit):
                await slots.acquire("last")

    virtual_time.run(run())
    assert running == 0
    assert most <= limit
    assert {number for number, (*_, cancelled) in enumerate(steps) if cancelled is None} <= ran.keys()
    assert set(ran.values()) <= {1}
