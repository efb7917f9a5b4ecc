"""Uploads: who may write, and what is too large."""

import asyncio
from pathlib import Path

import pytest
import zstandard

from deployments.policy.failures import ChunkMisplaced, VersionUnknown, WeightsRefused
from deployments.policy.uploads.uploads import OVERTAKEN
from deployments.policy.validation.weight_checks import largest_upload_bytes
from rollout_client.policy_contract import PolicyUpdate, PushOptions
from tests.deployments.policy.policy_world import World, play, refused, weights
from tests.virtual_time import settled


def test_two_senders_of_one_version_never_mix(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first, second = weights(2.0), weights(3.0)
        overtaken = await world.store.begin_chunk(1, 0)
        await world.store.write_chunk(1, overtaken, 0, first[:1000])
        await world.upload(1, second)

        async def too_late() -> None:
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.write_chunk(1, overtaken, 1000, first[1000:])
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.end_chunk(1, overtaken, len(first), len(first))
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.complete_upload(1, overtaken, PushOptions(), False, None)

        await too_late()
        completing = asyncio.create_task(world.complete(1, PushOptions()))
        await asyncio.sleep(0)
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.write_chunk(1, world.senders[1], 0, first)
        await completing
        assert world.version_store.weights(1).read_bytes() == second

    play(story, tmp_path)


@pytest.mark.parametrize("is_zstd", [False, True])
def test_what_is_larger_than_weights_can_be_is_refused_and_leaves_nothing(tmp_path: Path, is_zstd: bool) -> None:
    async def story(world: World) -> None:
        content = bytes(110_000_000)
        with pytest.raises(WeightsRefused, match="more than weights of this model can be"):
            await world.push(1, zstandard.compress(content) if is_zstd else content, is_zstd)
        assert world.files() == set()

    play(story, tmp_path)


def test_the_bound_of_an_upload_is_what_weights_of_the_model_can_have(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        bound = largest_upload_bytes(await world.store.layout())
        sender = await world.store.begin_chunk(1, 0)
        # It is not too large, but it leaves a hole.
        async with refused(ChunkMisplaced, "content-range", "0 bytes have arrived; go on from there", bound - 1):
            await world.store.write_chunk(1, sender, bound - 1, b"x")
        with pytest.raises(WeightsRefused, match=f"more than {bound} bytes"):
            await world.store.write_chunk(1, sender, bound, b"x")
        with pytest.raises(VersionUnknown):
            await world.store.upload_state(1)

    play(story, tmp_path)


def test_the_upload_of_a_push_under_way_is_not_dropped(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for version in (1, 2):
            await world.upload(version, weights(2.0))
        may_end = asyncio.Event()

        async def push() -> PolicyUpdate:
            await may_end.wait()
            return PolicyUpdate(version=1, checksum=None, replicas=[])

        pushing = asyncio.create_task(world.store._active_pushes.run(1, None, push()))
        await settled()
        world.store._uploads.drop_up_to(2)
        assert world.files() == {"uploads/1.part", "uploads/1.json"}
        may_end.set()
        await pushing

    play(story, tmp_path)
