"""What the processes of a running service hold: memory, descriptors, threads, files, shared memory, what they run."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import internal_api

from deployments.policy.cluster import cluster_weights_folder
from tests.endurance.growth import Bound
from tests.endurance.soak.replica_counts import replica_counts

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
GENERATOR = "ServeReplica:rollout:Generator"
ROLES = {
    "ServeReplica:rollout:Policy": "policy store",
    "ServeReplica:rollout:Ingress": "ingress",
    GENERATOR: "generator",
    "ServeReplica:rollout:Jobs": "job store",
    "ServeReplica:rollout:Sessions": "session store",
    "ServeReplica:rollout:": "environments",
    "ServeController": "serve",
    "gcs_server": "ray",
    "raylet": "ray",
}
"""By what the command line of a process contains; the first that fits."""
ENGINE = "engine"
"""The processes that a generator has started."""
BOUNDS = {
    "memory of engine": Bound(16 * MIB, 8_192),
    "memory": Bound(8 * MIB, 4_096),
    "descriptors": Bound(4),
    "threads": Bound(8),
    "shared memory": Bound(2 * MIB),
    "object store": Bound(1 * MIB),
    "objects": Bound(4),
    "weights folder": Bound(4 * MIB),
    "files of versions": Bound(8),
    # Each engine that is killed leaves the file with which its processes found each other; a third kills two.
    "temporary files": Bound(4),
    "disk": Bound(8 * MIB),
    "logs": Bound(8 * MIB, 65_536),
    "asyncio tasks": Bound(64),
    "engine requests": Bound(64),
    "rollouts in flight": Bound(64),
    "steps": Bound(64),
}
"""By quantity, or by a part of its name. A leaked copy of the embedded model's weights is 1.8 MB a push. What runs in
the replicas goes up and down with the load, which is always the same; logs have a line or two for each request."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    process: psutil.Process
    role: str
    replica: int
    """The id of the process below which it is: of a replica, or of a part of Ray or Serve. It may be its own."""


class ServiceResources:
    """Of the service below this very process.

    Memory is that of the processes that have lived since this object was made, if a role has such: the older a
    process is, the more it would have leaked, and what a younger one holds depends on how old it is. Of a role of
    which all have been replaced, it is that of all.

    Args:
        temporary: the folder for temporary files that the service was started with.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._weights = cluster_weights_folder()
        self._first = {found.replica for found in service_processes()}
        nodes: Any = ray.nodes
        [node] = nodes()
        self._node = node["NodeManagerAddress"], node["NodeManagerPort"]
        self._node_stats: Any = internal_api.node_stats

    def read(self) -> dict[str, float]:
        store = self._node_stats(*self._node, include_memory_info=False).store_stats
        reading = {
            "shared memory": float(psutil.disk_usage(str(SHARED_MEMORY)).used),
            "object store": float(store.object_store_bytes_used),
            "objects": float(store.num_local_objects),
        }
        return reading | self._files() | process_readings(self._first) | replica_counts()

    def _files(self) -> dict[str, float]:
        files: dict[str, dict[int, int]] = {"weights folder": {}, "logs": {}, "disk": {}}
        versions = temporary = 0
        for path in files_below(self._temporary):
            try:
                found = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if path.is_relative_to(self._weights):
                versions += 1
                kind = "weights folder"
            elif "logs" in path.parts:
                kind = "logs"
            else:
                temporary += 1
                kind = "disk"
            # A file with several names counts once.
            files[kind][found.st_ino] = found.st_blocks * BLOCK_BYTES
        sizes = {kind: float(sum(sizes.values())) for kind, sizes in files.items()}
        return {**sizes, "files of versions": float(versions), "temporary files": float(temporary)}


def files_below(folder: Path) -> Iterator[Path]:
    """Folders that vanish meanwhile are passed over."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def process_readings(first: Set[int]) -> dict[str, float]:
    """Memory (bytes that a process does not share), descriptors and threads by the role of the processes.

    Args:
        first: replicas whose memory is read; of the roles that have none of them, that of all is.
    """
    held: Counter[str] = Counter()
    memory: Counter[tuple[str, int]] = Counter()
    for found in service_processes():
        process, role = found.process, found.role
        try:
            with process.oneshot():
                used = process.memory_info()
                memory[role, found.replica] += used.rss - used.shared
                held[f"descriptors of {role}"] += process.num_fds()
                held[f"threads of {role}"] += process.num_threads()
        except psutil.Error:
            # It has ended.
            continue
    held.update({f"memory of {role}": used for role, used in memory_of_first(memory, first).items()})
    return {name: float(value) for name, value in held.items()}


def memory_of_first(memory: Mapping[tuple[str, int], int], first: Set[int]) -> dict[str, int]:
    """By role, the sum of what the `first` replicas hold; of all its replicas, if none of them is among the first.

    Args:
        memory: bytes, by role and replica.
    """
    with_first = {role for role, replica in memory if replica in first}
    sums: Counter[str] = Counter()
    for (role, replica), used in memory.items():
        if replica in first or role not in with_first:
            sums[role] += used
    return dict(sums)


def service_processes() -> Iterator[ServiceProcess]:
    """Processes without a role are left out; what a process with a role has started counts with it."""
    known: dict[int, ServiceProcess] = {}
    # Parents come before their children.
    for process in psutil.Process().children(recursive=True):
        try:
            command, parent = " ".join(process.cmdline()), known.get(process.ppid())
        except psutil.Error:
            continue
        role, replica = next((role for mark, role in ROLES.items() if mark in command), None), process.pid
        if role is None and parent is not None and parent.role != "ray":
            role, replica = ENGINE if parent.role == "generator" else parent.role, parent.replica
        if role is not None:
            known[process.pid] = ServiceProcess(process, role, replica)
            yield known[process.pid]
