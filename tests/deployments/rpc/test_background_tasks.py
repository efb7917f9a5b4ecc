"""Calls that callers share, and loops that outlive a loss."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from deployments.rpc.background_tasks import BackgroundTasks, SharedCalls, until_back
from tests import virtual_time


async def test_callers_share_a_call_and_one_that_leaves_does_not_cancel_it() -> None:
    calls: list[int] = []

    async def call() -> int:
        calls.append(len(calls))
        await asyncio.sleep(1)
        return calls[-1]

    shared = SharedCalls(lambda _: call())
    leaving, *staying = [asyncio.create_task(shared.result()) for _ in range(3)]
    await asyncio.sleep(0.5)
    leaving.cancel()
    assert [*(await asyncio.gather(*staying)), await shared.result()] == [0, 0, 1]


async def test_a_shared_call_that_failed_is_made_again() -> None:
    async def call() -> None:
        raise LookupError

    shared = SharedCalls(lambda _: call())
    for _ in range(2):
        with pytest.raises(LookupError):
            await shared.result()


async def test_work_is_repeated_until_what_it_needs_is_back() -> None:
    outcomes: list[Exception | None] = [KeyError(), KeyError(), None, KeyError(), None]
    told: list[bool] = []

    async def work() -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    await until_back(work, KeyError, 2.0, lambda _, is_first: told.append(is_first), lambda: bool(outcomes))
    assert (virtual_time.now(), told) == (6.0, [True, False, True])


def test_what_is_no_loss_is_raised() -> None:
    with pytest.raises(ValueError, match=r"^$"):
        virtual_time.run(until_back(AsyncMock(side_effect=ValueError), KeyError, 2.0))


async def test_tasks_are_waited_for_to_their_end() -> None:
    tasks = BackgroundTasks()
    tasks.start(asyncio.sleep(1))
    tasks.start(asyncio.sleep(2))
    running = len(tasks)
    await tasks.ended()
    assert (running, len(tasks)) == (2, 0)
