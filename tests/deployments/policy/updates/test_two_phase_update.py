"""One update over scripted replicas: nothing is swapped too early, and none is left behind whatever fails when."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import CommandReport, LoadedWeights, SwapOptions
from deployments.policy.replicas.fleet import Fleet
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaRegistry
from deployments.policy.updates.two_phase_update import refuse_if_all_refused, update_replicas
from rollout_client.policy_contract import ReplicaUpdate
from rollout_client.problem_contract import FieldProblem
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
NEW = a_payload(7)
ADAPTER = a_payload(8, "adapter", "{}")


@dataclass
class Scene:
    """Replicas `r0`, `r1`, ... with a script each."""

    scripts: Sequence[Sequence[Step]]
    cluster: ScriptedCluster = field(default_factory=ScriptedCluster)
    replicas: list[ScriptedReplica] = field(default_factory=list)

    async def begin(self) -> "Scene":
        self.registry = ReplicaRegistry(self.cluster.is_alive)
        self.fleet = Fleet(self.registry, self.cluster, TIMEOUT_S)
        for number, script in enumerate(self.scripts):
            replica = ScriptedReplica(f"r{number}", RegistryCommandSource(self.registry), self.cluster, script)
            self.replicas.append(await replica.start())
        return self

    async def update(self, replicas: Sequence[RegisteredReplica] | None = None) -> list[ReplicaUpdate]:
        replicas = self.registry.replicas if replicas is None else replicas
        return await update_replicas(self.fleet, replicas, NEW, SwapOptions(), self.make_current)

    def make_current(self) -> None:
        self.cluster.events.append(("store", "durable", NEW.version))

    async def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        await settled()


def swapped(name: str) -> ReplicaUpdate:
    return ReplicaUpdate(replica_id=name, status="swapped", load_s=1.0, swap_s=2.0, pause_s=3.0)


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


def test_all_have_staged_and_the_version_is_current_on_disk_before_the_first_one_swaps() -> None:
    scene, replicas = updated([], [], [])
    assert [what for _, what, _ in scene.cluster.events] == ["stage"] * 3 + ["durable"] + ["swap"] * 3
    assert {version for _, _, version in scene.cluster.events} == {7}
    assert replicas == [swapped("r0"), swapped("r1"), swapped("r2")]
    assert [replica.loaded for replica in scene.replicas] == [LoadedWeights(7)] * 3
    assert scene.cluster.killed == []


def test_no_replica_swaps_before_the_slowest_has_staged() -> None:
    async def story() -> None:
        scene = await Scene([[], []]).begin()
        scene.replicas[1].command_s = 10.0
        await scene.update()
        assert [(who, what) for who, what, _ in scene.cluster.events] == [
            ("r0", "stage"),
            ("r1", "stage"),
            ("store", "durable"),
            ("r0", "swap"),
            ("r1", "swap"),
        ]
        assert now() == 20.0
        await scene.end()

    run(story())


def test_weights_that_no_engine_can_take_are_refused_and_nothing_is_changed() -> None:
    async def story() -> None:
        scene = await Scene([["error"], ["error"]]).begin()
        with pytest.raises(WeightsRefused) as refused:
            await scene.update()
        message = "the engine cannot take them: OSError: r0 has no room"
        assert refused.value.problems == (FieldProblem(field="weights", message=message),)
        assert (scene.cluster.events, scene.cluster.killed) == ([], [])
        assert [replica.replica_id for replica in scene.registry.replicas] == ["r0", "r1"]
        await scene.end()

    run(story())


def test_replicas_that_die_do_not_count_when_all_others_refuse_the_weights() -> None:
    async def story() -> None:
        scene = await Scene([["die"], ["error"]]).begin()
        with pytest.raises(WeightsRefused, match="r1 has no room"):
            await scene.update()
        assert scene.cluster.events == []
        assert [replica.replica_id for replica in scene.registry.replicas] == ["r1"]
        await scene.end()

    run(story())


def test_a_replica_that_breaks_while_it_stages_proves_nothing_about_the_weights() -> None:
    broken = CommandReport(1, LoadedWeights(), error="the engine died", broken=True)
    refused = CommandReport(2, LoadedWeights(), error="a tensor is unknown")
    staged = CommandReport(3, LoadedWeights())
    for results in ([], [broken], [broken, staged], [refused, staged]):
        refuse_if_all_refused(results)
    with pytest.raises(WeightsRefused, match="the engine cannot take them: a tensor is unknown"):
        refuse_if_all_refused([broken, refused])


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
    assert replicas == [swapped("r0"), replaced("r1", LOST[step]), swapped("r2")]
    assert scene.cluster.killed == ["r1"]
    others = [event for event in scene.cluster.events if event[0] != "r1"]
    assert [what for _, what, _ in others] == ["stage", "stage", "durable", "swap", "swap"]


def test_the_version_is_made_current_even_if_all_replicas_die_while_they_stage() -> None:
    scene, replicas = updated(["die"], ["die"])
    assert replicas == [replaced("r0", "it died"), replaced("r1", "it died")]
    assert scene.cluster.events == [("store", "durable", 7)]


def test_without_replicas_the_version_is_made_current() -> None:
    scene, replicas = updated()
    assert (replicas, scene.cluster.events) == ([], [("store", "durable", 7)])


def test_a_version_that_cannot_be_written_to_disk_is_swapped_nowhere() -> None:
    async def story() -> None:
        scene = await Scene([[], []]).begin()

        def fail() -> None:
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space left"):
            await update_replicas(scene.fleet, scene.registry.replicas, NEW, SwapOptions(), fail)
        assert [what for _, what, _ in scene.cluster.events] == ["stage", "stage"]
        assert (len(scene.registry.replicas), scene.cluster.killed) == (2, [])
        await scene.end()

    run(story())


def test_only_the_given_replicas_are_updated() -> None:
    async def story() -> None:
        scene = await Scene([[], []]).begin()
        assert await scene.update(scene.registry.replicas[1:]) == [swapped("r1")]
        assert scene.replicas[0].taken == []
        await scene.end()

    run(story())


def test_payloads_are_loaded_one_after_the_other() -> None:
    async def story() -> None:
        scene = await Scene([[]]).begin()
        [replica] = scene.registry.replicas
        assert await scene.fleet.load(replica, [NEW, ADAPTER])
        assert [(what, version) for _, what, version in scene.cluster.events] == [
            ("stage", 7),
            ("swap", 7),
            ("stage", 8),
            ("swap", 8),
        ]
        assert replica.loaded == LoadedWeights(7, adapter=8)
        assert await scene.fleet.load(replica, [])
        await scene.end()

    run(story())


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("step", ["error", "hang"])
def test_a_replica_that_fails_to_load_a_payload_is_replaced(step: Step, before: int) -> None:
    async def story() -> None:
        scene = await Scene([[*["ok"] * before, step]]).begin()  # type: ignore[list-item]
        assert not await scene.fleet.load(scene.registry.replicas[0], [NEW, ADAPTER])
        assert (scene.cluster.killed, scene.registry.replicas) == (["r0"], [])
        await scene.end()

    run(story())


@pytest.mark.parametrize(("step", "left"), [("die", []), ("register again", ["r0"])])
def test_a_replica_that_left_while_it_loaded_a_payload_is_not_ended(step: Step, left: list[str]) -> None:
    async def story() -> None:
        scene = await Scene([[step]]).begin()
        assert not await scene.fleet.load(scene.registry.replicas[0], [NEW])
        assert [replica.replica_id for replica in scene.registry.replicas] == left
        assert scene.cluster.killed == []
        await scene.end()

    run(story())


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(STEPS)), max_size=5), st.randoms())
def test_after_an_update_every_replica_has_the_new_version_or_was_replaced(
    scripts: list[tuple[Step, Step]], random: Random
) -> None:
    async def story() -> None:
        scene = await Scene(scripts).begin()
        for replica in scene.replicas:
            replica.command_s = random.choice([0.0, 0.1, 5.0])
        everyone = {replica.name for replica in scene.replicas}
        refused = False
        try:
            replicas = await scene.update()
        except WeightsRefused:
            refused = True
        done = [what for _, what, _ in scene.cluster.events]
        heard = [first for first, _ in scripts if first in ("ok", "error")]
        assert refused == (bool(heard) and "ok" not in heard)
        if refused:
            assert not {"durable", "swap"} & set(done)
            assert scene.cluster.killed == []
        else:
            assert done.count("durable") == 1
            assert "stage" not in done[done.index("durable") :]
            assert "swap" not in done[: done.index("durable")]
            outcomes = {update.replica_id: update.status for update in replicas}
            went_well = {name for name, steps in zip(sorted(everyone), scripts, strict=True) if steps == ("ok", "ok")}
            assert outcomes == {name: "swapped" if name in went_well else "replaced" for name in everyone}
            assert {replica.replica_id for replica in scene.registry.replicas} == went_well
            assert all(replica.loaded == LoadedWeights(NEW.version) for replica in scene.registry.replicas)
            assert set(scene.cluster.killed) == everyone - went_well
        for replica in scene.replicas:
            assert len(replica.taken) == len(set(replica.taken))
        await scene.end()

    run(story())
