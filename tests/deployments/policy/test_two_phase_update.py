"""One update over scripted replicas: nothing is swapped too early, and none is left behind whatever fails when."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.commands import CommandReport, LoadedWeights, SwapOptions, VersionPayload
from deployments.policy.failures import VersionUntried, WeightsRefused
from deployments.policy.replica_registry import RegisteredReplica, ReplicaRegistry
from deployments.policy.update import _refuse_if_all_refused, _update_in_two_phases
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import ReplicaUpdate
from tests import virtual_time
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.scripted_replicas import (
    STEPS,
    RegistryCommandSource,
    ScriptedCluster,
    ScriptedReplica,
    Step,
)
from tests.virtual_time import now, run, settled

TIMEOUT_S = 60.0
OLD = a_payload(0)
NEW = a_payload(7)
ADAPTER = a_payload(8, "adapter", "{}")


@dataclass
class Scene:
    """Replicas `r0`, `r1`, ... with a script each."""

    scripts: Sequence[Sequence[Step]]
    cluster: ScriptedCluster = field(default_factory=ScriptedCluster)
    replicas: list[ScriptedReplica] = field(default_factory=list)
    disk_is_full: bool = False
    new: VersionPayload = NEW
    timeout_s_per_gb: float = 0.0

    async def begin(self) -> "Scene":
        self.registry = ReplicaRegistry(self.cluster, TIMEOUT_S, self.timeout_s_per_gb)
        for number, script in enumerate(self.scripts):
            replica = ScriptedReplica(f"r{number}", RegistryCommandSource(self.registry), self.cluster, script)
            self.replicas.append(await replica.start())
        return self

    async def update(self, replicas: Sequence[RegisteredReplica] | None = None) -> list[ReplicaUpdate]:
        replicas = self.registry.replicas if replicas is None else replicas
        new, swap = self.new, SwapOptions()
        return await _update_in_two_phases(
            self.registry, replicas, new.version, (new,), swap, self.make_current, self.go_back
        )

    async def go_back(self, replica: RegisteredReplica) -> None:
        await self.registry.load(replica, [OLD])

    async def make_current(self, shows_effect: bool) -> None:
        assert shows_effect
        if self.disk_is_full:
            raise OSError("no space left")
        serving = [
            r.name for r in self.replicas if r.is_alive and r.loaded.version == NEW.version and not r.is_on_trial
        ]
        assert serving == [], "a replica serves what is not current on disk"
        self.cluster.events.append(("store", "durable", NEW.version))

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


def updated(*scripts: Sequence[Step]) -> tuple[Scene, list[ReplicaUpdate]]:
    async def story() -> tuple[Scene, list[ReplicaUpdate]]:
        scene = await Scene(scripts).begin()
        replicas = await scene.update()
        registered = [replica.replica_id for replica in scene.registry.replicas]
        assert registered == [update.replica_id for update in replicas if update.status == "swapped"]
        await scene.end()
        return scene, replicas

    return run(story())


def test_one_replica_tries_the_version_before_it_is_current_on_disk_and_the_others_swap() -> None:
    scene, replicas = updated([], [], [])
    assert [(who, what) for who, what, _ in scene.cluster.events] == [
        ("r0", "stage"),
        ("r1", "stage"),
        ("r2", "stage"),
        ("r0", "swap"),
        ("r0", "canary"),
        ("store", "durable"),
        ("r0", "accept requests"),
        ("r1", "swap"),
        ("r2", "swap"),
    ]
    assert {version for _, _, version in scene.cluster.events} == {7}
    assert replicas == [tried("r0"), swapped("r1"), swapped("r2")]
    assert [replica.loaded for replica in scene.replicas] == [LoadedWeights(7)] * 3
    assert scene.cluster.killed == []


@virtual_time.test
async def test_no_replica_swaps_before_the_slowest_has_staged() -> None:
    scene = await Scene([[], []]).begin()
    scene.replicas[1].command_s = 10.0
    await scene.update()
    assert [(who, what) for who, what, _ in scene.cluster.events] == [
        ("r0", "stage"),
        ("r1", "stage"),
        ("r0", "swap"),
        ("r0", "canary"),
        ("store", "durable"),
        ("r0", "accept requests"),
        ("r1", "swap"),
    ]
    assert now() == 20.0
    await scene.end()


@virtual_time.test
async def test_replicas_that_die_do_not_count_when_all_others_refuse_the_weights() -> None:
    scene = await Scene([["die"], ["error"]]).begin()
    with pytest.raises(WeightsRefused, match="r1 has no room"):
        await scene.update()
    assert scene.cluster.events == []
    assert [replica.replica_id for replica in scene.registry.replicas] == ["r1"]
    await scene.end()


def test_a_replica_that_breaks_while_it_stages_proves_nothing_about_the_weights() -> None:
    broken = CommandReport(1, LoadedWeights(), error="the engine died", broken=True)
    refused = CommandReport(2, LoadedWeights(), error="a tensor is unknown")
    staged = CommandReport(3, LoadedWeights())
    for results in ([], [broken], [broken, staged], [refused, staged]):
        _refuse_if_all_refused(results)
    with pytest.raises(WeightsRefused, match="the engine cannot take them: a tensor is unknown"):
        _refuse_if_all_refused([broken, refused])


LOST = {
    "die": "it died",
    "die after": "it died",
    "hang": "it did not report within 60 s",
    "register again": "it registered again",
    "error": "OSError: r1 has no room",
}


@pytest.mark.parametrize("at", ["stage", "swap"])
@pytest.mark.parametrize("step", LOST)
def test_a_replica_that_fails_is_replaced_and_the_others_swap(step: Step, at: str) -> None:
    scene, replicas = updated([], [step] if at == "stage" else ["ok", step], [])
    assert replicas == [tried("r0"), replaced("r1", LOST[step]), swapped("r2")]
    assert scene.cluster.killed == ["r1"]
    others = [event for event in scene.cluster.events if event[0] != "r1"]
    assert [what for _, what, _ in others] == ["stage", "stage", "swap", "canary", "durable", "accept requests", "swap"]


async def refused(scene: Scene, failure: type[WeightsRefused | VersionUntried], message: str) -> None:
    with pytest.raises(failure) as raised:
        await scene.update()
    assert raised.value.problems == (FieldProblem(field="weights", message=message),)
    assert "durable" not in [what for _, what, _ in scene.cluster.events]


@pytest.mark.parametrize("back", [["error"], ["ok", "error"], ["hang"]])
@virtual_time.test
async def test_a_replica_that_cannot_go_back_is_replaced(back: list[Step]) -> None:
    scene = await Scene([["ok", "ok", "error", *back], []]).begin()
    message = "a replica could not generate with them and went back: OSError: r0 has no room"
    await refused(scene, WeightsRefused, message)
    assert scene.cluster.killed == ["r0"]
    assert scene.replicas[1].loaded == LoadedWeights()
    await scene.end()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (["ok", "error"], "OSError: r0 has no room"),
        (["ok", "hang"], "it did not report within 60 s"),
        (["ok", "ok", "hang"], "it did not report within 60 s"),
    ],
)
@virtual_time.test
async def test_a_version_that_breaks_the_replica_that_tries_it_is_refused_and_the_replica_replaced(
    script: list[Step], error: str
) -> None:
    scene = await Scene([script, []]).begin()
    await refused(scene, WeightsRefused, f"a replica could not generate with them and went back: {error}")
    assert scene.cluster.killed == ["r0"]
    assert [event for event in scene.cluster.events if event[0] == "r1"] == [("r1", "stage", 7)]
    await scene.end()


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("step", ["die", "die after", "register again"])
def test_another_replica_tries_the_version_if_the_first_one_is_lost_meanwhile(step: Step, at: int) -> None:
    scene, replicas = updated([*["ok"] * at, step], [], [])  # type: ignore[list-item]
    assert replicas == [replaced("r0", LOST[step]), tried("r1"), swapped("r2")]
    assert [who for who, what, _ in scene.cluster.events if what == "accept requests"] == ["r1"]


def test_a_version_that_no_replica_lived_to_try_is_not_made_current() -> None:
    async def story(*scripts: Sequence[Step]) -> None:
        scene = await Scene(scripts).begin()
        await refused(scene, VersionUntried, "all replicas were lost before that: it died")
        assert scene.registry.replicas == []
        await scene.end()

    run(story(["die"], ["die after"]))
    run(story(["ok", "die"], ["ok", "ok", "die after"]))


def test_a_replica_that_is_lost_when_it_may_serve_the_version_is_replaced() -> None:
    _, replicas = updated(["ok", "ok", "ok", "die"], [])
    assert replicas == [replaced("r0", "it died"), swapped("r1")]


@virtual_time.test
async def test_time_limits_grow_with_the_size_of_the_weights() -> None:
    large = replace(NEW, size_bytes=3 * 10**9)
    scene = await Scene([["ok", "ok", "hang"]], new=large, timeout_s_per_gb=20.0).begin()
    with pytest.raises(WeightsRefused, match="it did not report within 120 s"):
        await scene.update()
    assert now() == 120.0
    await scene.end()


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("step", ["error", "hang"])
@virtual_time.test
async def test_a_replica_that_fails_to_load_a_payload_is_replaced(step: Step, before: int) -> None:
    scene = await Scene([[*["ok"] * before, step]]).begin()  # type: ignore[list-item]
    assert not await scene.registry.load(scene.registry.replicas[0], [NEW, ADAPTER])
    assert (scene.cluster.killed, scene.registry.replicas) == (["r0"], [])
    await scene.end()


@pytest.mark.parametrize(("step", "left"), [("die", []), ("register again", ["r0"])])
@virtual_time.test
async def test_a_replica_that_left_while_it_loaded_a_payload_is_not_ended(step: Step, left: list[str]) -> None:
    scene = await Scene([[step]]).begin()
    assert not await scene.registry.load(scene.registry.replicas[0], [NEW])
    assert [replica.replica_id for replica in scene.registry.replicas] == left
    assert scene.cluster.killed == []
    await scene.end()


SCRIPTS = st.lists(st.lists(st.sampled_from(STEPS), max_size=6), max_size=5)


@given(SCRIPTS, st.randoms())
def test_whichever_replica_fails_at_whichever_command_all_end_at_one_version_that_one_of_them_has_tried(
    scripts: list[list[Step]], random: Random
) -> None:
    async def story() -> None:
        scene = await Scene(scripts).begin()
        for replica in scene.replicas:
            replica.command_s = random.choice([0.0, 0.1, 5.0])
        everyone = {replica.name for replica in scene.replicas}
        outcomes: dict[str, str] | None = None
        with suppress(WeightsRefused, VersionUntried):
            outcomes = {update.replica_id: update.status for update in await scene.update()}
        # Those that registered again while they were on trial serve nothing until the store initializes them.
        serving = [
            replica
            for replica in scene.replicas
            if not replica.is_on_trial and replica.name in {each.replica_id for each in scene.registry.replicas}
        ]
        done = [what for _, what, _ in scene.cluster.events]
        if outcomes is None:
            assert scripts
            assert "durable" not in done
            assert all(replica.loaded == LoadedWeights() for replica in serving)
        else:
            assert done.count("durable") == 1
            before = done[: done.index("durable")]
            assert not scripts or before.count("canary") >= 1
            assert outcomes.keys() == everyone
            assert {name for name, status in outcomes.items() if status == "swapped"} == {r.name for r in serving}
            assert all(replica.loaded == LoadedWeights(NEW.version) for replica in serving)
        for replica in scene.replicas:
            assert len(replica.taken) == len(set(replica.taken))
        await scene.end()

    run(story())
