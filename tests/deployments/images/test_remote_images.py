"""The image store over its Serve handle: what it is sent, and a store that has died."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OwnerDiedError

from deployments.failures import ImagesLost
from deployments.images.book import ImageUnknown
from deployments.images.store import RemoteImages
from deployments.protocols.images import name_of_image
from deployments.storage.storage import AWAY_S
from tests import virtual_time
from tests.fakes.store_handle import StoreHandle

MIB = 2**20


def answering(*results: Any) -> Any:
    """A store that answers with `results` in turn, the last one for ever."""
    left = list(results)
    return StoreHandle(lambda *_: left.pop(0) if len(left) > 1 else left[0])


async def content_of(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


def test_images_are_put_in_messages_of_bounded_size_and_each_content_once() -> None:
    handle = answering(None)
    images = [bytes([number]) * MIB for number in range(5)]
    names = asyncio.run(RemoteImages(handle).put([*images, images[0]], "ann"))
    assert names == [name_of_image(data) for data in [*images, images[0]]]
    assert [(method, list(sent), owner) for method, sent, owner in handle.calls] == [
        ("put", names[:2], "ann"),
        ("put", names[2:4], "ann"),
        ("put", names[4:5], "ann"),
    ]


def test_without_keys_the_owner_is_the_empty_one() -> None:
    handle = answering(["sha256:2"])
    assert asyncio.run(RemoteImages(handle).refused(("sha256:1", "sha256:2"))) == ["sha256:2"]
    assert handle.calls == [("refused", ["sha256:1", "sha256:2"], "")]


@pytest.mark.parametrize(("method", "lost_times", "after_s"), [("put", 2, 1), ("put", 999, AWAY_S), ("answer", 999, 0)])
async def test_a_dead_store_is_waited_for_except_by_readiness(method: str, lost_times: int, after_s: float) -> None:
    images = RemoteImages(answering(*[ActorDiedError()] * lost_times, None))
    if lost_times == 2:
        assert await images.put([b"one"]) == [name_of_image(b"one")]
    else:
        with pytest.raises(ImagesLost, match=r"^The image store died during the call\.$") as lost:
            await (images.put([b"one"]) if method == "put" else images.answer())
        assert lost.value.retryable
    assert virtual_time.now() == pytest.approx(after_s, abs=1 if after_s == AWAY_S else 0.001)


async def test_an_object_that_died_with_its_store_is_asked_of_the_next_one() -> None:
    handle = answering([content_of(OwnerDiedError("", None, ""))], [content_of(b"one")])
    assert await RemoteImages(handle).get("sha256:1") == b"one"
    assert (len(handle.calls), handle.is_by_reference) == (2, True)


def test_an_unknown_image_is_said_at_once() -> None:
    handle = answering(ImageUnknown.named("sha256:1"))
    with pytest.raises(ImageUnknown):
        asyncio.run(RemoteImages(handle).get("sha256:1"))
    assert handle.calls == [("reference", "sha256:1")]
