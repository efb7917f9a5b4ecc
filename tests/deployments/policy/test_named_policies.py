"""Named policies over scripted replicas: several at once, over the full weights that are current."""

import asyncio
import os
from typing import Any

import pytest

from deployments.policy.commands import Canary, SetAdapters
from deployments.policy.durable_files import write_durably
from deployments.policy.failures import (
    ChunkMisplaced,
    PolicyFailure,
    PolicyNotCurrent,
    PolicyUnknown,
    VersionUnknown,
    WeightsRefused,
)
from deployments.policy.run_identity import FolderRefused
from deployments.policy.versions import INDEX, read_index
from rollout_client.contract.policy import PushOptions, SwitchOptions
from tests.deployments.policy.policy_world import World, adapter, in_world, refused, taken, weights
from tests.virtual_time import until


def unknown(message: str, name: str = "b") -> Any:
    return refused(PolicyUnknown, "policy.name", message, name)


async def named(world: World) -> dict[str, int]:
    """The versions of named policies that are published."""
    told = await world.store.watch(None)
    return {name: version for name, version in told.versions.items() if name}


@in_world()
async def test_several_policies_are_served_at_once_each_with_versions_of_its_own(world: World) -> None:
    replicas = [await world.replica(name) for name in ("r0", "r1")]
    await world.push(4, weights(2.0))
    update = await world.push(1, adapter(1.0), kind="adapter", name="a")
    assert (update.version, update.name, update.label) == (1, "a", "a/1")
    assert [(each.replica_id, each.status, each.load_s, each.fetched_bytes) for each in update.replicas] == [
        ("r0", "swapped", 2.0, 140),
        ("r1", "swapped", 1.0, 70),
    ]
    assert [each.pause_s for each in update.replicas] == [0.0, 0.0]
    await world.push(7, adapter(2.0), kind="adapter", name="b")
    await world.push(2, adapter(3.0), kind="adapter", name="a")
    for replica in replicas:
        assert replica.named == {"a": 2, "b": 7}
        assert replica.adapters == {"a": adapter(3.0), "b": adapter(2.0)}
        assert replica.loaded.full == 4
    assert await named(world) == {"a": 2, "b": 7}
    a, b = (await world.store.state(0)).named
    assert (a.name, a.current, a.base, a.next_version, a.size_bytes) == ("a", 2, 4, 3, len(adapter(3.0)))
    assert (b.name, b.current, b.base, b.next_version, b.uploads) == ("b", 7, 4, 8, [])
    assert a.checksum not in (None, b.checksum)
    assert {file for file in world.files() if file.startswith("names/")} == {
        "names/a/versions.json",
        "names/a/versions/2.safetensors",
        "names/b/versions.json",
        "names/b/versions/7.safetensors",
    }


@in_world()
async def test_one_replica_tries_an_adapter_before_any_serves_it(world: World) -> None:
    for name in ("r0", "r1"):
        await world.ready(name)
    await world.push(1, adapter(), kind="adapter", name="a")
    events = [(who, what) for who, what, _ in world.cluster.events if what.endswith(" a")]
    assert events == [("r0", "try a"), ("r0", "serve a"), ("r1", "serve a")]


@in_world()
async def test_an_adapter_that_the_first_replica_cannot_use_is_refused_and_its_number_is_free(world: World) -> None:
    replica = await world.ready("r0")
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    replica.at[SetAdapters] = "error"
    message = "a replica could not load them or generate with them: OSError: r0 has no room"
    async with refused(WeightsRefused, "weights", message):
        await world.push(2, adapter(2.0), kind="adapter", name="a")
    assert (replica.named, await named(world), world.cluster.killed) == ({"a": 1}, {"a": 1}, [])
    [state] = (await world.store.state(0)).named
    assert (state.current, state.next_version, state.uploads) == (1, 2, [])
    assert (await world.push(2, adapter(3.0), kind="adapter", name="a")).label == "a/2"


@in_world()
async def test_an_adapter_that_another_replica_cannot_use_is_served_and_that_replica_replaced(world: World) -> None:
    await world.replica("r0")
    await world.ready("r1", at={SetAdapters: "error"})
    update = await world.push(1, adapter(), kind="adapter", name="a")
    assert [replica.status for replica in update.replicas] == ["swapped", "replaced"]
    assert (world.cluster.killed, await named(world)) == (["r1"], {"a": 1})


@in_world()
async def test_numbers_of_a_name_only_go_up(world: World) -> None:
    await world.push(3, adapter(1.0), kind="adapter", name="a")
    async with taken(3, newest=3):
        await world.push(3, adapter(2.0), kind="adapter", name="a")
    await world.push(1, adapter(2.0), kind="adapter", name="b")
    assert await named(world) == {"a": 3, "b": 1}


