"""Replicas that register: what they load before they accept requests."""

import asyncio
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from deployments.policy.commands import LoadedWeights
from deployments.policy.versions import Versions
from rollout_client.contract.policy import PolicyUpdate
from tests.deployments.policy.policy_world import World, adapter, content_of, in_world, play, weights
from tests.deployments.policy.scripted_replicas import Step
from tests.deployments.policy.weight_files import GOOD, written
from tests.virtual_time import now, settled, until


@in_world()
async def test_a_replica_accepts_requests_at_once_if_the_initial_weights_are_current(world: World) -> None:
    replica = await world.ready("r0")
    assert world.cluster.events == [("r0", "accept requests", 0)]
    assert replica.staged is None
    assert not (world.folder / "versions").exists()


@in_world()
async def test_a_replica_that_starts_loads_the_current_weights_before_it_accepts_requests(world: World) -> None:
    await world.push(1, weights(2.0))
    replica = await world.ready("r0")
    assert world.cluster.events == [("r0", "stage", 1), ("r0", "swap", 1), ("r0", "accept requests", 1)]
    assert content_of(replica.staged) == weights(2.0)


@pytest.mark.parametrize("moment", ["before", "stage", "swap"])
@in_world()
async def test_a_replica_that_registers_during_an_update_ends_at_the_new_weights(world: World, moment: str) -> None:
    await world.replica("r0", command_s=5.0)
    await until(lambda: world.cluster.done("accept requests") == [("r0", 0)])
    pushing = world.pushing(1, weights(2.0))
    if moment == "before":
        await until(lambda: 1 in world.policy._pushes)
    else:
        await world.until_updating(1)
        await until(lambda: len(world.replicas[0].taken) == (2 if moment == "stage" else 3))
    late = await world.replica("late")
    await pushing
    await until(lambda: late.accepts_requests)
    assert late.loaded == LoadedWeights(1)
    calls = [version for who, what, version in world.cluster.events if (who, what) == ("late", "accept requests")]
    assert calls == [0 if moment == "before" else 1]
    assert world.cluster.killed == []


@in_world()
async def test_a_replica_with_older_weights_than_the_current_ones_gets_those(world: World) -> None:
    await world.push(9, weights(2.0))
    replica = await world.ready("r0", loaded=LoadedWeights(7))
    assert (replica.loaded, content_of(replica.staged)) == (LoadedWeights(9), weights(2.0))


def test_a_replica_for_which_the_weights_cannot_be_read_is_replaced_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_versions: Versions, _version: int) -> Path:
        raise OSError("weights: the disk is gone")

    async def story(world: World) -> None:
        await world.push(9, weights(2.0))
        monkeypatch.setattr(Versions, "file", unreadable)
        await world.replica("r0")
        await until(lambda: world.cluster.killed == ["r0"])
        assert (await world.store.state(0)).replicas == []

    play(story, tmp_path)
    warning, replaced = caplog.records
    assert (warning.name, warning.levelname) == ("rollout_service.policy", "WARNING")
    assert warning.getMessage() == "The current weights could not be given to a replica."
    assert (warning.exc_info is not None, vars(warning)["replica_id"]) == (True, "r0")
    assert replaced.getMessage().startswith("A generator replica is replaced: weights: ")


@pytest.mark.parametrize("step", ["error", "hang"])
@in_world(command_timeout_s=30)
async def test_a_replica_that_does_not_accept_requests_is_replaced_and_blocks_no_update(
    world: World, step: Step
) -> None:
    await world.replica("r0", step)
    await until(lambda: world.cluster.killed == ["r0"])
    assert now() == {"error": 0.0, "hang": 30.0}[step]
    assert (await world.push(1, weights(2.0))).replicas == []


