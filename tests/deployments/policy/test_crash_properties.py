"""A policy store that is killed at any write: its folder holds the version before or the new one, whole.

For each kill: the version before the change or the new one is current, and the new one if its push was acknowledged;
no later version is listed; every listed version has exactly the weights that were pushed under its number; the replicas
all end with the current version and its weights, and none is replaced; the next push reaches all.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import WeightsRefused
from rollout_client.contract.policy import SwitchOptions
from tests.deployments.policy.killed_store import KilledStore, Remains
from tests.deployments.policy.policy_world import (
    World,
    adapter,
    changed,
    checksum_of,
    delta,
    in_world,
    versions,
    weights,
)
from tests.virtual_time import until

FEWEST_KILLS = 5
"""A new version with fewer kills was not recorded."""
FEWEST_KILLS_OF_A_REFUSAL = 2
"""It writes its upload, and discards it."""
pytestmark = pytest.mark.slow


@dataclass
class Trainer:
    """Pushes changes of every kind, and knows what each version must be."""

    world: World
    pushed: dict[int, str] = field(default_factory=dict)
    """The checksum of each version, recorded before its push."""
    full: dict[int, bytes] = field(default_factory=dict)
    """The full weights by version."""
    current: int = 0

    async def push(self, content: bytes, makes: bytes, **options: Any) -> None:
        version = self.current + 1
        self.pushed[version] = checksum_of(makes)
        await self.world.push(version, content, **options)
        if options.get("kind") != "adapter":
            self.full[version] = makes
        self.current = version

    @property
    def newest_full(self) -> tuple[int, bytes]:
        return max(self.full.items())


async def push_full(trainer: Trainer) -> None:
    content = weights(trainer.current + 2.0)
    await trainer.push(content, content)


async def push_delta(trainer: Trainer) -> None:
    """The nodes apply it: its sender says what it makes."""
    base, before = trainer.newest_full
    after = changed(before, float(trainer.current), trainer.current)
    content = delta(float(trainer.current), trainer.current)
    await trainer.push(content, after, kind="delta", base=base, checksum=checksum_of(after))


async def push_unverified_delta(trainer: Trainer) -> None:
    base, before = trainer.newest_full
    content = delta(float(trainer.current), trainer.current)
    await trainer.push(content, changed(before, float(trainer.current), trainer.current), kind="delta", base=base)


async def push_adapter(trainer: Trainer) -> None:
    content = adapter(trainer.current + 1.0)
    await trainer.push(content, content, kind="adapter")


async def roll_back(trainer: Trainer) -> None:
    version, (to, content) = trainer.current + 1, trainer.newest_full
    trainer.pushed[version] = checksum_of(content)
    await trainer.world.store.roll_back(to, version, SwitchOptions())
    trainer.full[version] = content
    trainer.current = version


async def be_refused(trainer: Trainer) -> None:
    with pytest.raises(WeightsRefused):
        await trainer.world.push(trainer.current + 1, b"no weights at all")


CHANGES: list[Callable[[Trainer], Awaitable[None]]] = [
    push_full,
    push_delta,
    push_unverified_delta,
    push_adapter,
    roll_back,
    be_refused,
]


@settings(max_examples=8, deadline=None, database=None)
@given(
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3),
    replicas=st.integers(0, 2),
    kept=st.integers(1, 2),
)
def test_a_store_that_is_killed_at_any_write_leaves_the_version_before_or_the_new_one_to_all(
    changes: list[Callable[[Trainer], Awaitable[None]]], replicas: int, kept: int
) -> None:
    with TemporaryDirectory() as folder:
        kills: list[tuple[Remains, int]] = []
        pushed: dict[int, str] = {}

        @in_world(keep_versions=kept)
        async def story(world: World) -> None:
            for number in range(replicas):
                await world.ready(f"r{number}")
            trainer = Trainer(world, pushed)
            await push_full(trainer)
            store = KilledStore(world, acknowledged=trainer.current)
            with pytest.MonkeyPatch.context() as patched:
                store.install(patched)
                for change in changes:
                    before = trainer.current
                    await change(trainer)
                    await asyncio.sleep(10.0)
                    store.acknowledged = trainer.current
                    store.record("nothing")
                    assert len(store.remains) >= (FEWEST_KILLS_OF_A_REFUSAL if change is be_refused else FEWEST_KILLS)
                    kills.extend((remains, max(before, remains.acknowledged) + 1) for remains in store.remains)
                    store.remains.clear()

        story(tmp_path=Path(folder) / "story")
        for number, (remains, newest) in enumerate(kills):
            check_successor(remains, newest, pushed, Path(folder) / str(number))


def check_successor(remains: Remains, newest: int, pushed: dict[int, str], folder: Path) -> None:
    remains.restore(folder / "policy")

    @in_world()
    async def story(world: World) -> None:
        current = world.policy.current
        assert remains.acknowledged <= current <= newest
        listed = versions(world)
        assert current in listed
        assert max(listed) == current
        replicas = await remains.register(world)
        await until(lambda: all(replica.accepts_requests for replica in replicas))
        assert {replica.loaded for replica in replicas} <= {world.versions.desired}
        assert {checksum_of(replica.files[current]) for replica in replicas} <= {pushed[current]}
        assert world.cluster.killed == []
        # Once the full weights of a delta are written, versions that are no longer needed are removed.
        for version in versions(world):
            assert checksum_of(world.versions.file(version).read_bytes()) == pushed[version]
        content = weights(100.0)
        assert (await world.push(current + 1, content)).checksum == checksum_of(content)
        assert {replica.loaded for replica in replicas} <= {LoadedWeights(current + 1)}

    story(tmp_path=folder)
