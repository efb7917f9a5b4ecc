"""What the policy store needs of the Ray cluster; tests use another implementation."""

import asyncio
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

ALIVE_WITHIN_S = 10.0


class Cluster(Protocol):
    def node_id(self) -> str:
        """Of the node on which this process runs."""
        ...

    async def is_alive(self, actor: Any) -> bool: ...

    def kill(self, actor: Any) -> None:
        """Ends the actor if it has not ended yet; Serve starts another in its place."""
        ...


class RayCluster(Cluster):
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def is_alive(self, actor: Any) -> bool:
        """An actor that does not answer within `ALIVE_WITHIN_S` counts as alive: Ray detects the loss of a node."""
        try:
            async with asyncio.timeout(ALIVE_WITHIN_S):
                await actor.__ray_ready__.remote()
        except RayActorError:
            return False
        except TimeoutError:
            return True
        return True

    def kill(self, actor: Any) -> None:
        ray.kill(actor)


def cluster_weights_folder() -> Path:
    """A folder of this Ray cluster on this machine, for weights that need not outlive the cluster."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "rollout-weights"


def node_weights_folder() -> Path:
    """A folder of this node alone: one machine can be several nodes of a cluster."""
    return cluster_weights_folder() / "nodes" / str(ray.get_runtime_context().get_node_id())
