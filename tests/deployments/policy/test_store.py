"""The policy store: pushes that are repeated, refused and logged, the numbers of versions, and which are kept."""

import asyncio
import logging
from pathlib import Path

import pytest
from safetensors.torch import save

from deployments.policy.failures import VersionRefused, WeightsRefused
from rollout_client.contract.policy import PolicyUpdate, PushOptions
from tests.deployments.policy.policy_world import (
    INITIAL,
    MODEL,
    NORM,
    World,
    adapter,
    delta,
    digest_of,
    in_world,
    play,
    refused,
    taken,
    versions,
    weights,
)
from tests.virtual_time import settled, until

IS_ACTIVE = "all of it has arrived, and it is being validated and loaded by the replicas"


@in_world()
async def test_the_layout_is_that_of_the_model(world: World) -> None:
    layout = await world.store.layout()
    assert layout.tensors.keys() == INITIAL.keys()
    assert (layout.tensors[NORM].dtype, layout.tensors[NORM].shape) == ("BF16", [128])


def bad(how: str) -> bytes:
    if how == "nan":
        return weights(float("nan"))
    if how == "missing":
        return save({name: tensor for name, tensor in INITIAL.items() if name != NORM})
    return weights(1.0)[:-1]


@pytest.mark.parametrize(("how", "field"), [("nan", NORM), ("missing", NORM), ("cut", "weights")])
@in_world()
async def test_bad_weights_leave_everything_as_it_was_and_no_command_is_sent(
    world: World, how: str, field: str
) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    commands, files = list(replica.received), world.files()
    with pytest.raises(WeightsRefused) as raised:
        await world.push(2, bad(how))
    assert [problem.field for problem in raised.value.problems] == [field]
    state = await world.store.state(0)
    assert (state.current, state.updating_to, replica.received) == (1, None, commands)
    assert world.files() == files
    # The number is free again.
    assert (await world.push(2, weights(3.0))).version == 2


@in_world()
async def test_an_update_goes_on_when_its_caller_goes_away(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert (await world.store.wait_for(None, 1, None, 60.0)).versions[""] == 1
    assert world.cluster.done("swap") == [("r0", 1)]


@in_world()
async def test_the_same_upload_again_is_answered_again_and_others_are_not(world: World) -> None:
    await world.replica("r0")
    content = weights(2.0)
    update = await world.push(3, content)
    assert await world.store.repeated_update(3, digest_of(content)) == update
    digest, other = digest_of(content), digest_of(weights(3.0))
    for version, named in ((3, other), (3, None), (4, digest), (2, digest)):
        assert await world.store.repeated_update(version, named) is None
    await world.restart()
    without_replicas = PolicyUpdate(version=3, checksum=update.checksum, replicas=[])
    assert await world.store.repeated_update(3, digest_of(content)) == without_replicas
    await world.push(4, weights(3.0))
    assert await world.store.repeated_update(3, digest_of(content)) == without_replicas


@in_world()
async def test_the_same_upload_while_it_is_under_way_has_the_same_answer(world: World) -> None:
    for name in ("r0", "r1"):
        await world.ready(name, command_s=5.0)
    content = weights(2.0)
    await world.upload(3, content)
    completing = asyncio.create_task(world.complete(3, PushOptions(), False, digest_of(content)))
    await asyncio.sleep(0)
    for is_later in (False, True):
        if is_later:
            await until(lambda: bool(world.cluster.done("stage")))
        else:
            # It is still being checked: nothing may touch what arrived.
            async with refused(VersionRefused, "version", IS_ACTIVE, 3):
                await world.store.write_chunk(3, None, 0, b"")
        async with refused(VersionRefused, "version", IS_ACTIVE, 3):
            await world.complete(3, PushOptions(), False, digest_of(content))
        assert await world.store.repeated_update(3, "0" * 64) is None
        assert await world.store.repeated_update(3, None) is None
    again = asyncio.create_task(world.store.repeated_update(3, digest_of(content)))
    update = await completing
    assert await again == update
    assert [replica.status for replica in update.replicas] == ["swapped", "swapped"]
    assert len(world.cluster.done("swap")) == 2


@in_world()
async def test_a_push_without_a_digest_is_answered_again_once_it_is_current(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    content = weights(2.0)
    await world.upload(3, content)
    completing = asyncio.create_task(world.complete(3, PushOptions(), False, None))
    await until(lambda: bool(world.cluster.done("stage")))
    assert await world.store.repeated_update(3, digest_of(content)) is None
    update = await completing
    assert await world.store.repeated_update(3, digest_of(content)) == update


@in_world()
async def test_a_bad_upload_holds_its_number_while_it_is_checked(world: World) -> None:
    completing = world.pushing(4, bad("nan"))
    await until(lambda: world.policy.next_number() == 5)
    for same in (world.store.repeated_update(4, digest_of(bad("nan"))), completing):
        with pytest.raises(WeightsRefused):
            await same
    assert (await world.store.state()).next_version == 1


@in_world(checkpoint_roots=[str(MODEL)])
async def test_while_a_checkpoint_is_read_its_number_is_taken(world: World, tmp_path: Path) -> None:
    loading = asyncio.create_task(world.store.load_checkpoint(1, str(MODEL), PushOptions()))
    await settled(1)
    async with refused(VersionRefused, "version", IS_ACTIVE, 1):
        await world.store.load_checkpoint(1, str(tmp_path), PushOptions())
    async with refused(VersionRefused, "version", IS_ACTIVE, 1):
        await world.store.write_chunk(1, None, 0, b"")
    await loading


@in_world()
async def test_versions_are_numbered_upward(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(5, weights(2.0))
    await world.until_updating(5)
    for is_done in (False, True):
        for version in (5, 4, 1):
            async with taken(version, newest=5):
                await world.store.write_chunk(version, None, 0, b"")
            if is_done:
                async with taken(version, newest=5):
                    await world.store.load_checkpoint(version, "/", PushOptions())
        assert (await pushing).version == 5
    assert (await world.push(9, weights(3.0))).version == 9


@in_world(keep_versions=2)
async def test_the_newest_full_versions_are_kept_as_bases(world: World) -> None:
    for version in (1, 2, 3):
        await world.push(version, weights(version + 1.0))
    assert versions(world) == [2, 3]
    await world.push(4, delta(), kind="delta", base=3)
    assert versions(world) == [3, 4]
    await world.push(5, weights(5.0), kind="partial")
    assert versions(world) == [4, 5]
    for version in (6, 7, 8):
        await world.push(version, adapter(version), kind="adapter")
        assert versions(world) == [4, 5, version]
    await world.restart()
    await world.push(9, weights(3.0))
    assert versions(world) == [5, 9]


def test_a_version_that_is_refused_is_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        with caplog.at_level(logging.INFO), pytest.raises(WeightsRefused):
            await world.push(2, bad("nan"))

    play(story, tmp_path)
    [record] = [record for record in caplog.records if "refused" in record.getMessage()]
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "INFO", 2)
    assert record.getMessage() == (
        f"Version 2 is refused: {NORM}: it holds NaN or infinity; the training has diverged."
    )


def test_an_update_that_fails_is_logged_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        await world.upload(2, weights(2.0))
        (world.folder / "making").write_bytes(b"in the way")
        with pytest.raises(OSError, match="making"):
            await world.complete(2, PushOptions())

    play(story, tmp_path)
    [record] = caplog.records
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "WARNING", 2)
    assert record.getMessage() == "The update to version 2 failed."
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)
