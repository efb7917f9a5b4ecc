"""When a replica that sends nothing counts as lost. In virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from service.remote.replica_stream import ReplicaWatch, _ReplicaSilent
from tests import virtual_time


async def end_of_call(silence: ReplicaWatch, items_at: Sequence[float], ends_at: float) -> tuple[str, float]:
    """How and when a call ends that has items at some times and would end by itself at another."""
    try:
        async with silence.watch():
            for at in items_at:
                await asyncio.sleep(at - virtual_time.now())
                silence.note_item()
            await asyncio.sleep(ends_at - virtual_time.now())
    except _ReplicaSilent:
        return "lost", virtual_time.now()
    return "ended", virtual_time.now()


@pytest.mark.parametrize(
    ("items_at", "ends_at", "end"),
    [
        ([0.5], 3600, ("lost", 10)),
        ([0.5, 9.5, 18.5], 28, ("ended", 28)),
        ([0.5, 5.5], 3600, ("lost", 15)),
        ([], 3600, ("ended", 3600)),
    ],
)
def test_a_call_is_lost_after_ten_silent_seconds_that_follow_an_item(
    items_at: Sequence[float], ends_at: float, end: tuple[str, float]
) -> None:
    assert virtual_time.run(end_of_call(ReplicaWatch(lost_after=10), items_at, ends_at)) == end


async def test_a_timeout_of_the_block_itself_is_no_silence() -> None:
    with pytest.raises(TimeoutError, match="of the block"):
        async with ReplicaWatch(lost_after=10).watch():
            raise TimeoutError("of the block")


async def test_a_replica_that_starts_anew_may_be_silent_until_its_first_item() -> None:
    silence = ReplicaWatch(lost_after=10)
    await end_of_call(silence, [0.5], ends_at=3600)
    assert await end_of_call(silence, [], ends_at=300) == ("ended", 300)
