"""Which streams of a replica get a heartbeat, and when. In virtual time."""

import asyncio
from contextlib import ExitStack

from deployments.rpc.liveness import Heartbeats, Listener
from tests import virtual_time


def woken(streams: dict[str, asyncio.Event]) -> list[str]:
    """The names of the streams that were woken since the last call."""
    names = [name for name, wake in streams.items() if wake.is_set()]
    for wake in streams.values():
        wake.clear()
    return names


A = Listener("a")


def test_each_second_one_stream_of_each_silent_caller_is_woken() -> None:
    async def run() -> None:
        heartbeats = Heartbeats()
        streams = {name: asyncio.Event() for name in ("a1", "a2", "b1")}
        with ExitStack() as opened:
            for name, wake in streams.items():
                opened.enter_context(heartbeats.open_stream(Listener(name[0]), wake))
            await asyncio.sleep(0.99)
            assert woken(streams) == []
            await asyncio.sleep(0.02)
            assert woken(streams) == ["a1", "b1"]
            heartbeats.note_results(A)
            await asyncio.sleep(1)
            assert woken(streams) == ["b1"], "a was sent results in this second"
            await asyncio.sleep(1)
            assert woken(streams) == ["a1", "b1"]

    virtual_time.run(run())


def test_a_stream_that_was_closed_is_not_woken_and_another_one_of_its_caller_is() -> None:
    async def run() -> None:
        heartbeats = Heartbeats()
        streams = {name: asyncio.Event() for name in ("a1", "a2")}
        with heartbeats.open_stream(A, streams["a2"]):
            with heartbeats.open_stream(A, streams["a1"]):
                pass
            await asyncio.sleep(1.5)
            assert woken(streams) == ["a2"]

    virtual_time.run(run())


def test_streams_whose_calls_named_different_replicas_have_heartbeats_of_their_own() -> None:
    async def run() -> None:
        heartbeats = Heartbeats()
        streams = {name: asyncio.Event() for name in ("a1", "a2", "unnamed")}
        with ExitStack() as opened:
            for name, wake in streams.items():
                opened.enter_context(heartbeats.open_stream(Listener("a", "" if name == "unnamed" else "r"), wake))
            assert heartbeats.callers == {"a"}
            await asyncio.sleep(0.5)
            heartbeats.note_results(Listener("a", "r"))
            await asyncio.sleep(1)
            assert woken(streams) == ["unnamed"]
            await asyncio.sleep(1)
            assert woken(streams) == ["a1", "unnamed"]

    virtual_time.run(run())


def test_a_replica_without_open_streams_has_no_timer() -> None:
    async def run() -> None:
        heartbeats = Heartbeats()
        with heartbeats.open_stream(A, asyncio.Event()):
            pass
        await asyncio.sleep(1.5)
        assert heartbeats._timer is None
        streams = {"a1": asyncio.Event()}
        with heartbeats.open_stream(A, streams["a1"]):
            await asyncio.sleep(1.5)
            assert woken(streams) == ["a1"], "the timer starts again"

    virtual_time.run(run())