@in_world()
async def test_a_replica_that_comes_late_gets_the_base_and_then_the_adapter(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    await world.restart()
    await world.ready("r0")
    assert [(what, version) for _, what, version in world.cluster.events] == [
        ("stage", 1),
        ("swap", 1),
        ("stage", 2),
        ("swap", 2),
        ("accept requests", 2),
    ]
    await world.ready("r1", loaded=LoadedWeights(1))
    assert world.cluster.done("stage")[2:] == [("r1", 2)]
    await world.ready("r2", loaded=LoadedWeights(0, adapter=2))
    assert world.cluster.done("stage")[3:] == [("r2", 1), ("r2", 2)]


LOAD_S = 100.0
COMMANDS = 2
"""To load a version: stage and swap."""


@in_world()
async def test_replicas_that_start_at_the_same_time_load_at_the_same_time(world: World) -> None:
    await world.push(1, weights(2.0))
    replicas = [await world.replica(f"r{number}", command_s=LOAD_S) for number in range(4)]
    await until(lambda: all(replica.loaded == LoadedWeights(1) for replica in replicas))
    assert now() == COMMANDS * LOAD_S


@in_world()
async def test_an_update_does_not_wait_for_a_replica_that_loads_which_then_loads_the_new_version(world: World) -> None:
    await world.push(1, weights(2.0))
    slow = await world.replica("slow", command_s=LOAD_S)
    await until(lambda: len(slow.taken) == 1)
    assert (await world.push(2, weights(3.0))).replicas == []
    assert now() == 0.0
    await until(lambda: slow.accepts_requests)
    assert world.cluster.events == [
        ("slow", "stage", 1),
        ("slow", "swap", 1),
        ("slow", "stage", 2),
        ("slow", "swap", 2),
        ("slow", "accept requests", 2),
    ]


@in_world(keep_versions=1)
async def test_the_file_of_a_version_stays_while_a_replica_that_starts_loads_it(world: World) -> None:
    await world.push(1, weights(2.0))
    slow = await world.replica("slow", command_s=LOAD_S)
    await until(lambda: len(slow.taken) == 1)
    await world.push(2, weights(3.0))
    await until(lambda: slow.staged is not None)
    assert content_of(slow.staged) == weights(2.0)
    await until(lambda: slow.accepts_requests)
    await world.push(3, weights(4.0))
    assert not world.versions.weights(1).exists()


@in_world()
async def test_a_replica_that_an_update_has_overtaken_makes_the_next_one_wait_for_one_load(world: World) -> None:
    await world.push(1, weights(2.0))
    slow = await world.replica("slow", command_s=LOAD_S)
    await until(lambda: len(slow.taken) == COMMANDS)
    assert (await world.push(2, adapter(1.0), kind="adapter")).replicas == []
    await until(lambda: len(slow.taken) == 2 * COMMANDS - 1)
    last = await world.push(3, adapter(9.0), kind="adapter")
    assert [replica.replica_id for replica in last.replicas] == ["slow"]


class CheckedEvents(list[tuple[str, str, int]]):
    """Raises if a replica may accept requests and does not hold the version that is current then."""

    def __init__(self, world: World) -> None:
        self._world = world

    def append(self, event: tuple[str, str, int]) -> None:
        name, what, version = event
        current = self._world.versions.current
        assert what != "accept requests" or version == current, f"{name} has {version}, and {current} is current"
        super().append(event)

    def changes_of(self, name: str) -> list[tuple[str, int]]:
        """The commands of a replica that change its weights."""
        return [(what, version) for who, what, version in self if who == name and what in ("stage", "swap")]


@given(
    acts=st.lists(st.sampled_from(["start", "push", "push adapter", "die", "wait"]), max_size=16),
    random=st.randoms(use_true_random=False),
)
def test_in_whatever_order_replicas_start_and_die_and_versions_come_all_end_with_the_newest(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str], random: Random
) -> None:
    folder = tmp_path_factory.mktemp("world")
    written(folder / "model" / "model.safetensors", GOOD)

    async def story(world: World) -> None:
        world.store = world.another_store(folder / "model")
        events = world.cluster.events = CheckedEvents(world)
        pushes: list[asyncio.Task[PolicyUpdate]] = []
        died = set[str]()
        for act in acts:
            if act == "start":
                await world.replica(f"r{len(world.replicas)}", command_s=random.choice([0.0, 1.0, 10.0]))
            elif act == "die" and world.replicas:
                dying = random.choice(world.replicas)
                died.add(dying.name)
                dying.end()
            elif act.startswith("push"):
                is_adapter = act == "push adapter"
                kind = {"kind": "adapter"} if is_adapter else {}
                pushes.append(world.pushing(len(pushes) + 1, adapter() if is_adapter else save(GOOD), **kind))
                await until(lambda: pushes[-1].done() or len(pushes) in world.policy._pushes)
            else:
                await asyncio.sleep(random.choice([0.5, 5.0, 30.0]))
        await asyncio.gather(*pushes, return_exceptions=True)
        living = [replica for replica in world.replicas if replica.is_alive]
        await until(lambda: all(replica.accepts_requests for replica in living))
        await settled()
        desired = world.versions.desired
        assert {replica.loaded for replica in living} <= {desired}
        # An update that meets a replica which has died ends its actor too.
        assert set(world.cluster.killed) <= died
        for replica in living:
            changes = events.changes_of(replica.name)
            assert [what for what, _ in changes] == ["stage", "swap"] * (len(changes) // 2)
            assert [version for _, version in changes[::2]] == [version for _, version in changes[1::2]]

    play(story, folder)
