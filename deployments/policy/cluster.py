"""What the policy store needs of the Ray cluster; tests use another implementation."""

import asyncio
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

ALIVE_WITHIN_S = 10.0


class Cluster(Protocol):
    def put(self, chunk: bytes) -> Any:
        """Returns a reference to the bytes that replicas on every node can await."""
        ...

    async def is_alive(self, actor: Any) -> bool: ...

    def kill(self, actor: Any) -> None:
        """Ends the actor if it has not ended yet; Serve starts another in its place."""
        ...


class RayCluster(Cluster):
    def put(self, chunk: bytes) -> Any:
        return ray.put(chunk)

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
    """A folder of this Ray cluster on this node, for weights that need not outlive the cluster."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "rollout-weights"
