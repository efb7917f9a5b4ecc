"""A world whose versions are deltas of one another, from version 2 on."""

from collections.abc import Sequence
from typing import Any

from deployments.policy.update import Updates
from rollout_client.contract.policy import PolicyUpdate
from tests.deployments.policy.policy_world import World, changed, checksum_of, delta, versions, weights
from tests.deployments.policy.scripted_replicas import ScriptedReplica

BASE = weights(2.0)


def full_weights(count: int) -> list[bytes]:
    """The weights of version 1, and of those that `push_deltas` makes of it."""
    contents = [BASE]
    for step in range(1, count):
        contents.append(changed(contents[-1], float(step), step))
    return contents


async def push_deltas(world: World, count: int, first: int = 2, **options: Any) -> list[PolicyUpdate]:
    """Versions from `first` on, each a delta of the one before it."""
    contents = full_weights(first + count)
    return [
        await world.push(
            version,
            delta(float(version - 1), version - 1),
            kind="delta",
            base=version - 1,
            checksum=checksum_of(contents[version - 1]),
            **options,
        )
        for version in range(first, first + count)
    ]


async def fleet(world: World, *names: str) -> Sequence[ScriptedReplica]:
    """Replicas that have version 1."""
    replicas = [await world.ready(name) for name in names]
    await world.push(1, BASE)
    return replicas


async def nothing(_: Updates) -> None:
    """Writes no full weights, as if the store had no time yet."""


def version_files(world: World) -> dict[int, set[str]]:
    """The ends of the names of the files of each stored version."""
    return {
        version: {path.name.removeprefix(f"{version}") for path in world.folder.glob(f"versions/{version}.*")}
        for version in versions(world)
    }


WHOLE, DELTA = {".safetensors"}, {".delta.safetensors"}
