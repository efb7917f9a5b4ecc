"""Updates: the steps of one over scripted replicas, and those of a store, which follow one another."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.policy.commands import Canary, CommandReport, LoadedWeights, SwapOptions, VersionPayload
from deployments.policy.failures import PolicyFailure, PolicyNotCurrent, UpdateUnderWay, VersionUntried, WeightsRefused
from deployments.policy.replica_registry import RegisteredReplica, ReplicaLost, ReplicaRegistry
from deployments.policy.update import (
    NO_EFFECT,
    NO_EFFECT_OF_ADAPTER,
    Updates,
    _refuse_if_all_refused,
    _update_in_two_phases,
)
from deployments.policy.versions import Version, Versions
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import PushOptions, ReplicaUpdate, SwitchOptions
from tests.deployments.policy.policy_world import (
    World,
    a_payload,
    adapter,
    changed,
    checksum_of,
    content_of,
    delta,
    digest_of,
    in_world,
    refused,
    settled_threads,
    taken,
    versions,
    weights,
)
from tests.deployments.policy.scripted_replicas import RegistryCommandSource, ScriptedReplica, Step
from tests.fakes.cluster import ScriptedCluster
from tests.virtual_time import now, settled, synchronous

OLD, NEW = a_payload(0), a_payload(7)


@dataclass
class Scene:
    """Replicas `r0`, `r1`, ... with a script each."""

    scripts: Sequence[Sequence[Step]]
    cluster: ScriptedCluster = field(default_factory=ScriptedCluster)
    replicas: list[ScriptedReplica] = field(default_factory=list)
    new: VersionPayload = NEW
    timeout_s_per_gb: float = 0.0

    async def begin(self) -> "Scene":
        self.registry = ReplicaRegistry(self.cluster, 60.0, self.timeout_s_per_gb)
        for number, script in enumerate(self.scripts):
            replica = ScriptedReplica(f"r{number}", RegistryCommandSource(self.registry), self.cluster, script)
            self.replicas.append(await replica.start())
        return self

    async def update(self) -> list[ReplicaUpdate]:
        of = self.registry, self.registry.replicas, self.new.version, (self.new,), SwapOptions()
        return await _update_in_two_phases(*of, self.make_current, self.go_back)

    async def go_back(self, replica: RegisteredReplica) -> None:
        await self.registry.load(replica, [OLD])

    async def make_current(self, shows_effect: bool) -> None:
        assert shows_effect
        loaded = [replica for replica in self.replicas if replica.is_alive and replica.loaded.version == NEW.version]
        assert all(replica.is_on_trial for replica in loaded), "a replica serves what is not current on disk"
        self.cluster.events.append(("store", "durable", NEW.version))

    @property
    def done(self) -> list[tuple[str, str]]:
        return [(who, what) for who, what, _ in self.cluster.events]

    async def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        await settled()


def swapped(name: str) -> ReplicaUpdate:
    return ReplicaUpdate(replica_id=name, status="swapped", load_s=1.0, swap_s=2.0, pause_s=3.0)


def tried(name: str) -> ReplicaUpdate:
    """The outcome of the replica that tried the weights for all."""
    return swapped(name).model_copy(update={"canary_s": 4.0})


def replaced(name: str, error: str) -> ReplicaUpdate:
    return ReplicaUpdate(replica_id=name, status="replaced", error=error)


@synchronous
async def updated(*scripts: Sequence[Step]) -> tuple[Scene, list[ReplicaUpdate]]:
    scene = await Scene(scripts).begin()
    replicas = await scene.update()
    registered = [replica.replica_id for replica in scene.registry.replicas]
    assert registered == [update.replica_id for update in replicas if update.status == "swapped"]
    await scene.end()
    return scene, replicas


def test_one_replica_tries_a_version_before_it_is_current_and_others_swap() -> None:
    scene, replicas = updated([], [], [])
    trial = [("r0", "swap"), ("r0", "canary"), ("store", "durable"), ("r0", "accept requests")]
    assert scene.done == [*((f"r{n}", "stage") for n in range(3)), *trial, ("r1", "swap"), ("r2", "swap")]
    assert {version for _, _, version in scene.cluster.events} == {7}
    assert replicas == [tried("r0"), swapped("r1"), swapped("r2")]
    assert [replica.loaded for replica in scene.replicas] == [LoadedWeights(7)] * 3
    assert scene.cluster.killed == []


def test_a_replica_that_dies_or_breaks_proves_nothing_about_the_weights() -> None:
    lost, broken = ReplicaLost("it died"), CommandReport(1, LoadedWeights(), error="the engine died", broken=True)
    unknown, staged = CommandReport(2, LoadedWeights(), error="a tensor is unknown"), CommandReport(3, LoadedWeights())
    for results in ([], [lost], [broken], [broken, staged], [unknown, staged]):
        _refuse_if_all_refused(results)
    with pytest.raises(WeightsRefused, match="the engine cannot take them: a tensor is unknown"):
        _refuse_if_all_refused([lost, broken, unknown])


LOST = {
    "die": "it died",
    "die after": "it died",
    "hang": "it did not report within 60 s",
    "register again": "it registered again",
    "error": "OSError: r1 has no room",
}


OK: list[Step] = ["ok", "ok", "ok"]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("step", LOST)
def test_a_replica_that_fails_is_replaced_and_the_others_swap(step: Step, at: int) -> None:
    scene, replicas = updated([], [*OK[:at], step], [])
    assert replicas == [tried("r0"), replaced("r1", LOST[step]), swapped("r2")]
    assert scene.cluster.killed == ["r1"]
    others = [what for who, what in scene.done if who != "r1"]
    assert others == ["stage", "stage", "swap", "canary", "durable", "accept requests", "swap"]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("step", ["die", "die after", "register again"])
def test_another_replica_tries_the_version_if_the_first_one_is_lost(step: Step, at: int) -> None:
    scene, replicas = updated([*OK[:at], step], [])
    assert replicas == [replaced("r0", LOST[step]), tried("r1")]
    assert scene.done[-1] == ("r1", "accept requests")


WENT_BACK = "a replica could not generate with them and went back: "


@pytest.mark.parametrize(
    ("scripts", "failure", "message"),
    [
        # It cannot go back.
        ([["ok", "ok", "error", "error"]], WeightsRefused, WENT_BACK + "OSError: r0 has no room"),
        ([["ok", "ok", "error", "ok", "error"]], WeightsRefused, WENT_BACK + "OSError: r0 has no room"),
        ([["ok", "ok", "error", "hang"]], WeightsRefused, WENT_BACK + "OSError: r0 has no room"),
        # It broke.
        ([["ok", "error"]], WeightsRefused, WENT_BACK + "OSError: r0 has no room"),
        ([["ok", "hang"]], WeightsRefused, WENT_BACK + "it did not report within 60 s"),
        ([["ok", "ok", "hang"]], WeightsRefused, WENT_BACK + "it did not report within 60 s"),
        # None lived to try it.
        ([["die"], ["die after"]], VersionUntried, "all replicas were lost before that: it died"),
        ([["ok", "die"], ["ok", "ok", "die after"]], VersionUntried, "all replicas were lost before that: it died"),
    ],
)
async def test_replicas_that_break_in_a_trial_are_replaced_and_it_is_not_current(
    scripts: list[list[Step]], failure: type[PolicyFailure], message: str
) -> None:
    scene = await Scene([*scripts, [] if len(scripts) == 1 else ["die"]]).begin()
    broken = [replica.name for replica in scene.replicas[: len(scripts)]]
    async with refused(failure, "weights", message):
        await scene.update()
    assert not {*broken} & {each.replica_id for each in scene.registry.replicas}
    assert ("store", "durable") not in scene.done
    if len(scripts) == 1:
        assert (scene.cluster.killed, scene.replicas[1].loaded) == (["r0"], LoadedWeights())
        assert [event for event in scene.done if event[0] != "r0"] == [("r1", "stage")]
    await scene.end()


async def test_time_limits_grow_with_the_size_of_the_weights() -> None:
    scene = await Scene([["ok", "ok", "hang"]], new=replace(NEW, size_bytes=3 * 10**9), timeout_s_per_gb=20.0).begin()
    with pytest.raises(WeightsRefused, match="it did not report within 120 s"):
        await scene.update()
    assert now() == 120.0
    await scene.end()


# Of a store


@in_world()
async def test_new_weights_reach_every_replica_and_are_current(world: World) -> None:
    replicas = [await world.replica(name) for name in ("r0", "r1")]
    content = weights(2.0)
    update = await world.push(5, content, mode="wait")
    assert (update.version, update.checksum, update.canary_s) == (5, checksum_of(content), 4.0)
    assert [(each.replica_id, each.status) for each in update.replicas] == [("r0", "swapped"), ("r1", "swapped")]
    assert [content_of(replica.staged) for replica in replicas] == [content, content]
    state = await world.store.state(0)
    assert (state.current, state.updating_to, state.transfer_world_size) == (5, None, 3)
    assert [(replica.replica_id, replica.version) for replica in state.replicas] == [("r0", 5), ("r1", 5)]
    initial, stored = state.versions
    assert (initial.version, initial.kind, initial.created_at) == (0, "initial", None)
    assert (stored.version, stored.kind, stored.base, stored.checksum) == (5, "full", None, update.checksum)
    assert (stored.size_bytes, stored.created_at) == (len(content), world.versions.info(5).created_at)
    assert world.files() == {"versions.json", "versions/5.safetensors"}


@in_world()
async def test_a_version_not_current_on_disk_is_served_nowhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_second_update_may_be_refused_instead(world: World, tmp_path: Path) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = await world.updating(1, weights(2.0))
    message = "version 1 is being loaded by the replicas; wait for it, or say if_busy=wait"
    async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
        await world.push(2, weights(3.0), if_busy="refuse")
    async with taken(1, newest=1):
        await world.store.write_chunk(1, None, 0, b"")
    # Also one that was validated meanwhile.
    store, info = world.store, Version(version=2, kind="full", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    updates = Updates(store.policies, store.registry, store.loading, BackgroundTasks(), is_rolling=False)
    with pytest.raises(UpdateUnderWay):
        await updates.update(world.policy, info, tmp_path / "weights", PushOptions(if_busy="refuse"))
    assert not pushing.done()
    await pushing
    assert (versions(world), world.cluster.done("swap")) == ([1], [("r0", 1)])


@in_world()
async def test_an_update_that_is_overtaken_is_refused_and_not_broken(world: World) -> None:
    replica = await world.replica("r0", command_s=5.0)
    first = await world.updating(1, weights(1.5))
    higher = world.pushing(3, weights(3.0))
    await settled_threads()
    lower = world.pushing(2, weights(2.0))
    await asyncio.gather(first, higher)
    async with taken(2, newest=3):
        await lower
    assert replica.loaded == LoadedWeights(3)
    assert not list(world.folder.glob("uploads/*"))


@pytest.mark.parametrize("kind", ["full", "adapter"])
@pytest.mark.parametrize("resets", [True, False])
@in_world()
async def test_it_is_said_whether_the_prefix_cache_of_old_weights_stays(world: World, kind: str, resets: bool) -> None:
    await world.replica("r0")
    content = weights(2.0) if kind == "full" else adapter()
    update = await world.push(1, content, kind=kind, reset_prefix_cache=resets)
    repeated = await world.store.repeated_update(1, digest_of(content))
    assert repeated is not None
    state, keeps = await world.store.state(0), kind == "full" and not resets
    assert [update.keeps_prefix_cache, repeated.keeps_prefix_cache] == [keeps, keeps]
    assert [version.keeps_prefix_cache for version in state.versions] == [False, keeps]


@in_world()
async def test_weights_without_a_visible_change_are_served_with_a_warning(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    replica.changes_nothing = True
    assert (await world.push(2, delta(), kind="delta", base=1)).warnings == [NO_EFFECT]
    assert (await world.push(3, changed(weights(2.0)))).warnings == [], "the weights are the same"
    assert (await world.store.roll_back(2, None, SwitchOptions())).warnings == []
    for name in (None, "run-b"):
        assert (await world.push(5, adapter(), kind="adapter", name=name)).warnings == [NO_EFFECT_OF_ADAPTER]
    replica.changes_nothing = False
    assert (await world.push(6, adapter(2.0), kind="adapter", name="run-b")).warnings == []


@pytest.mark.parametrize("name", [None, "run-b"])
@in_world()
async def test_an_adapter_is_refused_on_other_full_weights_than_its_base(world: World, name: str | None) -> None:
    await world.push(3, weights(2.0))
    message = (
        "the adapter was trained on these full weights, and others are current, version 3: make its own current first "
        "(POST /policy/rollback), or train it on those"
    )
    async with refused(PolicyNotCurrent, "base", message, 0):
        await world.push(4, adapter(), kind="adapter", name=name, base=0)
    assert (await world.push(4, adapter(), kind="adapter", name=name, base=3)).base == 3
    # A rollback has the weights that it was trained on.
    back = (await world.store.roll_back(0, None, SwitchOptions())).version
    assert (await world.push(9, adapter(), kind="adapter", name=name, base=0)).base == back


@in_world(activation="rolling")
async def test_in_a_rolling_activation_each_change_of_a_replica_is_told(world: World) -> None:
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
    replicas[0].at[Canary] = "error"
    with pytest.raises(WeightsRefused):
        await world.push(5, weights(2.0))
    assert told == [], "a version that is refused on trial is told to nobody"
    update = await world.push(5, weights(2.0))
    watching.cancel()
    assert [each.status for each in update.replicas] == ["swapped"] * 3
    # The change of the last one makes the version current, and is told as that.
    assert told == [(frozenset(names[:count]), [*names[:count]]) for count in (1, 2)]
    assert (world.policy.current, (await world.store.watch(None)).rolling) == (5, None)


@in_world(activation="rolling")
async def test_who_takes_an_offered_version_has_it_with_the_first_replica(world: World) -> None:
    for name in ("r0", "r1", "r2"):
        await world.ready(name, command_s=1.0)
    demands = ((5, None, True), (5, None, False), (0, 5, True), (6, None, True))
    waits = (world.store.wait_for(None, least, exact, 60.0, takes) for least, exact, takes in demands)
    waiting = [asyncio.create_task(wait) for wait in waits]
    update = world.pushing(5, weights(2.0))
    told = await waiting[0]
    assert told.rolling is not None
    assert (told.versions[""], told.rolling.replicas) == (0, frozenset({"r0"}))
    assert [task.done() for task in waiting] == [True, False, False, False]
    await update
    assert [(await task).versions[""] for task in waiting[1:3]] == [5, 5]
    with pytest.raises(PolicyNotCurrent):
        await waiting[3]
