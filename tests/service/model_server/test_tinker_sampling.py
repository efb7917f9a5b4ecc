"""Answers that are asked for later: who gets them, how long they are kept, and what becomes of those that are not."""

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import pytest

from service.model_server.tinker_sampling import _BYTES_OF_A_FUTURE, _FORGET_AFTER_S, _FutureAnswer, _Futures
from service.problems import RequestProblem


class Work:
    """Answers with `body` after `after_s` seconds."""

    def __init__(self, body: bytes = b"done", after_s: float = 0.0) -> None:
        self._body = body
        self._after_s = after_s
        self.started = 0
        self.ended = 0

    async def __call__(self) -> _FutureAnswer:
        self.started += 1
        await asyncio.sleep(self._after_s)
        return _FutureAnswer(self._body, "text/plain")

    def end(self) -> None:
        self.ended += 1


def start(futures: _Futures, name: str, work: Work, namespace: str = "team") -> str:
    return futures.start(namespace, name, work, work.end)


async def is_lost(futures: _Futures, future_id: str, namespace: str = "team") -> bool:
    try:
        await futures.answer(namespace, future_id, 0)
    except RequestProblem as problem:
        return problem.problem.status == HTTPStatus.GONE
    return False


async def test_an_answer_is_waited_for_and_can_be_asked_for_again() -> None:
    futures, work = _Futures(), Work(after_s=5)
    future_id = start(futures, "a", work)
    assert await futures.answer("team", future_id, 4) is None
    assert work.ended == 0
    for _ in range(2):
        assert await futures.answer("team", future_id, 4) == _FutureAnswer(b"done", "text/plain")
    assert (work.started, work.ended) == (1, 1)


async def test_a_future_is_seen_by_its_own_key_alone() -> None:
    futures, work = _Futures(), Work(after_s=1)
    future_id = start(futures, "a", work)
    futures.cancel("others", future_id)
    assert await is_lost(futures, future_id, "others")
    assert not await is_lost(futures, future_id)


async def test_work_that_nobody_asks_for_is_cancelled_and_forgotten() -> None:
    futures, work = _Futures(), Work(after_s=10 * _FORGET_AFTER_S)
    future_id = start(futures, "a", work)
    await futures.answer("team", future_id, 2 * _FORGET_AFTER_S)
    await asyncio.sleep(_FORGET_AFTER_S - 1)
    assert work.ended == 0
    await asyncio.sleep(2)
    assert work.ended == 1
    assert await is_lost(futures, future_id)


async def test_the_answers_that_ended_first_make_room_for_others() -> None:
    futures = _Futures(most_bytes=2 * (_BYTES_OF_A_FUTURE + 100))
    slow = start(futures, "slow", Work(b"s" * 100, after_s=2))
    ids = [start(futures, name, Work(name.encode() * 100, after_s=1)) for name in "ab"]
    await asyncio.sleep(1.5)
    assert not await is_lost(futures, ids[0])
    await asyncio.sleep(1)
    assert [await is_lost(futures, each) for each in (*ids, slow)] == [True, False, False]
    futures.cancel("team", ids[1])
    later = start(futures, "later", Work(b"l" * 100))
    await asyncio.sleep(1)
    assert [await is_lost(futures, each) for each in (slow, later)] == [False, False]


@pytest.mark.parametrize("gone", [False, True])
async def test_a_future_of_another_replica_is_waited_for_until_that_has_died(gone: bool) -> None:
    asked = list[str]()

    def is_gone(owner: str) -> bool:
        asked.append(owner)
        return gone

    futures = _Futures(is_gone=is_gone)
    own, _, replica = start(futures, "a", Work()).partition("@")
    assert await is_lost(futures, f"{own}@other") is gone
    assert await is_lost(futures, f"unknown@{replica}")
    assert asked == ["other"]


async def test_work_that_raises_says_so_to_whoever_asks() -> None:
    async def broken() -> _FutureAnswer:
        raise ValueError("broken")

    futures, ends = _Futures(), list[int]()
    work: Callable[[], Coroutine[Any, Any, _FutureAnswer]] = broken
    future_id = futures.start("team", "a", work, lambda: ends.append(1))
    with pytest.raises(ValueError, match="broken"):
        await futures.answer("team", future_id, 1)
    assert ends == [1]
