"""Uploads: who may write, what is too large, what stays after a refusal, and when it goes."""

import asyncio
from datetime import UTC, datetime

import pytest
import zstandard

from deployments.policy import uploads
from deployments.policy.commands import Stage
from deployments.policy.failures import ChunkMisplaced, UploadsFull, VersionRefused, VersionUnknown, WeightsRefused
from deployments.policy.uploads import OVERTAKEN
from deployments.policy.weight_checks import largest_upload_bytes
from rollout_client.contract.policy import PolicyUpdate, PushOptions
from tests.deployments.policy.policy_world import World, delta, in_world, refused, versions, weights
from tests.virtual_time import now, settled, until


@in_world()
async def test_two_senders_of_one_version_never_mix(world: World) -> None:
    first, second = weights(2.0), weights(3.0)
    overtaken = await world.store.begin_chunk(1, 0)
    await world.store.write_chunk(1, overtaken, 0, first[:1000])
    await world.upload(1, second)

    async def too_late() -> None:
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.write_chunk(1, overtaken, 1000, first[1000:])
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.end_chunk(1, overtaken, len(first))
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
async def test_what_is_larger_than_weights_can_be_is_refused_and_is_kept_only_if_all_of_it_had_arrived(
    world: World, is_zstd: bool
) -> None:
    content = bytes(110_000_000)
    with pytest.raises(WeightsRefused, match="more than weights of this model can be"):
        await world.push(1, zstandard.compress(content) if is_zstd else content, is_zstd)
    assert world.files() == ({"uploads/1.part", "uploads/1.json"} if is_zstd else set())


@in_world()
async def test_the_bound_of_an_upload_is_what_weights_of_the_model_can_have(world: World) -> None:
    bound = largest_upload_bytes(await world.store.layout())
    sender = await world.store.begin_chunk(1, 0)
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

    pushing = asyncio.create_task(world.policy.pushes.run(1, None, push()))
    await settled()
    world.policy.uploads.drop_up_to(2)
    assert world.files() == {"uploads/1.part", "uploads/1.json"}
    may_end.set()
    await pushing


@in_world()
async def test_an_upload_that_was_refused_is_kept_and_can_be_completed_with_other_options(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.upload(2, delta())
    with pytest.raises(WeightsRefused) as refusal:
        await world.complete(2, PushOptions())
    state = await world.store.upload_state(2)
    assert (state.received_bytes, state.refused) == (len(delta()), str(refusal.value))
    assert (await world.store.state(0)).uploads == [state]
    # As a client does that sends the last byte again.
    await world.chunk(2, len(delta()) - 1, delta()[-1:], len(delta()))
    assert (await world.store.upload_state(2)).refused is None
    assert (await world.complete(2, PushOptions(kind="delta", base=1))).version == 2
    assert world.files() == {"versions.json", "versions/1.safetensors", "versions/2.safetensors"}


@in_world()
async def test_an_upload_is_kept_if_no_engine_could_load_the_weights(world: World) -> None:
    await world.replica("r0", at={Stage: "error"})
    with pytest.raises(WeightsRefused, match="r0 has no room"):
        await world.push(1, weights(2.0))
    assert versions(world) == []
    assert "r0 has no room" in str((await world.store.upload_state(1)).refused)
    await world.chunk(1, len(weights(2.0)), b"", len(weights(2.0)))
    assert (await world.complete(1, PushOptions())).version == 1
    assert world.versions.weights(1).read_bytes() == weights(2.0)


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
async def test_the_state_of_an_upload_names_who_began_it_until_another_begins_anew(world: World) -> None:
    sender = await world.store.begin_chunk(1, 0, "first")
    await world.store.write_chunk(1, sender, 0, b"abc")
    await world.store.end_chunk(1, sender, 9)
    await world.store.begin_chunk(1, 3, "second")
    assert (await world.store.upload_state(1)).owner == "first"
    await world.store.begin_chunk(1, 0, "third")
    assert (await world.store.upload_state(1)).owner == "third"


@in_world(upload_quota_bytes=100)
async def test_unfinished_uploads_together_have_a_quota(world: World) -> None:
    await world.chunk(1, 0, bytes(60), 100)
    await world.chunk(2, 0, bytes(40), 100)
    message = (
        "with these bytes all unfinished uploads would have 101, and may have 100; finish the others, wait until "
        "they expire (GET /policy lists them), or raise policy.upload_quota_bytes"
    )
    async with refused(UploadsFull, "version", message, 2):
        await world.chunk(2, 40, bytes(1), 100)
    assert (await world.store.upload_state(2)).received_bytes == 40
    # What is sent again takes no more room.
    await world.chunk(2, 10, bytes(30), 100)


@in_world(upload_quota_bytes=100)
async def test_refused_uploads_give_way_to_others_the_oldest_first(world: World) -> None:
    for version in (1, 2):
        with pytest.raises(WeightsRefused):
            await world.push(version, bytes(40))
    await world.chunk(3, 0, bytes(20), 100)
    await world.chunk(3, 20, bytes(20), 100)
    assert [upload.version for upload in (await world.store.state(0)).uploads] == [2, 3]


@in_world(upload_expiry_s=60)
async def test_an_upload_expires_when_nothing_of_it_has_arrived_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(uploads, "utc_now", lambda: datetime.fromtimestamp(loop.time(), UTC))
    await world.chunk(1, 0, bytes(10), 100)
    await asyncio.sleep(50.0)
    await world.chunk(2, 0, bytes(10), 100)
    assert (await world.store.upload_state(1)).expires_at == datetime.fromtimestamp(60.0, UTC)
    await asyncio.sleep(10.0)
    await settled()
    assert [upload.version for upload in (await world.store.state(0)).uploads] == [2]
    await world.restart()
    await until(lambda: not world.policy.uploads.states())
    assert now() == pytest.approx(110.0, abs=0.1)
