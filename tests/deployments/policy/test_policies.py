"""Policies: waiting for a version to become current, and named ones, several at once over the current full weights."""

import asyncio
import os
from typing import Any

import pytest

from deployments.policy.commands import SetAdapters
from deployments.policy.durable_files import write_durably
from deployments.policy.failures import (
    ChunkMisplaced,
    PolicyFailure,
    PolicyNotCurrent,
    PolicyUnknown,
    VersionUnknown,
    WeightsRefused,
)
from deployments.policy.versions import INDEX, read_index
from rollout_client.contract.policy import PushOptions, ReplicaUpdate
from tests.deployments.policy.policy_world import World, adapter, in_world, refused, taken, weights
from tests.virtual_time import now, settled, until


def not_current(field: str, how: str, current: int, value: int) -> Any:
    return refused(PolicyNotCurrent, field, f"{how}; version {current} is current", value)


async def waited(world: World, least: int, exact: int | None, wait_s: float | None, name: str | None = None) -> int:
    """The current version once it is as demanded."""
    return (await world.store.wait_for(name, least, exact, wait_s)).versions[name or ""]


@pytest.mark.parametrize("name", [None, "a"])
@in_world()
async def test_a_version_that_is_current_or_comes_in_time_is_waited_for(world: World, name: str | None) -> None:
    kind: dict[str, Any] = {"kind": "adapter", "name": name}
    if name is None:
        assert (await waited(world, 0, None, 0.0), await waited(world, 0, 0, None)) == (0, 0)
    await world.push(3, adapter(), **kind)
    began = now()
    assert [await waited(world, 2, None, None, name), await waited(world, 3, 3, 10.0, name)] == [3, 3]
    assert now() == began
    await world.replica("r0", command_s=5.0)
    demands: list[tuple[int, int | None]] = [(4, None), (5, None), (0, 5)]
    waits = [asyncio.create_task(waited(world, least, exact, 50.0, name)) for least, exact in demands]
    for version in (4, 5):
        await world.push(version, adapter(version), **kind)
    assert await asyncio.gather(*waits) == [4, 5, 5]


@in_world(wait_s=7)
async def test_waiting_ends_with_what_is_current_and_in_the_time_of_the_service(world: World) -> None:
    await world.push(3, weights(2.0))
    for wait_s, waits_s in ((2.5, 2.5), (0.0, 0.0), (None, 7.0), (1000.0, 7.0)):
        began = now()
        async with not_current("policy.min_version", f"it is not there after {waits_s:g} s", 3, 4):
            await waited(world, 4, None, wait_s)
        assert now() - began == waits_s
    async with not_current("policy.version", "it is not there after 0 s", 3, 5):
        await waited(world, 0, 5, 0.0)


@in_world()
async def test_a_version_that_was_passed_by_is_refused_at_once(world: World) -> None:
    await world.push(3, weights(2.0))
    began = now()
    for version in (0, 2):
        async with not_current("policy.version", "a newer one has taken its place", 3, version):
            await waited(world, 0, version, 60.0)
    assert now() == began
    waiting = asyncio.create_task(waited(world, 0, 4, 60.0))
    await settled()
    await world.push(5, weights(3.0))
    async with not_current("policy.version", "a newer one has taken its place", 5, 4):
        await waiting


@in_world()
async def test_who_watches_learns_of_each_change_or_of_none_after_a_while(world: World) -> None:
    seen = await world.store.watch(None)
    assert (seen.versions, now()) == ({"": 0}, 0.0)
    assert (await world.store.watch(seen), now()) == (seen, 5.0)
    watching = asyncio.create_task(world.store.watch(seen))
    await world.push(1, adapter(), kind="adapter", name="a")
    new = await watching
    assert new.versions == {"": 0, "a": 1}
    assert (seen.is_older_than(new), new.is_older_than(seen)) == (True, False)


def unknown(message: str, name: str = "b") -> Any:
    return refused(PolicyUnknown, "policy.name", message, name)


async def named(world: World) -> dict[str, int]:
    """The versions of named policies that are published."""
    return {name: version for name, version in (await world.store.watch(None)).versions.items() if name}


@in_world()
async def test_several_policies_are_served_at_once_each_with_its_own_versions(world: World) -> None:
    for name in ("r0", "r1"):
        await world.replica(name)
    await world.push(4, weights(2.0))
    world.cluster.events.clear()
    update = await world.push(1, adapter(1.0), kind="adapter", name="a")
    events = [(who, what) for who, what, _ in world.cluster.events]
    assert events == [("r0", "try a"), ("r0", "serve a"), ("r1", "serve a")]
    assert (update.version, update.name, update.label) == (1, "a", "a/1")
    swapped = ReplicaUpdate(replica_id="r1", status="swapped", load_s=1.0, fetched_bytes=70)
    tried = swapped.model_copy(update={"replica_id": "r0", "load_s": 2.0, "fetched_bytes": 140})
    assert update.replicas == [tried, swapped]
    await world.push(7, adapter(2.0), kind="adapter", name="b")
    await world.push(2, adapter(3.0), kind="adapter", name="a")
    a, b = (await world.store.state(0)).named
    assert (a.name, a.current, a.base, a.next_version, a.size_bytes) == ("a", 2, 4, 3, len(adapter(3.0)))
    assert (b.name, b.current, b.base, b.next_version, b.uploads) == ("b", 7, 4, 8, [])
    assert a.checksum not in (None, b.checksum)
    await world.ready("late")
    late = [what for who, what, _ in world.cluster.events if who == "late"]
    assert late == ["stage", "swap", "serve a", "serve b", "accept requests"]


