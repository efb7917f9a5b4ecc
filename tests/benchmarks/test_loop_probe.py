"""What the probe of an event loop calls a gap."""

import asyncio
import time

import uvloop

from benchmarks.loop_probe import LoopProbe

BUSY_S = 0.02


def be_busy() -> None:
    """In each iteration of the running event loop, for its life."""
    until = time.thread_time() + BUSY_S
    while time.thread_time() < until:
        pass
    asyncio.get_running_loop().call_soon(be_busy)


async def longest_gap_ms() -> float:
    probe = LoopProbe(with_stacks=False)
    asyncio.get_running_loop().call_soon(be_busy)
    await asyncio.sleep(3 * BUSY_S)
    probe.restart()
    await asyncio.sleep(10 * BUSY_S)
    gap: float = probe.gaps()["cpu_ms"]
    return gap


def test_a_gap_is_one_iteration_of_the_event_loop_and_not_two() -> None:
    assert 1000 * BUSY_S <= uvloop.run(longest_gap_ms()) < 1.9 * 1000 * BUSY_S
