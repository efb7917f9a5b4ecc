"""A store that is killed before any of its file operations: its successor and all replicas agree on one version.

After each kill: the version before or the new one is current, an acknowledged one always; every replica serves it, none
was replaced; its weights are whole; the next push reaches all.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deployments.policy.replicas.commands import LoadedWeights
from rollout_client.contract.policy import SwitchOptions
from tests.deployments.policy.killed_store import KilledStore, Remains
from tests.deployments.policy.policy_world import World, adapter, changed, checksum_of, delta, play, versions, weights
from tests.virtual_time import settled, until

FEWEST_KILLS = 8
"""A story with fewer recorded kills was not recorded."""
pytestmark = pytest.mark.slow


async def begun(world: World) -> None:
    for name in ("r0", "r1"):
        await world.replica(name)
    await until(lambda: all(replica.accepts_requests for replica in world.replicas))
    for version in (1, 2):
        await world.push(version, weights(version))


def killed_during(
    change: Callable[[World], Awaitable[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_folder_lost: bool = False,
) -> tuple[list[Remains], int]:
    """The remains of a kill before each operation of `change`, and the version that is current after it."""
    recorded: list[Remains] = []
    after = 0

    async def story(world: World) -> None:
        nonlocal after
        await begun(world)
        await settled()
        if is_folder_lost:
            shutil.rmtree(world.folder, ignore_errors=True)
        store = KilledStore(world, acknowledged=2)
        with monkeypatch.context() as patched:
            store.install(patched)
            await change(world)
            after = store.acknowledged = world.version_store.current()
            await settled()
            store.record("nothing")
        recorded.extend(store.remains)

    play(story, tmp_path / "story", keep_versions=2, run="run-a")
    return recorded, after


def check_successor(remains: Remains, after: int, folder: Path) -> None:
    remains.restore(folder / "policy")

    async def story(world: World) -> None:
        replicas = await remains.register(world)
        await until(lambda: all(replica.accepts_requests for replica in replicas))
        current = world.version_store.current()
        assert current in ({after} if remains.acknowledged == after else {2, after})
        loaded = {replica.loaded for replica in replicas}
        assert loaded == {world.policy.versions.desired}
        assert {each.version for each in loaded} == {current}
        assert world.cluster.killed == []
        assert (await world.store.state(0)).current == current
        await until(lambda: world.policy.versions.has_desired)
        contents = {replica.files[replica.loaded.version] for replica in replicas}
        assert contents == {world.policy.versions.file(current).read_bytes()}
        assert [version for version in versions(world) if version > current] == []
        assert (await world.push(9, weights(9.0))).version == 9
        assert {replica.loaded for replica in replicas} == {LoadedWeights(9)}

    play(story, folder, keep_versions=2, run="run-a")


async def push_full(world: World) -> None:
    await world.push(3, weights(3.0))


async def push_delta(world: World) -> None:
    await world.push(3, delta(), kind="delta", base=2)


async def push_delta_that_goes_on_as_it_is(world: World) -> None:
    await world.push(3, delta(), kind="delta", base=2, checksum=checksum_of(changed(weights(2))))


async def push_delta_and_make_its_full_weights(world: World) -> None:
    await push_delta_that_goes_on_as_it_is(world)
    await asyncio.to_thread(world.policy.versions.file, 3)


async def push_adapter(world: World) -> None:
    await world.push(3, adapter(), kind="adapter")


async def roll_back(world: World) -> None:
    await world.store.roll_back(1, None, SwitchOptions())


async def push_what_is_refused_then_what_is_not(world: World) -> None:
    with pytest.raises(Exception, match="header"):
        await world.push(3, b"no weights")
    await world.push(3, weights(3.0))


@pytest.mark.parametrize(
    "change",
    [
        push_full,
        push_delta,
        push_delta_that_goes_on_as_it_is,
        push_delta_and_make_its_full_weights,
        push_adapter,
        roll_back,
        push_what_is_refused_then_what_is_not,
    ],
)
def test_a_store_that_is_killed_at_any_point_of_a_change_leaves_one_version_to_all(
    change: Callable[[World], Awaitable[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, after = killed_during(change, tmp_path, monkeypatch)
    assert after == 3
    assert len(recorded) >= FEWEST_KILLS
    for number, remains in enumerate(recorded):
        check_successor(remains, after, tmp_path / f"{number} {remains.operation}")


def test_a_store_that_is_killed_while_it_takes_versions_over_from_replicas_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take_over(world: World) -> None:
        await world.restart()
        await until(lambda: world.version_store.weights(2).exists())

    recorded, after = killed_during(take_over, tmp_path, monkeypatch, is_folder_lost=True)
    assert after == 2
    assert len(recorded) >= FEWEST_KILLS
    for number, remains in enumerate(recorded):
        check_successor(remains, after, tmp_path / f"{number} {remains.operation}")
