"""The part of the Ray cluster that the policy store needs; tests use another implementation.

When the store of a cluster of several nodes starts, it logs what would be lost with its node.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.policy.commands import StoredFile

ALIVE_WITHIN_S = 10.0
LOOK_TIMEOUT_S = 60.0


class Cluster(Protocol):
    def node_id(self) -> str:
        """The node on which this process runs."""
        ...

    async def nodes_that_lack(self, path: Path) -> list[str]:
        """The names of the other nodes of the cluster from which `path` cannot be seen."""
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

    async def nodes_that_lack(self, path: Path) -> list[str]:
        """A node that cannot be asked within `LOOK_TIMEOUT_S` is left out."""
        nodes_of_cluster: Any = ray.nodes
        others = [node for node in nodes_of_cluster() if node["Alive"] and node["NodeID"] != self.node_id()]
        seen = await asyncio.gather(*(_is_seen_from(node["NodeID"], path) for node in others))
        return [str(node["NodeManagerHostname"]) for node, is_seen in zip(others, seen, strict=True) if not is_seen]

    async def read(self, file: StoredFile, offset: int, count: int) -> bytes:
        try:
            data: bytes = await _on_node(file.node_id, read_range).remote(Path(file.path), offset, count)
        except RayError as failure:
            # Before its last line is the traceback of the other process.
            reason = str(failure).strip().rpartition("\n")[2]
            raise OSError(f"{file.path} could not be read on its node: {reason}") from failure
        return data

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


async def _is_seen_from(node_id: str, path: Path) -> bool:
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return bool(await _on_node(node_id, os.path.exists).remote(str(path)))
    except (RayError, TimeoutError):
        return True


@cache
def _on_node(node_id: str, function: Callable[..., Any]) -> Any:
    """The function as a task on this node, which takes no CPU of it. Ray keeps a copy of each that is made."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=there)


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


logger = logging.getLogger("rollout_service.policy")


async def warn_unless_shared(folder: Path, cluster: Cluster) -> None:
    """Looks from each other node for the store's folder, which exists."""
    if lacking := await cluster.nodes_that_lack(folder / "run.json"):
        logger.warning(
            "Not all nodes share the folder of the policy store, %s; these do not see it: %s. If the store's node is "
            "lost, so are all versions and the unfinished uploads, and the service goes on with the model that it was "
            "started with. Set policy.folder to a folder that all nodes share.",
            folder,
            ", ".join(lacking),
        )
