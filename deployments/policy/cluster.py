"""The part of the Ray cluster that the policy store needs; tests use another implementation."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.policy.commands import StoredFile

ALIVE_WITHIN_S = 10.0


class Cluster(Protocol):
    def node_id(self) -> str:
        """The node on which this process runs."""
        ...

    async def read(self, file: StoredFile, offset: int, count: int) -> bytes:
        """Bytes of a file on the node that it names; fewer at its end.

        Raises:
            OSError: the file cannot be read, or its node is lost.
        """
        ...

    async def is_alive(self, actor: Any) -> bool: ...

    def kill(self, actor: Any) -> None:
        """Ends the actor if it has not ended yet; Serve starts another in its place."""
        ...


class RayCluster(Cluster):
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def read(self, file: StoredFile, offset: int, count: int) -> bytes:
        try:
            there = NodeAffinitySchedulingStrategy(file.node_id, soft=False)
            task = _read_task().options(num_cpus=0, scheduling_strategy=there)
            return cast(bytes, await task.remote(Path(file.path), offset, count))
        except RayError as failure:
            # Before its last line is the traceback of the other process.
            reason = str(failure).strip().rpartition("\n")[2]
            raise OSError(f"{file.path} could not be read on its node: {reason}") from failure

    async def is_alive(self, actor: Any) -> bool:
        """An actor that does not answer within `ALIVE_WITHIN_S` counts as alive: Ray detects the loss of a node."""
        try:
            async with asyncio.timeout(ALIVE_WITHIN_S):
                await actor.__ray_ready__.remote()
        except RayError:
            # Not a RayActorError alone: of an actor that Ray has ended for its memory it raises OutOfMemoryError.
            return False
        except TimeoutError:
            return True
        return True

    def kill(self, actor: Any) -> None:
        ray.kill(actor)


@cache
def _read_task() -> Any:
    """Ray keeps a copy of each remote function that is made."""
    return ray.remote(read_range)


def read_range(path: Path, offset: int, count: int) -> bytes:
    """Returns fewer bytes at the end of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(count)


def cluster_weights_folder() -> Path:
    """A folder of this Ray cluster on this machine, for weights that need not outlive the cluster."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "rollout-weights"


def node_weights_folder() -> Path:
    """A folder of this node alone: one machine can be several nodes of a cluster."""
    return cluster_weights_folder() / "nodes" / str(ray.get_runtime_context().get_node_id())
