"""What changes of weights ask of the Ray cluster; apart from the policy store, so that the store itself needs none."""

import asyncio
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

ALIVE_WITHIN_S = 10.0


class Cluster(Protocol):
    def put(self, piece: bytes) -> Any:
        """A reference to the piece, which replicas on every node can await."""
        ...

    async def is_alive(self, actor: Any) -> bool: ...

    def kill(self, actor: Any) -> None:
        """Ends the actor, if it has not ended yet; Serve starts another in its place."""
        ...


class RayCluster:
    def put(self, piece: bytes) -> Any:
        return ray.put(piece)

    async def is_alive(self, actor: Any) -> bool:
        """One that does not answer for a while counts as alive: Ray itself says when a node is lost."""
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
    """Of this Ray cluster, on this node: for weights that need not outlive it."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "rollout-weights"
