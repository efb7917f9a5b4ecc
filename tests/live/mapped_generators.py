"""A generator deployment without an engine: its replicas follow the policy store as real ones do, and map weights."""

import asyncio
import hashlib
import mmap
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.generation.command_runner import CommandRunner
from deployments.generation.generator_replica import registration_of
from deployments.policy.cluster import RayCluster, node_weights_folder
from deployments.policy.commands import CommandCosts, LoadedWeights, SwapOptions
from deployments.policy.node_files import NodeWeights
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.rpc.handle_calls import policy_store_client
from deployments.rpc.named_replica_router import NAMED_REPLICA_ROUTING
from service.app import deployment

REPLICAS_PER_NODE = 2
STORE = "store"
"""The resource of the node on which the policy store runs."""


@dataclass
class Held:
    """What a replica holds, and where."""

    node_id: str
    pid: int
    version: int
    sha256: str
    inode: int
    """Of the mapped file."""


class MappedWeights:
    """Implements what `CommandRunner` calls of `WeightUpdater`, for full weights."""

    def __init__(self) -> None:
        self.loaded = LoadedWeights()
        self.is_on_trial = self.in_transfer = False
        self.sha256 = ""
        self.inode = 0
        self._staged: tuple[int, mmap.mmap] | None = None

    async def stage(self, version: int, path: Path) -> None:
        with path.open("rb") as file:
            self._staged = version, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self.inode = os.fstat(file.fileno()).st_ino

    async def swap(self, options: SwapOptions, is_trial: bool = False) -> CommandCosts:
        assert self._staged is not None
        self.is_on_trial = is_trial
        (version, mapped), self._staged = self._staged, None
        self.sha256 = hashlib.sha256(mapped).hexdigest()
        mapped.close()
        self.loaded = LoadedWeights(version)
        return CommandCosts()

    def accept(self) -> None:
        self.is_on_trial = False

    async def try_current(self) -> bool:
        assert self.is_on_trial
        return False

    async def checksum(self) -> str:
        return self.sha256

    async def is_alive(self) -> bool:
        return True


class MappedGenerator:
    async def __init__(self, policy_store: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        store = policy_store_client(policy_store)
        self._node_weights = NodeWeights(node_weights_folder(), RayCluster().node_id(), store.read_weights)
        self._node_weights.join()
        weights: Any = MappedWeights()
        adapters = SimpleNamespace(versions={}, needed=set())
        engine: Any = SimpleNamespace(weights=weights, canary=weights, is_alive=weights.is_alive, adapters=adapters)
        self._weights: MappedWeights = weights
        commands = CommandRunner(engine, store, lambda loaded: registration_of(1, loaded), self._node_weights)
        self._running = asyncio.create_task(commands.run())
        await commands.is_current.wait()

    async def held(self) -> dict[str, Any]:
        node_id, weights = ray.get_runtime_context().get_node_id(), self._weights
        return asdict(Held(node_id, os.getpid(), weights.loaded.full, weights.sha256, weights.inode))


def build(settings: PolicySettings, model: Path, nodes: int) -> Application:
    """Two replicas on each of `nodes` nodes."""
    options: dict[str, Any] = {"Policy": {"num_cpus": 0.1, "resources": {STORE: 1}}, "Generator": {"num_cpus": 0.1}}
    store = deployment(PolicyStore, "Policy", options).bind(settings, str(model))
    generator = deployment(MappedGenerator, "Generator", options).options(
        request_router_config=NAMED_REPLICA_ROUTING,
        num_replicas=REPLICAS_PER_NODE * nodes,
        max_replicas_per_node=REPLICAS_PER_NODE,
    )
    return generator.bind(store)


@cache
def handle_of(name: str) -> Any:
    """Of a deployment, for a program without an event loop."""
    handle: Any = serve.get_deployment_handle(name, app_name="rollout")
    handle._init(_run_router_in_separate_loop=True)  # noqa: SLF001 - Serve's own handles do so
    return handle
