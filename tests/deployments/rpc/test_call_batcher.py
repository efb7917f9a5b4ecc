"""Calls of one moment go in one message, and each gets its own result."""

import asyncio
from collections.abc import Sequence

import pytest

from deployments.rpc.batching import CallBatcher, at_once, results_of


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


def test_calls_of_one_iteration_go_together_and_later_ones_anew() -> None:
    other = Other()

    async def story() -> None:
        calling = caller(other)
        assert await results(calling, 1, 2) == [2, 4]
        assert await calling.call(5) == 10

    asyncio.run(story())
    assert other.messages == [[1, 2], [5]]


def test_what_one_call_raises_is_its_own() -> None:
    first, second, third = asyncio.run(results(caller(Other()), 1, 3, 4))
    assert (first, str(second), third) == (2, "not 3", 8)


def test_what_breaks_the_message_is_raised_by_all_of_its_calls() -> None:
    other = Other()
    other.broken = LookupError("gone")
    assert asyncio.run(results(caller(other), 1, 2)) == [other.broken] * 2


def test_a_call_that_was_cancelled_at_once_is_not_sent_and_one_that_is_under_way_keeps_no_other_from_its_result() -> (
    None
):
    other = Other()

    async def story() -> int:
        calling = caller(other)
        never, late, kept = (asyncio.ensure_future(calling.call(number)) for number in (1, 2, 4))
        await asyncio.sleep(0)
        never.cancel()
        await asyncio.sleep(0)
        late.cancel()
        return await kept

    assert asyncio.run(story()) == 8
    assert other.messages in ([[2, 4]], [[1, 2, 4]])


def test_a_cancellation_at_the_other_end_ends_the_message() -> None:
    async def cancelled() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(results_of([cancelled()]))
