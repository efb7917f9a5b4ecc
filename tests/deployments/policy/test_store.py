"""The policy store: pushes that are repeated, refused and logged, the numbers of versions, and which are kept."""

import asyncio
import logging
from pathlib import Path
from typing import Any

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
    refused,
    taken,
    versions,
    weights,
)
from tests.virtual_time import end_by_cancellation, settled, until

IS_ACTIVE = "all of it has arrived, and it is being validated and loaded by the replicas"


NAN = weights(float("nan"))
INCOMPLETE = save({name: tensor for name, tensor in INITIAL.items() if name != NORM})


@pytest.mark.parametrize(("bad", "field"), [(NAN, NORM), (INCOMPLETE, NORM), (NAN[:-1], "weights")])
@in_world()
async def test_bad_weights_leave_everything_as_it_was_and_no_command_is_sent(
    world: World, caplog: pytest.LogCaptureFixture, bad: bytes, field: str
) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    commands, files = list(replica.received), world.files()
    with caplog.at_level(logging.INFO), pytest.raises(WeightsRefused) as raised:
        await world.push(2, bad)
    assert [problem.field for problem in raised.value.problems] == [field]
    [record] = [record for record in caplog.records if "refused" in record.getMessage()]
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "INFO", 2)
    assert record.getMessage() == f"Version 2 is refused: {raised.value}"
    state = await world.store.state(0)
    assert (state.current, state.updating_to, replica.received) == (1, None, commands)
    assert world.files() == files
    # The number is free again.
    assert (await world.push(2, weights(3.0))).version == 2


@in_world()
async def test_an_update_goes_on_when_its_caller_goes_away(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = await world.updating(1, weights(2.0))
    await end_by_cancellation(pushing)
    assert (await world.store.wait_for(None, 1, None, 60.0)).versions[""] == 1
    assert world.cluster.done("swap") == [("r0", 1)]


@pytest.mark.parametrize("name", [None, "a"])
@in_world()
async def test_the_same_upload_again_is_answered_again_and_others_are_not(world: World, name: str | None) -> None:
    await world.replica("r0")
    made, kind = (weights, dict[str, Any]()) if name is None else (adapter, dict[str, Any](kind="adapter", name=name))
    content, next_ = made(2.0), made(3.0)
    update = await world.push(3, content, **kind)
    await world.push(3, adapter(), kind="adapter", name="b")
    digest, other = digest_of(content), digest_of(next_)

    async def repeated(version: int, digest: str | None, name: str | None) -> PolicyUpdate | None:
        return await world.store.repeated_update(version, digest, name)

    assert await repeated(3, digest, name) == update
    for version, named in ((3, other), (3, None), (4, digest), (2, digest)):
        assert await repeated(version, named, name) is None
    assert await repeated(3, digest, "b") is None
    await world.restart()
    after = await repeated(3, digest, name)
    assert after is not None
    assert (after.label, after.checksum, after.replicas) == (update.label, update.checksum, [])
    await world.push(4, next_, **kind)
    assert await repeated(3, digest, name) == (after if name is None else None)


@pytest.mark.parametrize("has_digest", [True, False])
@in_world()
async def test_the_same_upload_while_it_is_under_way_has_the_same_answer(world: World, has_digest: bool) -> None:
    for name in ("r0", "r1"):
        await world.ready(name, command_s=5.0)
    digest = digest_of(content := weights(2.0))
    await world.upload(3, content)
    completing = asyncio.create_task(world.complete(3, PushOptions(), False, digest if has_digest else None))
    await asyncio.sleep(0)
    # It is still being checked: nothing may touch what arrived.
    async with refused(VersionRefused, "version", IS_ACTIVE, 3):
        await world.store.write_chunk(3, None, 0, b"")
    for _ in ("while it is checked", "while it is loaded"):
        async with refused(VersionRefused, "version", IS_ACTIVE, 3):
            await world.complete(3, PushOptions(), False, digest)
        for other in ["0" * 64, None, *([] if has_digest else [digest])]:
            assert await world.store.repeated_update(3, other) is None
        await until(lambda: bool(world.cluster.done("stage")))
    again = asyncio.create_task(world.store.repeated_update(3, digest)) if has_digest else None
    update = await completing
    assert await (again or world.store.repeated_update(3, digest)) == update
    assert [replica.status for replica in update.replicas] == ["swapped", "swapped"]
    assert len(world.cluster.done("swap")) == 2


@in_world()
async def test_a_bad_upload_holds_its_number_while_it_is_checked(world: World) -> None:
    completing = world.pushing(4, NAN)
    await until(lambda: world.policy.next_number() == 5)
    for same in (world.store.repeated_update(4, digest_of(NAN)), completing):
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
    async with taken(1, newest=1):
        await world.store.load_checkpoint(1, "/", PushOptions())


@in_world(checkpoint_roots=[str(MODEL)])
async def test_a_checkpoint_without_a_number_is_a_version_of_its_own_each_time(world: World) -> None:
    loaded = [await world.store.load_checkpoint(None, str(MODEL), PushOptions()) for _ in range(2)]
    assert [update.version for update in loaded] == [1, 2]


@in_world(keep_versions=2)
async def test_the_newest_full_versions_are_kept_as_bases(world: World) -> None:
    full = [(weights(version), dict[str, Any]()) for version in (2, 3, 4)]
    derived = [(delta(), dict[str, Any](kind="delta", base=3)), (weights(5.0), dict[str, Any](kind="partial"))]
    adapters = [(adapter(version), dict[str, Any](kind="adapter")) for version in (6, 7, 8)]
    kept = []
    for version, (content, options) in enumerate([*full, *derived, *adapters], 1):
        await world.push(version, content, **options)
        kept.append(versions(world))
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 5, 7], [4, 5, 8]]
    await world.restart()
    await world.push(9, weights(3.0))
    assert versions(world) == [5, 9]


@in_world()
async def test_a_failed_update_is_logged_with_its_traceback(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.upload(2, weights(2.0))
    (world.folder / "making").write_bytes(b"in the way")
    with pytest.raises(OSError, match="making") as failed:
        await world.complete(2, PushOptions())
    [record] = caplog.records
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "WARNING", 2)
    assert record.getMessage() == "The update to version 2 failed."
    assert record.exc_info is not None
    assert record.exc_info[1] is failed.value
