"""What the processes of a running service hold: memory, descriptors, threads, files, shared memory, what they run."""

import os
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import internal_api

from benchmarks.process_group import command_of, parent_of
from deployments.policy.cluster import cluster_weights_folder
from tests.endurance.growth import Bound
from tests.endurance.soak.replica_counts import TASKS, WORK, replica_counts

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
    **dict.fromkeys((TASKS, *WORK), Bound(64)),
}
"""By quantity, or by a part of its name. A leaked copy of the embedded model's weights is 1.8 MB a push. What runs in
the replicas goes up and down with the load, which is always the same; logs have a line or two for each request."""


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
        self._first = {replica for _, _, replica in service_processes()}
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
        counts: Counter[str] = Counter()
        for path in files_below(self._temporary):
            try:
                found = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            kind = "logs" if "logs" in path.parts else "disk"
            if path.is_relative_to(self._weights):
                kind = "weights folder"
            counts[kind] += 1
            # The bytes of a file with several names count once.
            files[kind][found.st_ino] = found.st_blocks * BLOCK_BYTES
        sizes = {kind: float(sum(sizes.values())) for kind, sizes in files.items()}
        return {**sizes, "files of versions": float(counts["weights folder"]), "temporary files": float(counts["disk"])}


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
    for process, role, replica in service_processes():
        # It may have ended.
        with suppress(psutil.Error), process.oneshot():
            used = process.memory_info()
            memory[role, replica] += used.rss - used.shared
            held[f"descriptors of {role}"] += process.num_fds()
            held[f"threads of {role}"] += process.num_threads()
    with_first = {role for role, replica in memory if replica in first}
    for (role, replica), bytes_used in memory.items():
        if replica in first or role not in with_first:
            held[f"memory of {role}"] += bytes_used
    return {name: float(value) for name, value in held.items()}


def service_processes() -> Iterator[tuple[psutil.Process, str, int]]:
    """Each process with its role, and the id of the process below which it is: of a replica, or of a part of Ray or
    Serve. It may be its own.

    Processes without a role are left out; what a process with a role has started counts with it.
    """
    known: dict[int | None, tuple[str, int]] = {}
    # Parents come before their children.
    for process in psutil.Process().children(recursive=True):
        command, parent_role, parent = command_of(process), *known.get(parent_of(process), ("ray", 0))
        role, replica = next((role for mark, role in ROLES.items() if mark in command), None), process.pid
        if role is None and command and parent_role != "ray":
            role, replica = ENGINE if parent_role == "generator" else parent_role, parent
        if role is not None:
            known[process.pid] = role, replica
            yield process, role, replica