@pytest.mark.parametrize("is_first", [True, False])
@in_world()
async def test_an_adapter_that_a_replica_cannot_use_is_refused_only_in_its_trial(world: World, is_first: bool) -> None:
    replicas = [await world.ready(name) for name in ("r0", "r1")]
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    replicas[not is_first].at[SetAdapters] = "error"
    if is_first:
        message = "a replica could not load them or generate with them: OSError: r0 has no room"
        async with refused(WeightsRefused, "weights", message):
            await world.push(2, adapter(2.0), kind="adapter", name="a")
        assert (replicas[0].named, await named(world), world.cluster.killed) == ({"a": 1}, {"a": 1}, [])
        [state] = (await world.store.state(0)).named
        assert (state.current, state.next_version, state.uploads) == (1, 2, [])
        return
    update = await world.push(2, adapter(2.0), kind="adapter", name="a")
    assert [replica.status for replica in update.replicas] == ["swapped", "replaced"]
    assert (world.cluster.killed, await named(world)) == (["r1"], {"a": 2})


@pytest.mark.parametrize("how", ["other full weights", "dropped", "a store that died before it dropped them"])
@in_world()
async def test_a_policy_that_is_served_no_longer_says_why_and_its_numbers_go_on(world: World, how: str) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(), kind="adapter", name="b")
    if how == "dropped":
        await world.store.drop_policy("b")
    elif how == "other full weights":
        await world.push(1, weights(2.0))
    else:
        await world.push(2, weights(2.0))
        await world.push(2, adapter(), kind="adapter", name="b")
        index = read_index(world.folder).model_copy(update={"current": 0})
        write_durably(world.folder / INDEX, index.model_dump_json())
        await world.restart()
        await until(lambda: replica.named == {})
    assert (replica.named, await named(world)) == ({}, {})
    last = (await world.store.state(0)).named[0].next_version - 1
    message = f"the policy was dropped after b/{last}, or the full weights under it were replaced; there are none"
    for call in (world.store.drop_policy("b"), world.store.wait_for("b", 0, None, 0.0)):
        async with unknown(message):
            await call
    [state] = (await world.store.state(0)).named
    assert (state.name, state.current, state.base) == ("b", None, None)
    assert not [file for file in world.files() if file.startswith("names/b/versions/")]
    await world.restart()
    async with taken(last, newest=last):
        await world.push(last, adapter(3.0), kind="adapter", name="b")
    assert (await world.push(9, adapter(2.0), kind="adapter", name="b")).label == "b/9"


@in_world()
async def test_a_name_that_was_never_pushed_is_refused_with_those_that_there_are(world: World) -> None:
    async with unknown("there is no policy of this name; there are none"):
        await world.store.wait_for("b", 0, None, 60.0)
    await world.push(4, adapter(), kind="adapter", name="a")
    async with unknown("there is no policy of this name; there are a/4"):
        await world.store.wait_for("b", 0, None, 60.0)
    assert [state.name for state in (await world.store.state(0)).named] == ["a"]


def policies_known(world: World) -> list[str]:
    return list(world.store.policies.named)


@pytest.mark.parametrize("how", ["by the store", "by a replica", "as a checkpoint", "after its caller has left"])
@in_world()
async def test_a_first_push_that_is_refused_leaves_no_policy_and_no_upload(world: World, how: str) -> None:
    replica = await world.replica("r0", at={} if how == "by the store" else {SetAdapters: "error"})
    content = adapter(float("nan")) if how == "by the store" else adapter()
    if how == "as a checkpoint":
        pushing = asyncio.create_task(world.store.load_checkpoint(1, "/nowhere", PushOptions(kind="adapter", name="a")))
    else:
        pushing = world.pushing(1, content, kind="adapter", name="a")
    if how == "after its caller has left":
        replica.command_s = 10.0
        await until(lambda: len(replica.received) > 1)
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        assert policies_known(world) == ["a"]
        await asyncio.sleep(60)
    else:
        with pytest.raises(PolicyFailure):
            await pushing
    assert (await world.store.state(0)).named == []
    await until(lambda: policies_known(world) == [])
    assert not (world.folder / "names" / "a").exists()
    # It can be pushed afterwards as if nothing had been.
    replica.at.clear()
    assert (await world.push(1, adapter(2.0), kind="adapter", name="a")).label == "a/1"
    assert (await world.store.state(0)).named[0].uploads == []


@in_world()
async def test_calls_with_unknown_names_and_expired_uploads_leave_nothing(world: World) -> None:
    for number in range(50):
        with pytest.raises(VersionUnknown):
            await world.store.upload_state(1, f"unknown-{number}")
        assert await world.store.repeated_update(1, "0" * 64, f"unknown-{number}") is None
        assert f"unknown-{number}" not in policies_known(world)
        with pytest.raises(ChunkMisplaced):
            await world.store.write_chunk(1, "nobody", 0, b"", f"unknown-{number}")
    await until(lambda: policies_known(world) == [])
    await world.chunk(1, 0, b"a part", "begun")
    assert (await world.store.upload_state(1, "begun")).received_bytes == 6
    assert policies_known(world) == ["begun"]
    os.utime(world.folder / "names" / "begun" / "uploads" / "1.part", (0, 0))
    await until(lambda: policies_known(world) == [])
    assert not (world.folder / "names" / "begun").exists()