@in_world()
async def test_the_same_push_sent_again_has_the_same_result(world: World) -> None:
    first = await world.push(1, adapter(1.0), kind="adapter", name="a")
    await world.push(1, adapter(2.0), kind="adapter", name="b")
    stored = world.store.policies.named["a"].served
    assert stored is not None
    assert await world.store.repeated_update(1, stored.upload_digest, "a") == first
    assert await world.store.repeated_update(1, stored.upload_digest, "b") is None
    assert await world.store.repeated_update(1, stored.upload_digest) is None
    await world.restart()
    again = await world.store.repeated_update(1, stored.upload_digest, "a")
    assert again is not None
    assert (again.label, again.checksum) == ("a/1", first.checksum)


@pytest.mark.parametrize("is_restarted", [False, True])
@in_world()
async def test_other_full_weights_drop_the_policies_that_were_adapters_for_the_old_ones(
    world: World, is_restarted: bool
) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(), kind="adapter", name="b")
    await world.push(1, weights(2.0))
    if is_restarted:
        await world.restart()
        await until(lambda: bool(world.store.registry.replicas))
    assert (replica.named, await named(world)) == ({}, {})
    message = "the policy was dropped after b/1, or the full weights under it were replaced; there are none"
    async with unknown(message):
        await world.store.wait_for("b", 0, None, 0.0)
    await world.push(2, adapter(2.0), kind="adapter", name="b")
    [state] = (await world.store.state(0)).named
    assert (state.current, state.base, replica.named) == (2, 1, {"b": 2})


@in_world()
async def test_a_store_that_dies_when_other_full_weights_are_current_on_disk_drops_them_when_it_restarts(
    world: World,
) -> None:
    await world.push(1, adapter(), kind="adapter", name="b")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter", name="b")
    index = read_index(world.folder).model_copy(update={"current": 0})
    write_durably(world.folder / INDEX, index.model_dump_json())
    await world.restart()
    assert await named(world) == {}


@in_world()
async def test_an_adapter_without_a_name_leaves_the_named_policies(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(), kind="adapter", name="b")
    await world.push(1, adapter(2.0), kind="adapter")
    assert (replica.loaded.adapter, replica.named, await named(world)) == (1, {"b": 1}, {"b": 1})


@in_world()
async def test_full_weights_that_are_refused_leave_the_named_policies_also_on_the_replica_that_tried_them(
    world: World,
) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(), kind="adapter", name="b")
    replica.at[Canary] = "error"
    with pytest.raises(WeightsRefused):
        await world.push(1, weights(2.0))
    assert (replica.loaded.full, replica.named, await named(world)) == (0, {"b": 1}, {"b": 1})


@in_world(transfer_idle_s=5.0)
async def test_a_transfer_that_breaks_off_leaves_the_named_policies_on_the_replicas_that_go_back(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(), kind="adapter", name="b")
    await world.store.init_transfer({"master_address": "10.0.0.4", "master_port": 29500, "world_size": 2})
    await world.store.start_transfer(SwitchOptions())
    replica.named = {}
    await until(lambda: replica.named == {"b": 1})
    assert (replica.loaded.full, await named(world)) == (0, {"b": 1})


@in_world()
async def test_a_replica_that_starts_later_has_the_adapters_before_it_accepts_requests(world: World) -> None:
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    await world.push(1, adapter(2.0), kind="adapter", name="b")
    replica = await world.ready("late")
    assert [what for _, what, _ in world.cluster.events] == ["serve a", "serve b", "accept requests"]
    assert replica.adapters == {"a": adapter(1.0), "b": adapter(2.0)}


@in_world()
async def test_a_replica_that_cannot_have_the_adapters_when_it_starts_is_replaced(world: World) -> None:
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    replica = await world.replica("late", "error")
    await until(lambda: world.cluster.killed == ["late"])
    assert not replica.accepts_requests


@in_world()
async def test_a_restarted_store_serves_them_and_forgets_a_push_that_was_cut_off(world: World) -> None:
    replica = await world.replica("r0", command_s=1.0)
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    pushing = world.pushing(2, adapter(2.0), kind="adapter", name="a")
    await until(lambda: world.store.policies.named["a"].versions.updating_to == 2)
    pushing.cancel()
    await world.restart()
    assert await named(world) == {"a": 1}
    assert (await world.push(2, adapter(3.0), kind="adapter", name="a")).label == "a/2"
    assert (replica.named, replica.adapters) == ({"a": 2}, {"a": adapter(3.0)})


