"""Heartbeats of a replica, and the calls that it gives up when an ingress replica has died. In virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from deployments.rpc import liveness
from deployments.rpc.liveness import POLL_S, CallerWatch, Heartbeats, Listener
from tests import virtual_time


def woken(streams: dict[str, asyncio.Event]) -> list[str]:
    """The names of the streams that were woken since the last call."""
    names = [name for name, wake in streams.items() if wake.is_set()]
    for wake in streams.values():
        wake.clear()
    return names


A = Listener("a")


async def test_each_second_one_stream_of_each_replica_and_its_caller_is_woken() -> None:
    heartbeats = Heartbeats()
    streams = {name: asyncio.Event() for name in ("a1", "a2", "b1", "a of r")}
    with ExitStack() as opened:
        for name, wake in streams.items():
            opened.enter_context(heartbeats.open_stream(Listener(name[0], "r" if name == "a of r" else ""), wake))
        assert heartbeats.callers == {"a", "b"}
        await asyncio.sleep(0.99)
        assert woken(streams) == []
        await asyncio.sleep(0.02)
        assert woken(streams) == ["a1", "b1", "a of r"]
        await asyncio.sleep(1)
        assert woken(streams) == ["a1", "b1", "a of r"]


async def test_a_stream_that_was_closed_is_not_woken_but_another_of_its_caller() -> None:
    heartbeats = Heartbeats()
    streams = {name: asyncio.Event() for name in ("a1", "a2")}
    with heartbeats.open_stream(A, streams["a2"]):
        with heartbeats.open_stream(A, streams["a1"]):
            pass
        await asyncio.sleep(1.5)
        assert woken(streams) == ["a2"]


async def test_a_replica_without_open_streams_has_no_timer() -> None:
    heartbeats = Heartbeats()
    with heartbeats.open_stream(A, asyncio.Event()):
        pass
    await asyncio.sleep(1.5)
    began = virtual_time.iteration()
    await asyncio.sleep(100)
    assert virtual_time.iteration() <= began + 3, "nothing wakes the loop"
    streams = {"a1": asyncio.Event()}
    with heartbeats.open_stream(A, streams["a1"]):
        await asyncio.sleep(1.5)
        assert woken(streams) == ["a1"], "the timer starts again"


FIRST, SECOND = "SERVE_REPLICA::rollout#Ingress#first", "SERVE_REPLICA::rollout#Ingress#second"


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The callers that have died; a test adds to them."""
    names = set[str]()
    monkeypatch.setattr(liveness, "has_died", names.__contains__)
    return names


class GivenUp:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.watch = CallerWatch(self._give_up)

    def _give_up(self, ids: Sequence[str]) -> None:
        self.ids += ids


async def test_the_work_of_a_caller_that_has_died_is_given_up_until_it_has_ended(dead: set[str]) -> None:
    given_up = GivenUp()
    with given_up.watch.working(SECOND, ["other"]):
        with given_up.watch.working(FIRST, ["a", "b"]):
            with given_up.watch.working(FIRST, ["c"]):
                await asyncio.sleep(100)
                assert given_up.ids == []
                dead.add(FIRST)
                await asyncio.sleep(POLL_S)
                assert given_up.ids == ["a", "b", "c"]
            await asyncio.sleep(POLL_S)
            assert given_up.ids == ["a", "b", "c", "a", "b"]
        await asyncio.sleep(100)
        assert given_up.ids == ["a", "b", "c", "a", "b"]


async def test_nobody_is_watched_who_has_nothing_under_way_or_is_no_replica(dead: set[str]) -> None:
    given_up = GivenUp()
    dead.update((FIRST, "no replica", ""))
    with given_up.watch.working(FIRST, ["a"]):
        pass
    with given_up.watch.working("no replica", ["b"]), given_up.watch.working("", ["c"]):
        await asyncio.sleep(100)
    assert given_up.ids == []
    with given_up.watch.working(FIRST, ["d"]):
        await asyncio.sleep(1.5 * POLL_S)
    assert given_up.ids == ["d"], "the watch begins again"
