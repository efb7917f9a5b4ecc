"""Uploads: who may write, what is too large, what stays after a refusal, and when it goes."""

import asyncio
import os
from datetime import UTC, datetime

import pytest
import zstandard

from deployments.policy.failures import ChunkMisplaced, UpdateUnderWay, VersionRefused, VersionUnknown, WeightsRefused
from deployments.policy.uploads import EXPIRY_S, OVERTAKEN
from deployments.policy.weight_checks import largest_upload_bytes
from rollout_client.contract.policy import PolicyUpdate, PushOptions
from tests.deployments.policy.policy_world import World, delta, in_world, refused, weights
from tests.virtual_time import settled


@in_world()
async def test_two_senders_of_one_version_never_mix(world: World) -> None:
    first, second = weights(2.0), weights(3.0)
    overtaken = await world.store.write_chunk(1, None, 0, first[:1000])
    await world.upload(1, second)

    async def too_late() -> None:
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.write_chunk(1, overtaken, 1000, first[1000:])
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.complete_upload(1, overtaken, PushOptions(), False, None)

    await too_late()
    completing = asyncio.create_task(world.complete(1, PushOptions()))
    await asyncio.sleep(0)
    async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
        await world.store.write_chunk(1, world.senders[1, None], 0, first)
    await completing
    assert world.versions.weights(1).read_bytes() == second


@pytest.mark.parametrize("is_zstd", [False, True])
@in_world()
async def test_what_is_larger_than_weights_can_be_is_refused_and_leaves_nothing(world: World, is_zstd: bool) -> None:
    content = bytes(110_000_000)
    with pytest.raises(WeightsRefused, match="more than weights of this model can be"):
        await world.push(1, zstandard.compress(content) if is_zstd else content, is_zstd)
    assert world.files() == set()


@in_world()
async def test_the_bound_of_an_upload_is_what_weights_of_the_model_can_have(world: World) -> None:
    bound = largest_upload_bytes(await world.store.layout())
    sender = await world.store.write_chunk(1, None, 0, b"")
    # It is not too large, but it leaves a hole.
    async with refused(ChunkMisplaced, "content-range", "0 bytes have arrived; go on from there", bound - 1):
        await world.store.write_chunk(1, sender, bound - 1, b"x")
    with pytest.raises(WeightsRefused, match=f"more than {bound} bytes"):
        await world.store.write_chunk(1, sender, bound, b"x")
    with pytest.raises(VersionUnknown):
        await world.store.upload_state(1)


@in_world()
async def test_the_upload_of_a_push_under_way_is_not_dropped(world: World) -> None:
    for version in (1, 2):
        await world.upload(version, weights(2.0))
    may_end = asyncio.Event()

    async def push() -> PolicyUpdate:
        await may_end.wait()
        return PolicyUpdate(version=1, checksum=None, replicas=[])

    pushing = asyncio.create_task(world.policy.push(1, None, push()))
    await settled()
    world.policy.uploads.drop_up_to(2)
    assert world.files() == {"uploads/1.part"}
    may_end.set()
    await pushing


@in_world()
async def test_an_upload_whose_number_was_taken_meanwhile_is_dropped(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    await world.upload(2, weights(3.0))
    newer = world.pushing(3, weights(4.0))
    await world.until_updating(3)
    with pytest.raises(VersionRefused):
        await world.complete(2, PushOptions())
    assert (await newer).version == 3
    assert (await world.store.state(0)).uploads == []


@in_world()
async def test_an_upload_that_was_refused_is_dropped_unless_trying_again_can_help(world: World) -> None:
    await world.push(1, weights(2.0))
    with pytest.raises(WeightsRefused):
        await world.push(2, delta())
    assert (await world.store.state(0)).uploads == []
    await world.ready("r0", command_s=5.0)
    newer = world.pushing(2, weights(3.0))
    await world.until_updating(2)
    await world.upload(3, weights(4.0))
    with pytest.raises(UpdateUnderWay):
        await world.complete(3, PushOptions(if_busy="refuse"))
    await newer
    # As a client does that sends the last byte again.
    await world.chunk(3, len(weights(4.0)) - 1, weights(4.0)[-1:])
    assert (await world.complete(3, PushOptions())).version == 3


@in_world()
async def test_an_upload_expires_when_nothing_of_it_has_arrived_for_a_while(world: World) -> None:
    await world.chunk(1, 0, bytes(10))
    await world.chunk(2, 0, bytes(10))
    begun = datetime.now(UTC).timestamp() - EXPIRY_S
    os.utime(world.policy.uploads.path(1), (begun, begun))
    assert (await world.store.upload_state(1)).expires_at == datetime.fromtimestamp(begun + EXPIRY_S, UTC)
    await world.store.policies.clean_up()
    assert [upload.version for upload in (await world.store.state(0)).uploads] == [2]
