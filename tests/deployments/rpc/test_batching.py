"""Batched calls: each gets its result, and results of many jobs are yielded as they finish. In virtual time."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from unittest.mock import AsyncMock

import pytest

from deployments.failures import GenerationLost, RolloutFailure
from deployments.rpc.batching import (
    MOST_BYTES_PER_MESSAGE,
    CallBatcher,
    at_once,
    group_commit,
    results_as_completed,
    results_of,
)
from tests import virtual_time

CANCELLED = GenerationLost("cancelled")


def len_of(result: str | RolloutFailure) -> int:
    return len(str(result))


class Panic(BaseException):
    """What a library in Rust raises when it panics: no `Exception`."""


async def job(name: str, seconds: float) -> str | RolloutFailure:
    await asyncio.sleep(seconds)
    return name


async def panicking() -> str | RolloutFailure:
    raise Panic


async def cancelling_itself() -> str | RolloutFailure:
    raise asyncio.CancelledError


async def test_results_of_one_iteration_are_yielded_together() -> None:
    jobs = [job("a", 2), job("b", 1), job("c", 2), job("d", 3)]
    batches = [(virtual_time.now(), sorted(batch)) async for batch in results_as_completed(jobs, CANCELLED, len_of)]
    assert batches == [(1, [(1, "b")]), (2, [(0, "a"), (2, "c")]), (3, [(3, "d")])]


async def test_results_that_come_while_a_batch_is_read_are_yielded_together() -> None:
    batches = []
    async for batch in results_as_completed([job("a", 1), job("b", 2), job("c", 3)], CANCELLED, len_of):
        batches.append(batch)
        await asyncio.sleep(10)
    assert batches == [[(0, "a")], [(1, "b"), (2, "c")]]


async def test_results_above_the_bound_of_a_message_are_yielded_in_several() -> None:
    half = "x" * (MOST_BYTES_PER_MESSAGE // 2)
    texts = [half, half, "c", 3 * half, "e"]
    batches = [batch async for batch in results_as_completed([job(text, 0) for text in texts], CANCELLED, len_of)]
    assert batches == [[(place, texts[place]) for place in places] for places in ([0, 1], [2], [3], [4])]


async def test_a_job_that_is_cancelled_or_panics_has_a_failure_as_its_result(caplog: pytest.LogCaptureFixture) -> None:
    finished = results_as_completed([cancelling_itself(), panicking(), job("c", 1)], CANCELLED, len_of)
    results = {place: result async for batch in finished for place, result in batch}
    assert results[0] is CANCELLED
    assert (type(results[1]), str(results[1])) == (RolloutFailure, "Panic was raised.")
    assert results[2] == "c"
    [record] = caplog.records
    assert (record.levelno, record.exc_info and record.exc_info[0]) == (logging.WARNING, Panic)


async def test_closing_cancels_the_jobs_that_still_run() -> None:
    cancelled_at: list[float] = []

    async def endless() -> str | RolloutFailure:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled_at.append(virtual_time.now())
            raise
        return "never"

    async with aclosing(results_as_completed([job("a", 1), endless(), endless()], CANCELLED, len_of)) as batches:
        assert await anext(batches) == [(0, "a")]
    await virtual_time.settled()
    assert cancelled_at == [1, 1]


class Other:
    """The other end: doubles numbers, and refuses 3."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.broken: Exception | None = None

    async def doubled(self, numbers: Sequence[int]) -> list[int | Exception]:
        self.messages.append(list(numbers))
        if self.broken is not None:
            raise self.broken
        return await results_of([self._doubled(number) for number in numbers])

    async def _doubled(self, number: int) -> int:
        if number == 3:
            raise ValueError("not 3")
        return 2 * number


def caller(other: Other, bytes_each: int = 1) -> CallBatcher[int, int]:
    return CallBatcher(at_once(other.doubled), lambda _: bytes_each)


async def results(calling: CallBatcher[int, int], *numbers: int) -> list[int | BaseException]:
    return await asyncio.gather(*map(calling.call, numbers), return_exceptions=True)


async def test_calls_of_one_iteration_go_together_and_later_ones_anew() -> None:
    calling = caller(other := Other())
    assert await results(calling, 1, 2) == [2, 4]
    assert await calling.call(5) == 10
    assert other.messages == [[1, 2], [5]]


def test_what_one_call_raises_is_its_own() -> None:
    first, second, third = asyncio.run(results(caller(Other()), 1, 3, 4))
    assert (first, str(second), third) == (2, "not 3", 8)


def test_what_breaks_the_message_is_raised_by_all_of_its_calls() -> None:
    other = Other()
    other.broken = LookupError("gone")
    assert asyncio.run(results(caller(other), 1, 2)) == [other.broken] * 2


async def test_a_call_that_is_cancelled_keeps_no_other_from_its_result() -> None:
    calling = caller(other := Other())
    never, late, kept = (asyncio.ensure_future(calling.call(number)) for number in (1, 2, 4))
    await asyncio.sleep(0)
    never.cancel()
    await asyncio.sleep(0)
    late.cancel()
    assert await kept == 8
    assert other.messages in ([[2, 4]], [[1, 2, 4]])


def test_a_cancellation_at_the_other_end_ends_the_message() -> None:
    cancelled = AsyncMock(side_effect=asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(results_of([cancelled()]))


async def test_a_group_commit_makes_one_call_at_a_time_in_order() -> None:
    calls: list[tuple[float, list[int]]] = []

    async def commit(numbers: list[int]) -> list[int | Exception]:
        calls.append((virtual_time.now(), numbers))
        await asyncio.sleep(1)
        return [ValueError("not 3") if number == 3 else 2 * number for number in numbers]

    batcher: CallBatcher[int, int] = group_commit(commit)
    first = batcher.add(1)
    await asyncio.sleep(0.5)
    later = [batcher.add(number) for number in (2, 3, 4)]
    nobody_waits = batcher.add(5)
    assert (await first, await later[0], await later[2]) == (2, 4, 8)
    with pytest.raises(ValueError, match="not 3"):
        await later[1]
    assert calls == [(0, [1]), (1, [2, 3, 4, 5])]
    assert nobody_waits.result() == 10
