"""Updates over scripted replicas: what reaches them, updates that meet, and adapters."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.commands import Canary, LoadedWeights, Stage, Swap
from deployments.policy.failures import PolicyNotCurrent, UpdateUnderWay, WeightsRefused
from deployments.policy.update import NO_EFFECT, NO_EFFECT_OF_ADAPTER
from deployments.policy.versions import Version, Versions
from rollout_client.contract.policy import PushOptions, SwitchOptions
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import (
    World,
    adapter,
    changed,
    content_of,
    delta,
    digest_of,
    in_world,
    refused,
    taken,
    versions,
    weights,
)
from tests.virtual_time import until


@in_world()
async def test_new_weights_reach_every_replica_and_are_current(world: World) -> None:
    replicas = [await world.replica(name) for name in ("r0", "r1")]
    content = weights(2.0)
    update = await world.push(5, content, mode="wait")
    checksum = file_checksum(world.versions.weights(5))
    assert (update.version, update.checksum) == (5, checksum)
    assert [(replica.replica_id, replica.status) for replica in update.replicas] == [
        ("r0", "swapped"),
        ("r1", "swapped"),
    ]
    assert [content_of(replica.staged) == content for replica in replicas] == [True, True]
    assert world.cluster.done("swap") == [("r0", 5), ("r1", 5)]
    state = await world.store.state(0)
    assert (state.current, state.updating_to, state.transfer_world_size) == (5, None, 3)
    assert [(replica.replica_id, replica.version) for replica in state.replicas] == [("r0", 5), ("r1", 5)]
    initial, stored = state.versions
    assert (initial.version, initial.kind) == (0, "initial")
    assert (stored.version, stored.kind, stored.base, stored.checksum) == (5, "full", None, checksum)
    assert stored.size_bytes == len(content)
    assert world.files() == {"versions.json", "versions/5.safetensors"}


@in_world()
async def test_weights_that_the_engines_cannot_take_leave_everything_as_it_was(world: World) -> None:
    replica = await world.replica("r0", at={Stage: "error"})
    async with refused(WeightsRefused, "weights", "the engine cannot take them: OSError: r0 has no room"):
        await world.push(1, weights(2.0))
    assert (world.versions.current, versions(world), replica.loaded) == (0, [], LoadedWeights())
    assert world.cluster.killed == []
    assert (await world.push(1, weights(2.0))).replicas[0].status == "swapped"


@pytest.mark.parametrize("replicas", [1, 2])
@in_world()
async def test_a_version_that_a_replica_cannot_generate_with_is_refused_and_later_replicas_get_the_last_good_one(
    world: World, replicas: int
) -> None:
    good = await world.replica("r0")
    others = [await world.replica(f"r{number}") for number in range(1, replicas)]
    assert (await world.push(1, weights(2.0))).canary_s == 4.0
    good.at[Canary] = "error"
    message = "a replica could not generate with them and went back: OSError: r0 has no room"
    async with refused(WeightsRefused, "weights", message):
        await world.push(2, weights(3.0))
    late = await world.ready("late")
    for replica in (good, *others, late):
        assert (replica.loaded, replica.is_on_trial) == (LoadedWeights(1), False)
    assert (world.versions.current, versions(world), world.cluster.killed) == (1, [1], [])
    assert (await world.push(2, weights(4.0))).version == 2


@in_world()
async def test_a_version_that_cannot_be_made_current_on_disk_is_served_nowhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_versions: Versions, version: Version) -> None:
        assert not any(replica.loaded.version == version.version and not replica.is_on_trial for replica in replicas)
        raise OSError("no space left")

    replicas = [await world.replica(name) for name in ("r0", "r1")]
    await world.push(1, weights(2.0))
    monkeypatch.setattr(Versions, "make_current", fail)
    with pytest.raises(OSError, match="no space left"):
        await world.push(2, weights(3.0))
    assert [(replica.loaded, replica.is_on_trial) for replica in replicas] == [(LoadedWeights(1), False)] * 2
    assert (versions(world), world.cluster.killed) == ([1], [])
    assert ("r0", "canary", 2) in world.cluster.events


@in_world()
async def test_an_adapter_that_cannot_be_used_leaves_the_full_weights_and_the_adapter_before(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    replica.at[Canary] = "error"
    with pytest.raises(WeightsRefused):
        await world.push(3, adapter(2.0), kind="adapter")
    assert (replica.loaded, replica.is_on_trial) == (LoadedWeights(1, adapter=2), False)


@pytest.mark.parametrize("canary_was_sent", [False, True])
@in_world()
async def test_a_store_that_dies_during_a_trial_lets_the_replica_go_back(world: World, canary_was_sent: bool) -> None:
    replica = await world.ready("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await until(lambda: replica.is_on_trial and (len(replica.taken) == 4 or not canary_was_sent))
    pushing.cancel()
    await world.restart()
    replica.accepts_requests = False
    await until(lambda: replica.accepts_requests)
    assert (replica.loaded, replica.is_on_trial) == (LoadedWeights(), False)
    assert world.versions.current == 0


@in_world()
async def test_a_replica_that_fails_is_replaced_and_the_one_in_its_place_begins_with_the_new_weights(
    world: World,
) -> None:
    await world.ready("r0")
    await world.ready("r1", at={Swap: "error"})
    update = await world.push(1, weights(2.0))
    assert [(replica.replica_id, replica.status) for replica in update.replicas] == [
        ("r0", "swapped"),
        ("r1", "replaced"),
    ]
    assert world.cluster.killed == ["r1"]
    young = await world.ready("r2")
    assert young.loaded == LoadedWeights(1)


@in_world()
async def test_a_replica_that_died_before_the_update_takes_no_part_in_it(world: World) -> None:
    replica = await world.ready("r0")
    replica.end()
    assert (await world.push(1, weights(2.0))).replicas == []
    assert world.cluster.killed == []


@in_world()
async def test_a_second_update_waits_for_the_first(world: World) -> None:
    for name in ("r0", "r1"):
        await world.ready(name, command_s=5.0)
    first = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    assert [(await pushing).version for pushing in (first, world.pushing(2, weights(3.0)))] == [1, 2]
    steps = [(what, version) for _, what, version in world.cluster.events[2:]]
    each = ("stage", "stage", "swap", "canary", "accept requests", "swap")
    assert steps == [(what, version) for version in (1, 2) for what in each]


@in_world()
async def test_a_second_update_may_be_refused_instead(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    assert (await world.store.state(0)).updating_to == 1
    message = "version 1 is being loaded by the replicas; wait for it, or say if_busy=wait"
    async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
        await world.push(2, weights(3.0), if_busy="refuse")
    await pushing
    assert (versions(world), world.cluster.done("swap")) == ([1], [("r0", 1)])
    # What had arrived can be completed later.
    content = weights(3.0)
    assert (await world.store.upload_state(2)).received_bytes == len(content)
    update = await world.complete(2, PushOptions(if_busy="refuse"), False, digest_of(content))
    assert update.version == 2


@in_world()
async def test_a_version_that_was_validated_meanwhile_is_refused_at_once_by_those_who_do_not_wait(
    world: World, tmp_path: Path
) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    info = Version(version=2, kind="full", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    with pytest.raises(UpdateUnderWay):
        await world.store._updates.update(world.policy, info, tmp_path / "weights", PushOptions(if_busy="refuse"))
    assert not pushing.done()
    await pushing


@in_world()
async def test_an_update_that_is_overtaken_is_refused_and_not_broken(world: World) -> None:
    replica = await world.replica("r0", command_s=5.0)
    first = world.pushing(1, weights(1.5))
    await world.until_updating(1)
    higher = world.pushing(3, weights(3.0))
    await world.until_one_waits()
    lower = world.pushing(2, weights(2.0))
    await asyncio.gather(first, higher)
    async with taken(2, newest=3):
        await lower
    assert replica.loaded == LoadedWeights(3)
    assert not list(world.folder.glob("uploads/*"))


@in_world()
async def test_a_replica_that_registers_again_during_an_update_is_not_ended(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    await until(lambda: len(world.replicas[0].taken) == 2)
    late = await world.replica("late")
    await late.register()
    await late.register()
    await pushing
    await until(lambda: late.accepts_requests)
    assert (late.loaded, world.cluster.killed) == (LoadedWeights(1), [])


@in_world()
async def test_an_adapter_lies_on_top_of_the_current_full_weights(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    assert replica.loaded == LoadedWeights(1, adapter=2)
    assert replica.staged is not None
    assert (replica.staged.kind, replica.staged.adapter_config) == ("adapter", '{"r": 2}')
    stored = world.versions.info(2)
    assert (stored.kind, stored.base) == ("adapter", 1)
    await world.push(3, adapter(2.0), kind="adapter")
    assert (replica.loaded, world.versions.info(3).base) == (LoadedWeights(1, adapter=3), 1)
    await world.push(4, weights(3.0))
    assert replica.loaded == LoadedWeights(4)


@in_world()
async def test_an_adapter_may_lie_on_top_of_the_initial_weights(world: World) -> None:
    await world.push(1, adapter(), kind="adapter")
    assert world.versions.info(1).base == 0
    replica = await world.ready("r0")
    assert replica.loaded == LoadedWeights(0, adapter=1)
    assert world.cluster.done("stage") == [("r0", 1)]


@in_world()
async def test_an_adapter_never_lies_on_other_weights_than_its_base(world: World) -> None:
    """A replica registers during one update and before the next, which is an adapter."""
    await world.replica("r0", command_s=5.0)
    await until(lambda: bool(world.cluster.done("accept requests")))
    full = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    await until(lambda: len(world.replicas[0].taken) == 2)
    on_top = world.pushing(2, adapter(), kind="adapter")
    await world.until_one_waits()
    late = await world.replica("late")
    assert [replica.replica_id for replica in (await full).replicas] == ["r0"]
    assert [replica.replica_id for replica in (await on_top).replicas] == ["r0"]
    await until(lambda: late.accepts_requests)
    assert late.loaded == LoadedWeights(1, adapter=2)
    assert [event[1:] for event in world.cluster.events if event[0] == "late"] == [
        ("stage", 1),
        ("swap", 1),
        ("stage", 2),
        ("swap", 2),
        ("accept requests", 2),
    ]


@pytest.mark.parametrize(("reset_prefix_cache", "keeps"), [(True, False), (False, True)])
@in_world()
async def test_the_answer_and_the_state_say_whether_the_prefix_cache_of_older_weights_stays(
    world: World, reset_prefix_cache: bool, keeps: bool
) -> None:
    await world.replica("r0")
    content = weights(2.0)
    update = await world.push(1, content, reset_prefix_cache=reset_prefix_cache)
    repeated = await world.store.repeated_update(1, digest_of(content))
    assert repeated is not None
    state = await world.store.state(0)
    assert [update.keeps_prefix_cache, repeated.keeps_prefix_cache] == [keeps, keeps]
    assert [version.keeps_prefix_cache for version in state.versions] == [False, keeps]


@in_world()
async def test_an_adapter_never_keeps_the_prefix_cache_of_other_weights(world: World) -> None:
    await world.replica("r0")
    update = await world.push(1, adapter(), kind="adapter", reset_prefix_cache=False)
    assert not update.keeps_prefix_cache


@in_world()
async def test_weights_of_which_the_canary_sees_nothing_are_served_and_their_sender_is_told(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    replica.changes_nothing = True
    update = await world.push(2, delta(), kind="delta", base=1)
    assert update.warnings == [NO_EFFECT]
    assert (await world.push(3, changed(weights(2.0)))).warnings == [], "the weights are the same"
    assert (await world.store.roll_back(2, None, SwitchOptions())).warnings == []


@in_world()
async def test_an_adapter_that_is_too_small_to_be_seen_is_served_and_its_sender_told(world: World) -> None:
    replica = await world.replica("r0")
    replica.changes_nothing = True
    for name in (None, "run-b"):
        update = await world.push(1, adapter(), kind="adapter", name=name)
        assert update.warnings == [NO_EFFECT_OF_ADAPTER]
    replica.changes_nothing = False
    assert (await world.push(2, adapter(2.0), kind="adapter", name="run-b")).warnings == []


@pytest.mark.parametrize("name", [None, "run-b"])
@in_world()
async def test_an_adapter_is_refused_on_other_full_weights_than_it_was_trained_on(
    world: World, name: str | None
) -> None:
    await world.push(3, weights(2.0))
    message = (
        "the adapter was trained on these full weights, and others are current, version 3: make its own current first "
        "(POST /policy/rollback), or train it on those"
    )
    async with refused(PolicyNotCurrent, "base", message, 0):
        await world.push(4, adapter(), kind="adapter", name=name, base=0)
    assert (await world.push(4, adapter(), kind="adapter", name=name, base=3)).base == 3


@in_world()
async def test_a_rollback_has_the_weights_that_an_adapter_was_trained_on(world: World) -> None:
    await world.push(1, adapter(1.0), kind="adapter", name="run-b")
    await world.push(7, weights(2.0))
    back = (await world.store.roll_back(0, None, SwitchOptions())).version
    update = await world.push(2, adapter(2.0), kind="adapter", name="run-b", base=0)
    assert (update.base, update.warnings) == (back, [])


@in_world(activation="rolling")
async def test_in_a_rolling_activation_replicas_change_one_by_one_and_each_change_is_told(world: World) -> None:
    names = ("r0", "r1", "r2")
    replicas = [await world.ready(name, command_s=1.0) for name in names]
    told: list[tuple[frozenset[str], list[str]]] = []

    async def watch() -> None:
        seen = await world.store.watch(None)
        while True:
            seen = await world.store.watch(seen)
            if (rolling := seen.rolling) is not None:
                assert (rolling.before, rolling.version) == (0, 5)
                loaded = [each.name for each in replicas if each.loaded.version == 5 and not each.is_on_trial]
                told.append((rolling.replicas, loaded))
                assert world.policy.current == 0

    watching = asyncio.create_task(watch())
    update = await world.push(5, weights(2.0))
    watching.cancel()
    assert [each.status for each in update.replicas] == ["swapped"] * 3
    # The change of the last one makes the version current, and is told as that.
    assert told == [(frozenset(names[:count]), [*names[:count]]) for count in (1, 2)]
    assert (world.policy.current, (await world.store.watch(None)).rolling) == (5, None)


@in_world(activation="rolling")
async def test_a_minimum_is_met_for_who_takes_it_as_soon_as_one_replica_has_it_and_an_exact_version_is_not(
    world: World,
) -> None:
    for name in ("r0", "r1", "r2"):
        await world.ready(name, command_s=1.0)
    demands = ((5, None, True), (5, None, False), (0, 5, True), (6, None, True))
    waiting = [
        asyncio.create_task(world.store.wait_for(None, least, exact, 60.0, takes_offered))
        for least, exact, takes_offered in demands
    ]
    update = world.pushing(5, weights(2.0))
    told = await waiting[0]
    assert told.rolling is not None
    assert (told.versions[""], told.rolling.replicas) == (0, frozenset({"r0"}))
    assert [task.done() for task in waiting] == [True, False, False, False]
    await update
    assert [(await task).versions[""] for task in waiting[1:3]] == [5, 5]
    with pytest.raises(PolicyNotCurrent):
        await waiting[3]


@in_world(activation="rolling")
async def test_a_replica_that_cannot_change_is_replaced_before_the_next_one_changes(world: World) -> None:
    first, broken, last = [await world.ready(name) for name in ("r0", "r1", "r2")]
    broken.at[Swap] = "error"
    update = await world.push(5, weights(2.0))
    assert [each.status for each in update.replicas] == ["swapped", "replaced", "swapped"]
    assert (first.loaded.version, last.loaded.version, world.cluster.killed) == (5, 5, ["r1"])
    late = await world.ready("late")
    assert late.loaded.version == 5


@in_world(activation="rolling")
async def test_a_version_that_is_refused_on_trial_is_told_to_nobody(world: World) -> None:
    replica = await world.ready("r0")
    await world.ready("r1")
    seen = await world.store.watch(None)
    replica.at[Canary] = "error"
    with pytest.raises(WeightsRefused):
        await world.push(5, weights(2.0))
    assert await world.store.watch(None) == seen
