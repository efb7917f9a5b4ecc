"""The update lease: one holder at a time, never leaked by a cancelled caller."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.failures import UpdateUnderWay
from deployments.policy.replica_registry import _UpdateLock
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import SwitchOptions
from tests import virtual_time
from tests.virtual_time import run, settled

REFUSE = SwitchOptions(if_busy="refuse")


@virtual_time.test
async def test_a_block_that_fails_releases_the_lease() -> None:
    lock = _UpdateLock()
    with pytest.raises(ValueError, match="failed"):
        async with lock.lease("an update"):
            raise ValueError("failed")
    lock.refuse_if_busy(REFUSE)
    async with lock.lease():
        pass


async def enter(lock: _UpdateLock) -> None:
    async with lock.lease():
        pass


@pytest.mark.parametrize("is_woken", [False, True])
@virtual_time.test
async def test_a_caller_that_is_cancelled_while_it_waits_does_not_hold_the_lease(is_woken: bool) -> None:
    lock = _UpdateLock()
    async with lock.lease():
        cancelled, waiting = (asyncio.create_task(enter(lock)) for _ in range(2))
        await settled()
        if not is_woken:
            cancelled.cancel()
    # Of two that wait, the first one has been woken by the end of the block, and has not run yet.
    if is_woken:
        cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await waiting
    async with asyncio.timeout(1.0):
        await enter(lock)


@virtual_time.test
async def test_only_a_holder_with_an_activity_refuses_those_who_do_not_wait() -> None:
    lock = _UpdateLock()
    lock.refuse_if_busy(REFUSE)
    async with lock.lease():
        lock.refuse_if_busy(REFUSE)
    async with lock.lease("an update is under way"):
        lock.refuse_if_busy(SwitchOptions())
        with pytest.raises(UpdateUnderWay) as refused:
            lock.refuse_if_busy(REFUSE)
        message = "an update is under way; wait for it, or say if_busy=wait"
        assert refused.value.problems == (FieldProblem(field="if_busy", message=message, value="refuse"),)
    lock.refuse_if_busy(REFUSE)


@dataclass(frozen=True)
class Caller:
    begins_at: int
    holds_s: int
    is_cancelled_at: int | None


seconds = st.integers(0, 8)


@given(st.lists(st.builds(Caller, seconds, seconds, st.none() | seconds), max_size=8))
def test_whoever_waits_holds_or_is_cancelled_there_is_one_holder_and_at_last_none(
    callers: list[Caller],
) -> None:
    async def story() -> None:
        lock = _UpdateLock()
        holders: set[Caller] = set()

        async def hold(caller: Caller) -> None:
            assert not holders
            holders.add(caller)
            try:
                await asyncio.sleep(caller.holds_s)
            finally:
                holders.remove(caller)

        async def call(caller: Caller) -> None:
            await asyncio.sleep(caller.begins_at)
            async with lock.lease("busy"):
                await hold(caller)

        calls = [asyncio.create_task(call(caller)) for caller in callers]
        loop = asyncio.get_running_loop()
        for caller, task in zip(callers, calls, strict=True):
            if caller.is_cancelled_at is not None:
                loop.call_at(caller.is_cancelled_at, task.cancel)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        lock.refuse_if_busy(REFUSE)
        async with asyncio.timeout(0.5):
            await enter(lock)

    run(story())
