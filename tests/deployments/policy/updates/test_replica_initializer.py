"""Replicas that register: what they load before they accept requests."""

from pathlib import Path

import pytest

from deployments.policy.replicas.commands import LoadedWeights
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import World, adapter, content_of, play, weights
from tests.deployments.policy.scripted_replicas import Step
from tests.paths import TINY_MODEL
from tests.virtual_time import now, until


def test_a_replica_accepts_requests_at_once_if_the_initial_weights_are_current(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert world.cluster.events == [("r0", "accept requests", 0)]
        assert world.cluster.puts == []
        assert not (world.folder / "versions").exists()

    play(story, tmp_path)


def test_a_replica_that_starts_loads_the_current_weights_before_it_accepts_requests(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert world.cluster.events == [("r0", "stage", 1), ("r0", "swap", 1), ("r0", "accept requests", 1)]
        assert content_of(replica.staged) == weights(2.0)

    play(story, tmp_path)


@pytest.mark.parametrize("moment", ["before", "stage", "swap"])
def test_a_replica_that_registers_during_an_update_ends_at_the_new_weights(tmp_path: Path, moment: str) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        await until(lambda: world.cluster.done("accept requests") == [("r0", 0)])
        pushing = world.pushing(1, weights(2.0))
        if moment == "before":
            await until(lambda: 1 in world.store._active_pushes)
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

    play(story, tmp_path)


def test_a_replica_with_weights_that_are_not_current_gets_the_initial_ones_back(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0", loaded=LoadedWeights(7))
        await until(lambda: replica.accepts_requests)
        assert replica.loaded == LoadedWeights(0)
        (tmp_path / "staged").write_bytes(content_of(replica.staged))
        assert file_checksum(tmp_path / "staged") == file_checksum(TINY_MODEL / "model.safetensors")

    play(story, tmp_path)


def test_a_replica_for_which_the_weights_cannot_be_read_is_replaced_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        (tmp_path / "empty").mkdir()
        world.store = world.another_store(tmp_path / "empty")
        await world.replica("r0", loaded=LoadedWeights(7))
        await until(lambda: world.cluster.killed == ["r0"])
        assert (await world.store.state(0)).replicas == []

    play(story, tmp_path)
    unreadable, replaced = caplog.records
    assert (unreadable.name, unreadable.levelname) == ("rollout_service.policy", "WARNING")
    assert unreadable.getMessage() == "The current weights could not be given to a replica."
    assert (unreadable.exc_info is not None, vars(unreadable)["replica_id"]) == (True, "r0")
    assert replaced.getMessage().startswith("A generator replica is replaced: weights: ")


@pytest.mark.parametrize("step", ["error", "hang"])
def test_a_replica_that_does_not_accept_requests_is_replaced_and_blocks_no_update(tmp_path: Path, step: Step) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", step)
        await until(lambda: world.cluster.killed == ["r0"])
        assert now() == {"error": 0.0, "hang": 30.0}[step]
        assert (await world.push(1, weights(2.0))).replicas == []

    play(story, tmp_path, command_timeout_s=30)


def test_a_replica_that_comes_late_gets_the_base_and_then_the_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        await world.push(2, adapter(), kind="adapter")
        await world.restart()
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert [(what, version) for _, what, version in world.cluster.events] == [
            ("stage", 1),
            ("swap", 1),
            ("stage", 2),
            ("swap", 2),
            ("accept requests", 2),
        ]
        has_base = await world.replica("r1", loaded=LoadedWeights(1))
        await until(lambda: has_base.accepts_requests)
        assert world.cluster.done("stage")[2:] == [("r1", 2)]
        has_an_old_one = await world.replica("r2", loaded=LoadedWeights(0, adapter=2))
        await until(lambda: has_an_old_one.accepts_requests)
        assert world.cluster.done("stage")[3:] == [("r2", 1), ("r2", 2)]

    play(story, tmp_path)
