"""Full garbage collections wait until no rollout runs, but not for ever."""

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from service import garbage
from service.garbage import IDLE_S, LONGEST_WAIT_S, FullCollections
from tests import virtual_time


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of full collections."""
    times: list[float] = []
    monkeypatch.setattr(gc, "collect", lambda: times.append(asyncio.get_running_loop().time()))
    return times


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_full_collection_is_made_when_no_rollout_has_run_for_a_while(collections: list[float]) -> None:
    async def play() -> float:
        full = FullCollections()
        with full.put_off():
            with full.put_off():
                await asyncio.sleep(10)
            await asyncio.sleep(10)
        await asyncio.sleep(IDLE_S / 2)
        with full.put_off():
            await asyncio.sleep(10)
        ended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        return ended_at

    ended_at = virtual_time.run(play())
    assert collections == [pytest.approx(ended_at + IDLE_S)]


def test_after_long_a_full_collection_is_made_although_rollouts_run(
    collections: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        full = FullCollections()
        with full.put_off():
            for now in (LONGEST_WAIT_S, LONGEST_WAIT_S + 1, LONGEST_WAIT_S + 2):
                with full.put_off():
                    pass
                assert len(collections) == (now > LONGEST_WAIT_S)

    asyncio.run(play())


@pytest.mark.usefixtures("thresholds")
def test_small_portions_are_of_young_objects_alone() -> None:
    garbage.collect_small_portions()
    assert gc.get_threshold() == (2_000, 2, 2**30)
    assert gc.get_freeze_count() > 0
