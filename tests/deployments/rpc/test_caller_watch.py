"""What replicas do for an ingress replica that has died: they give it up. In virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from deployments.rpc import liveness as caller_watch
from deployments.rpc.liveness import POLL_S, CallerWatch
from deployments.upstream.ray_serve.own_replica import own_name
from tests import virtual_time

FIRST, SECOND = "SERVE_REPLICA::rollout#Ingress#first", "SERVE_REPLICA::rollout#Ingress#second"


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The callers that have died; a test adds to them."""
    names = set[str]()
    monkeypatch.setattr(caller_watch, "has_died", names.__contains__)
    return names


class GivenUp:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.watch = CallerWatch(self._give_up)

    def _give_up(self, ids: Sequence[str]) -> None:
        self.ids += ids


def test_the_work_of_a_caller_that_has_died_is_given_up_until_it_has_ended(dead: set[str]) -> None:
    async def run() -> None:
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

    virtual_time.run(run())


def test_nobody_is_watched_who_has_nothing_under_way_or_is_no_replica(dead: set[str]) -> None:
    async def run() -> None:
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

    virtual_time.run(run())


def test_processes_that_are_no_replicas_have_names_of_their_own() -> None:
    assert own_name() != own_name()
