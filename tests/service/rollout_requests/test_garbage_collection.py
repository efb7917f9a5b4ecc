"""New objects are collected in portions while requests are in flight; full collections wait, but not for ever."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from service.rollout_requests import garbage_collection as garbage
from service.rollout_requests.garbage_collection import IDLE_S, LONGEST_WAIT_S, PacedCollections
from tests.virtual_time import PORTION_S

FULL = 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The collections: their generation, and when they were made."""
    made: list[tuple[int, float]] = []
    monkeypatch.setattr(
        gc, "collect", lambda generation=FULL: made.append((generation, asyncio.get_running_loop().time()))
    )
    return made


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def full(made: list[tuple[int, float]]) -> list[float]:
    return [at for generation, at in made if generation == FULL]


async def test_new_objects_are_collected_while_a_request_is_in_flight(made: list[tuple[int, float]]) -> None:
    collections = PacedCollections()
    with collections.request_in_flight():
        await asyncio.sleep(3.5 * PORTION_S)
        with collections.request_in_flight():
            await asyncio.sleep(PORTION_S)
    assert [generation for generation, _ in made] == [0] * 4
    assert [at for _, at in made] == pytest.approx([PORTION_S, 2 * PORTION_S, 3 * PORTION_S, 4 * PORTION_S])


async def test_a_full_collection_is_made_after_a_while_without_requests(made: list[tuple[int, float]]) -> None:
    collections = PacedCollections()
    with collections.request_in_flight():
        with collections.request_in_flight():
            await asyncio.sleep(10)
        await asyncio.sleep(10)
    await asyncio.sleep(IDLE_S / 2)
    with collections.request_in_flight():
        await asyncio.sleep(10)
    ended_at = asyncio.get_running_loop().time()
    await asyncio.sleep(10)
    assert full(made) == [pytest.approx(ended_at + IDLE_S, abs=PORTION_S)]
    assert made[-1][0] == FULL, "nothing is collected after it"


async def test_after_long_a_full_collection_is_made_beside_requests(
    made: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "PORTION_S", 1.0)

    with PacedCollections().request_in_flight():
        await asyncio.sleep(2.5 * LONGEST_WAIT_S)
    assert full(made) == [LONGEST_WAIT_S, 2 * LONGEST_WAIT_S]


@pytest.mark.usefixtures("thresholds")
def test_python_itself_collects_new_objects_alone() -> None:
    garbage.freeze_and_tune_collector()
    assert gc.get_threshold() == (2_000, 2**30, 2**30)
    assert gc.get_freeze_count() > 0
