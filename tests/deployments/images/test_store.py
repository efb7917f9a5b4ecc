"""The image store: what it keeps through restarts, and the objects that readers fetch."""

import asyncio

import pytest

from deployments.images.book import ImagesFull, ImagesSettings, ImageUnknown
from deployments.images.store import ImagesReplica
from deployments.storage.storage import StorageFailed
from tests import virtual_time
from tests.fakes.image_store import ImagesInProcess
from tests.fakes.storage import Kept, ScriptedStorage

SETTINGS = ImagesSettings.model_construct(keep_s=100, max_bytes=100)


def store(kept: Kept | None = None) -> ImagesInProcess:
    """A store over what is kept, whose time is that of the loop."""
    return ImagesInProcess(SETTINGS, ScriptedStorage(kept), time_s=virtual_time.now)


async def test_what_was_put_is_read_by_a_store_that_starts_again() -> None:
    kept = Kept()
    names = await store(kept).put([b"one", b"two", b"one"], "ann")
    assert len(set(names)) == 2
    images = store(kept)
    assert [await images.get(name) for name in names] == [b"one", b"two", b"one"]
    assert await images.refused(names, "ann") == []
    assert await images.refused(names, "bob") == list(dict.fromkeys(names))


async def test_an_unused_image_makes_room_and_one_that_is_read_does_not() -> None:
    images = store()
    used, unused = await images.put([b"one", b"two"])
    for _ in range(4):
        await asyncio.sleep(40)
        assert await images.get(used) == b"one"
    await images.put([bytes(96)])
    with pytest.raises(ImageUnknown):
        await images.get(unused)
    assert await images.refused([used, unused]) == [unused]


async def test_an_object_is_made_once_for_all_readers_and_dropped_with_its_image() -> None:
    made: list[bytes] = []

    def share(content: bytes) -> bytes:
        made.append(content)
        return content

    replica = ImagesReplica(SETTINGS, ScriptedStorage(), virtual_time.now, share)
    await replica.put({"sha256:1": b"one"}, "")
    assert await asyncio.gather(*(replica.reference("sha256:1") for _ in range(9))) == [[b"one"]] * 9
    assert made == [b"one"]
    await asyncio.sleep(101)
    await replica.put({"sha256:2": bytes(100)}, "")
    await asyncio.sleep(101)
    await replica.put({"sha256:1": b"one"}, "")
    assert (await replica.reference("sha256:1"), made) == ([b"one"], [b"one"] * 2)


async def test_a_read_that_fails_is_made_again_by_the_next_reader() -> None:
    storage = ScriptedStorage()
    replica = ImagesReplica(SETTINGS, storage, virtual_time.now, lambda content: content)
    await replica.put({"sha256:1": b"one"}, "")
    storage.is_failing = True
    with pytest.raises(StorageFailed):
        await replica.reference("sha256:1")
    storage.is_failing = False
    await asyncio.sleep(1)
    assert await replica.reference("sha256:1") == [b"one"]


async def test_a_store_without_room_refuses_and_keeps_nothing_of_it() -> None:
    images = store()
    first = await images.put([bytes(60)])
    with pytest.raises(ImagesFull):
        await images.put([b"small", bytes(61)])
    await images.put([bytes(40)])
    assert await images.refused(first) == []