@in_world()
async def test_a_store_that_lost_its_folder_gives_no_number_again_that_a_replica_serves(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(5, adapter(1.0), kind="adapter", name="a")
    await world.restart_without_folder()
    await until(lambda: replica.named == {})
    assert await named(world) == {}
    async with taken(5, newest=5):
        await world.push(5, adapter(2.0), kind="adapter", name="a")
    assert (await world.push(6, adapter(2.0), kind="adapter", name="a")).label == "a/6"


@in_world()
async def test_a_dropped_policy_is_served_no_longer_and_its_numbers_go_on(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    await world.push(1, adapter(2.0), kind="adapter", name="b")
    await world.store.drop_policy("b")
    assert (replica.named, await named(world)) == ({"a": 1}, {"a": 1})
    message = "the policy was dropped after b/1, or the full weights under it were replaced; there are a/1"
    for call in (world.store.drop_policy("b"), world.store.wait_for("b", 0, None, 0.0)):
        async with unknown(message):
            await call
    _, state = (await world.store.state(0)).named
    assert (state.name, state.current, state.base, state.next_version) == ("b", None, None, 2)
    assert not [file for file in world.files() if file.startswith("names/b/versions/")]
    await world.restart()
    async with taken(1, newest=1):
        await world.push(1, adapter(3.0), kind="adapter", name="b")


@in_world()
async def test_a_name_that_was_never_pushed_is_refused_with_those_that_there_are(world: World) -> None:
    async with unknown("there is no policy of this name; there are none"):
        await world.store.wait_for("b", 0, None, 60.0)
    await world.push(4, adapter(), kind="adapter", name="a")
    async with unknown("there is no policy of this name; there are a/4"):
        await world.store.wait_for("b", 0, None, 60.0)
    assert [state.name for state in (await world.store.state(0)).named] == ["a"]


@in_world()
async def test_a_version_of_a_name_is_waited_for(world: World) -> None:
    await world.push(1, adapter(1.0), kind="adapter", name="a")
    waiting = asyncio.create_task(world.store.wait_for("a", 2, None, 30.0))
    await world.push(2, adapter(2.0), kind="adapter", name="a")
    assert (await waiting).versions == {"": 0, "a": 2}
    message = "a newer one has taken its place; version 2 is current"
    async with refused(PolicyNotCurrent, "policy.version", message, 1):
        await world.store.wait_for("a", 0, 1, 0.0)


@in_world()
async def test_who_watches_learns_of_each_change_at_once(world: World) -> None:
    seen = await world.store.watch(None)
    watching = asyncio.create_task(world.store.watch(seen))
    await world.push(1, adapter(), kind="adapter", name="a")
    now = await watching
    assert (seen.versions, now.versions) == ({"": 0}, {"": 0, "a": 1})
    assert (seen.is_older_than(now), now.is_older_than(seen)) == (True, False)


@in_world()
async def test_replicas_of_other_nodes_can_read_the_file(world: World) -> None:
    await world.push(1, weights(2.0))
    content = adapter(3.0)
    update = await world.push(1, content, kind="adapter", name="a")
    assert await world.store.read_weights(1, str(update.checksum), 0, 10) == content[:10]


@in_world()
async def test_a_folder_with_named_policies_of_another_run_is_refused(world: World) -> None:
    await world.push(1, adapter(), kind="adapter", name="a")
    world.settings["run"] = "another"
    with pytest.raises(FolderRefused, match="holds the versions of the run"):
        world.another_store()


def policies_known(world: World) -> list[str]:
    return list(world.store.policies.named)


@pytest.mark.parametrize("how", ["refused by the store", "refused by a replica", "a bad checkpoint"])
@in_world()
async def test_a_first_push_that_is_refused_leaves_no_policy_and_no_upload(world: World, how: str) -> None:
    await world.replica("r0", at={SetAdapters: "error"} if how == "refused by a replica" else None)
    content = adapter(float("nan")) if how == "refused by the store" else adapter()
    if how == "a bad checkpoint":
        pushing = world.store.load_checkpoint(1, "/nowhere", PushOptions(kind="adapter", name="a"))
    else:
        pushing = world.push(1, content, kind="adapter", name="a")
    with pytest.raises(PolicyFailure):
        await pushing
    assert (await world.store.state(0)).named == []
    await until(lambda: policies_known(world) == [])
    assert not (world.folder / "names" / "a").exists()
    # It can be pushed afterwards as if nothing had been.
    assert (await world.push(1, adapter(2.0), kind="adapter", name="a")).label == "a/1"
    assert (await world.store.state(0)).named[0].uploads == []


@in_world()
async def test_calls_with_unknown_names_leave_nothing_in_memory(world: World) -> None:
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


@in_world()
async def test_an_upload_that_expires_and_was_the_first_of_its_policy_leaves_no_policy(world: World) -> None:
    await world.chunk(1, 0, b"a part", "begun")
    assert policies_known(world) == ["begun"]
    os.utime(world.folder / "names" / "begun" / "uploads" / "1.part", (0, 0))
    await until(lambda: policies_known(world) == [])
    assert not (world.folder / "names" / "begun").exists()


@in_world()
async def test_a_first_push_that_is_refused_after_its_caller_has_left_leaves_no_policy(world: World) -> None:
    replica = await world.ready("r0", at={SetAdapters: "error"}, command_s=10.0)
    pushing = world.pushing(1, adapter(), kind="adapter", name="a")
    await until(lambda: len(replica.taken) > 1)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    assert policies_known(world) == ["a"]
    await asyncio.sleep(60)
    await until(lambda: policies_known(world) == [])
    assert not (world.folder / "names" / "a").exists()
