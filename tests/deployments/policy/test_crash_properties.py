"""A policy store that is killed at any write: its folder holds the version before or the new one, whole.

For each kill: the version before the change or the new one is current, and the new one if its push was acknowledged;
no later version is listed; every listed version has exactly the weights that were pushed under its number; the replicas
all end with the current version and its weights, and none is replaced; the next push reaches all.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import WeightsRefused
from rollout_client.contract.policy import SwitchOptions
from tests.deployments.policy.killed_store import KilledStore, Remains
from tests.deployments.policy.policy_world import PUSHES, World, checksum_of, in_world, versions, weights
from tests.virtual_time import until

FEWEST_KILLS = 5
"""A new version with fewer kills was not recorded."""
FEWEST_KILLS_OF_A_REFUSAL = 2
"""It writes its upload, and discards it."""
pytestmark = pytest.mark.slow


class Trainer:
    """Makes changes of every kind, and knows the checksum of each version, which it records before its push."""

    def __init__(self, world: World, pushed: dict[int, str]) -> None:
        self.world = world
        self.pushed = pushed
        self.full = {0: weights(1.0)}
        """The full weights by version, the newest one last."""
        self.current = 0

    async def change(self, how: str) -> None:
        version, (base, before) = self.current + 1, [*self.full.items()][-1]
        if how == "refused":
            with pytest.raises(WeightsRefused):
                await self.world.push(version, b"no weights at all")
            return
        makes, is_adapter = before, how == "adapter"
        if how == "rollback":
            self.pushed[version] = checksum_of(before)
            await self.world.store.roll_back(base, version, SwitchOptions())
        else:
            content, makes, options = PUSHES[how](version + 1.0, base, before)
            self.pushed[version] = checksum_of(makes)
            await self.world.push(version, content, **options)
        if not is_adapter:
            self.full[version] = makes
        self.current = version


@settings(max_examples=8, deadline=None, database=None)
@given(
    changes=st.lists(st.sampled_from([*PUSHES, "rollback", "refused"]), min_size=1, max_size=3),
    replicas=st.integers(0, 2),
    kept=st.integers(1, 2),
)
def test_a_store_killed_at_any_write_has_the_old_or_the_new_one(changes: list[str], replicas: int, kept: int) -> None:
    with TemporaryDirectory() as folder:
        kills: list[tuple[Remains, int]] = []
        pushed: dict[int, str] = {}

        @in_world(keep_versions=kept)
        async def story(world: World) -> None:
            for number in range(replicas):
                await world.ready(f"r{number}")
            trainer = Trainer(world, pushed)
            await trainer.change("full")
            store = KilledStore(world, acknowledged=trainer.current)
            with pytest.MonkeyPatch.context() as patched:
                store.install(patched)
                for change in changes:
                    before = trainer.current
                    await trainer.change(change)
                    await asyncio.sleep(10.0)
                    store.acknowledged = trainer.current
                    store.record("nothing")
                    assert len(store.remains) >= (FEWEST_KILLS_OF_A_REFUSAL if change == "refused" else FEWEST_KILLS)
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
