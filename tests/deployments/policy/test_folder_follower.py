"""A store that takes the versions that a trainer publishes in a folder, over scripted replicas in virtual time."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load, save

from deployments.policy.published import PublishedFolder
from rollout_client.contract.policy import FollowState
from tests.deployments.policy.policy_world import INITIAL, NORM, World, content_of, play, weights
from tests.deployments.policy.published_files import publish_delta, publish_whole
from tests.virtual_time import until

INITIAL_WEIGHTS = weights(1.0)
Story = Callable[[World, Path], Coroutine[Any, Any, None]]


def followed(format_: str = "miles_disk_delta", **settings: Any) -> Callable[[Story], Callable[[Path], None]]:
    """Plays a test over a store that follows the folder which the test gets."""

    def decorate(test: Story) -> Callable[[Path], None]:
        @wraps(test)
        def run_test(tmp_path: Path) -> None:
            folder = tmp_path / "published"
            folder.mkdir()
            follow = {"folder": str(folder), "format": format_, "poll_s": 1}
            play(lambda world: test(world, folder), tmp_path, follow=follow, **settings)

        del run_test.__wrapped__  # pytest would ask for the fixtures of the test
        return run_test

    return decorate


async def state_of(world: World) -> FollowState:
    state = (await world.store.state()).follow
    assert state is not None
    return state


async def until_waiting(world: World, words: str) -> str:
    """Until the state says why it waits, with these words in it."""
    async with asyncio.timeout(1000):
        while words not in str((await state_of(world)).waiting):
            await asyncio.sleep(0.25)
    return str((await state_of(world)).waiting)


async def until_current(world: World, version: int) -> None:
    await until(lambda: world.policy.current == version)


def same_tensors(left: bytes, right: bytes) -> bool:
    one, other = load(left), load(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@followed("safetensors")
async def test_a_checkpoint_that_appears_is_loaded_by_every_replica(world: World, folder: Path) -> None:
    one, two = await world.ready("one"), await world.ready("two")
    place = publish_whole(folder, 7, weights(2.0))
    await until_current(world, 7)
    assert (one.loaded.version, two.loaded.version) == (7, 7)
    assert same_tensors(content_of(one.staged), weights(2.0))
    [stored] = world.versions.all
    assert (stored.kind, stored.source) == ("full", str(place))
    assert await state_of(world) == FollowState(folder=str(folder), taken=7, newest=7)


@followed()
async def test_deltas_are_applied_to_the_version_before_once_each(world: World, folder: Path) -> None:
    replica = await world.ready("one")
    contents = [INITIAL_WEIGHTS, weights(2.0), weights(3.0), weights(5.0)]
    for version in (1, 2, 3):
        publish_delta(folder, version, contents[version - 1], contents[version])
        await until_current(world, version)
        assert same_tensors(content_of(replica.staged), contents[version])
    await world.restart()
    publish_delta(folder, 4, weights(5.0), weights(6.0))
    await until_current(world, 4)
    late = await world.ready("late")
    assert (late.loaded.version, same_tensors(content_of(late.staged), weights(6.0))) == (4, True)


@followed()
async def test_a_damaged_delta_is_refused_and_the_version_before_goes_on(world: World, folder: Path) -> None:
    replica = await world.ready("one")
    publish_delta(folder, 1, INITIAL_WEIGHTS, weights(2.0))
    await until_current(world, 1)
    # Of other weights than version 1, as after a trainer's restart.
    place = publish_delta(folder, 2, INITIAL_WEIGHTS, weights(3.0))
    publish_delta(folder, 3, weights(3.0), weights(4.0))
    waiting = await until_waiting(world, "needs version 2")
    [refusal] = (await state_of(world)).refused
    reason = refusal.reason
    assert waiting == f"version 3 needs version 2: {reason}"
    assert reason.startswith(f"{NORM}: the changes make a tensor with the checksum ")
    assert reason.endswith("they are damaged, or of other weights than the base.")
    assert (world.policy.current, replica.loaded.version) == (1, 1)
    shutil.rmtree(place)
    publish_delta(folder, 2, weights(2.0), weights(3.0))
    await until_current(world, 3)
    assert same_tensors(content_of(replica.staged), weights(4.0))
    assert (await state_of(world)).refused == []


@followed()
async def test_a_version_with_nan_is_refused_and_one_that_mends_it_is_taken(world: World, folder: Path) -> None:
    replica = await world.ready("one")
    diverged = save({**INITIAL, NORM: INITIAL[NORM] * float("nan")}, {"format": "pt"})
    publish_delta(folder, 1, INITIAL_WEIGHTS, diverged)
    assert await until_waiting(world, "refused") == (
        f"version 1 is refused: {NORM}: it holds NaN or infinity; the training has diverged."
    )
    publish_delta(folder, 2, diverged, weights(2.0))
    publish_delta(folder, 3, weights(2.0), weights(3.0))
    await until_current(world, 3)
    assert same_tensors(content_of(replica.staged), weights(3.0))
    assert ((await state_of(world)).waiting, world.cluster.done("swap")) == (None, [("one", 3)])


@followed()
async def test_a_push_between_two_published_versions_takes_its_number(world: World, folder: Path) -> None:
    replica = await world.ready("one")
    publish_delta(folder, 1, INITIAL_WEIGHTS, weights(2.0))
    await until_current(world, 1)
    await world.push(2, weights(9.0))
    publish_delta(folder, 2, weights(2.0), weights(3.0))
    await until_waiting(world, "2 is current")
    publish_delta(folder, 3, weights(3.0), weights(4.0))
    await until_current(world, 3)
    assert same_tensors(content_of(replica.staged), weights(4.0))


@followed("safetensors")
async def test_a_folder_that_cannot_be_read_is_named_and_followed_again_later(world: World, folder: Path) -> None:
    await world.ready("one")
    with patch.object(PublishedFolder, "look", side_effect=PermissionError("no access")):
        assert await until_waiting(world, "read") == "the folder cannot be read: PermissionError: no access"
    publish_whole(folder, 1, weights(2.0))
    await until_current(world, 1)
    assert (await state_of(world)).waiting is None


def test_refusals_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @followed("safetensors")
    async def story(world: World, folder: Path) -> None:
        publish_delta(folder, 1, INITIAL_WEIGHTS, weights(2.0))
        await until_waiting(world, "refused")
        await asyncio.sleep(10)

    with caplog.at_level(logging.WARNING, "rollout_service.policy"):
        story(tmp_path)
    said = [record.getMessage() for record in caplog.records if "published" in record.getMessage()]
    reason = "it is a delta, which policy.follow.format: miles_disk_delta takes"
    assert said == [f"Version 1 of {tmp_path}/published is refused: {reason}"]
