"""What the processes of a running service hold: memory, descriptors, threads, files, shared memory, what they run."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import internal_api

from benchmarks.soak.growth import Bound
from benchmarks.soak.replica_counts import replica_counts
from deployments.policy.cluster import cluster_weights_folder

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
    "ProxyActor": "serve",
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
    "running jobs": Bound(4),
    "steps": Bound(64),
}
"""By quantity, or by a part of its name. A leaked copy of the embedded model's weights is 1.8 MB a push. What runs in
the replicas goes up and down with the load, which is always the same; logs have a line or two for each request."""

BOUNDS_WITH_KILLS = {**BOUNDS, "memory of engine": Bound(128 * MIB, 8_192)}
"""Where engines are killed and replaced. The worker of a new one had 720 to 810 MiB of its own at first, 100 to 330
more after two to three minutes, and then stayed (`make soak MINUTES=3`): where replacing it takes longer in one third
than in another, their medians differ by half of this. A copy of the weights leaked by each push is 180 MiB between
thirds that have a hundred pushes each."""


class ServiceResources:
    """Of the service below this very process.

    Args:
        temporary: the folder for temporary files that the service was started with.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._weights = cluster_weights_folder()
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
        return reading | self._files() | processes() | replica_counts()

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


def processes() -> dict[str, float]:
    """Memory (bytes that a process does not share), descriptors and threads by the role of the processes."""
    held: Counter[str] = Counter()
    for process, role in with_roles(psutil.Process().children(recursive=True)):
        try:
            with process.oneshot():
                memory = process.memory_info()
                held[f"memory of {role}"] += memory.rss - memory.shared
                held[f"descriptors of {role}"] += process.num_fds()
                held[f"threads of {role}"] += process.num_threads()
        except psutil.Error:
            # It has ended.
            continue
    return {name: float(value) for name, value in held.items()}


def with_roles(found: list[psutil.Process]) -> Iterator[tuple[psutil.Process, str]]:
    """Processes without a role are left out; what a process with a role has started counts with it."""
    roles: dict[int, str] = {}
    # Parents come before their children.
    for process in found:
        try:
            command, parent = " ".join(process.cmdline()), roles.get(process.ppid())
        except psutil.Error:
            continue
        role = next((role for mark, role in ROLES.items() if mark in command), None)
        if role is None and parent is not None and parent != "ray":
            role = ENGINE if parent == "generator" else parent
        if role is not None:
            roles[process.pid] = role
            yield process, role
