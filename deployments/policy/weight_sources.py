"""The sources of weights over Serve handles."""

import random
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.failures import GenerationLost, RolloutFailure
from deployments.policy.cluster import node_weights_folder
from deployments.policy.commands import VersionPayload
from deployments.policy.failures import PolicyFailure
from deployments.policy.node_files import NodeWeights, SourceFailed, WeightsSource
from deployments.rpc.handle_calls import call_result

if TYPE_CHECKING:
    from deployments.policy.store import PolicyStore

MOST_SIBLINGS = 3
"""Replicas of which one node reads at a time. They are drawn at random, so that many nodes spread over all replicas."""


@dataclass(frozen=True, slots=True)
class StoreSource(WeightsSource):
    store: "PolicyStore"

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        return await read_bytes(self.store.read_weights(version, checksum, offset, count))

    def __str__(self) -> str:
        return "the policy store"


@dataclass(frozen=True, slots=True)
class ReplicaSource(WeightsSource):
    """Another replica of this deployment. If it takes no calls, Serve asks any, which fails unless it has the version.

    Args:
        handle: of the deployment.
    """

    handle: DeploymentHandle[Any]
    replica_id: str

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        named = self.handle.options(session_id=self.replica_id)
        response: Any = named.read_weights.remote(version, checksum, offset, count)
        return await read_bytes(call_result(response, response, GenerationLost, "The replica"))

    def __str__(self) -> str:
        return f"the replica {self.replica_id}"


async def read_bytes(call: Awaitable[Any]) -> bytes:
    """The result of `call`; raises `SourceFailed` in place of what else it raises."""
    try:
        data: bytes = await call
    except (RolloutFailure, PolicyFailure, OSError) as failure:
        raise SourceFailed(str(failure)) from failure
    return data


def node_weights_of_replica(store: "PolicyStore") -> NodeWeights:
    """The weights of this node for the Serve replica in this process, which fetches from its siblings too."""

    def sources_of(payload: VersionPayload) -> list[WeightsSource]:
        chosen = random.sample(payload.holders, min(MOST_SIBLINGS, len(payload.holders)))
        return [*(ReplicaSource(_own_deployment(), replica_id) for replica_id in chosen), StoreSource(store)]

    return NodeWeights(node_weights_folder(), ray.get_runtime_context().get_node_id(), sources_of)


@cache
def _own_deployment() -> DeploymentHandle[Any]:
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)
