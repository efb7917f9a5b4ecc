"""The cluster of a policy store, whose actors are scripted replicas."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from deployments.policy.cluster import Cluster
from deployments.policy.commands import StoredFile


@dataclass
class ScriptedCluster(Cluster):
    """An actor is a `ScriptedReplica`."""

    events: list[tuple[str, str, int]] = field(default_factory=list)
    """Replica, what it did, and with which version, in order."""
    killed: list[str] = field(default_factory=list)
    saved: dict[str, bytes] = field(default_factory=dict)
    """The files in which replicas saved the weights of transfers, by path."""
    read_s: float = 0.0
    """How long a read of one of them takes."""

    async def read(self, file: StoredFile, offset: int, count: int) -> bytes:
        assert file.node_id.startswith("node of ")
        await asyncio.sleep(self.read_s)
        return self.saved[file.path][offset : offset + count]

    def node_id(self) -> str:
        return "node"

    async def is_alive(self, actor: Any) -> bool:
        return bool(actor.is_alive)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)
        actor.end()

    def done(self, what: str) -> list[tuple[str, int]]:
        return [(who, version) for who, did, version in self.events if did == what]
