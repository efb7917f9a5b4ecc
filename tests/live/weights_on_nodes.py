"""Pushes versions to replicas on several nodes of one machine, and prints what they got.

`python -m tests.live.weights_on_nodes FOLDER`; the last line is JSON, the fields of `Findings`. It is a
program, because Ray and Serve read their environment when they are imported.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from safetensors.torch import save_file

from deployments.policy.settings import PolicySettings
from rollout_client.contract.policy import PushOptions
from service.startup.local_service import require_cluster_token
from tests.live.mapped_generators import REPLICAS_PER_NODE, STORE, build, handle_of

VALUES = 10 * 2**20
"""Of one tensor in float16: 20 MiB, which are fetched in three ranges."""
PUSHES_BEFORE = 3
READY_WITHIN_S = 60.0
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 200 * 2**20}


@dataclass
class Findings:
    size_bytes: int = 0
    store_node: str = ""
    updates: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of the first pushes: what each replica reported."""
    held: list[dict[str, Any]] = field(default_factory=list)
    """By each replica after the first pushes."""
    held_late: list[dict[str, Any]] = field(default_factory=list)
    """By each replica after a node was added."""


def main(folder: Path) -> Findings:
    findings = Findings()
    model, roots = folder / "model", folder / "pushed"
    write_weights(model / "model.safetensors", 0)
    settings = PolicySettings(folder=str(folder / "policy"), checkpoint_roots=[str(roots)], copy_to_nodes=True)
    require_cluster_token()
    cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "resources": {STORE: 1}})
    try:
        cluster.add_node(**NODE)
        ray.init(cluster.address, namespace="serve", log_to_driver=False)
        findings.store_node = str(cluster.head_node.node_id)
        target = serve.RunTarget(build(settings, model, nodes=3), name="rollout", route_prefix=None)
        # The replicas of the third node wait for it.
        serve.run_many([target], wait_for_applications_running=False)
        held_by_all(2, 0)
        for version in range(1, 1 + PUSHES_BEFORE):
            update = push(roots, version)
            findings.updates.append([replica.model_dump() for replica in update.replicas])
        findings.size_bytes = stored(folder, version).stat().st_size
        findings.held = held_by_all(2, version)
        cluster.add_node(**NODE)
        findings.held_late = held_by_all(3, version)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        cluster.shutdown()
    return findings


def write_weights(path: Path, version: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((VALUES,), float(version), dtype=torch.float16)}, path)


def push(roots: Path, version: int) -> Any:
    write_weights(roots / "model.safetensors", version)
    checkpoint = str(roots / "model.safetensors")
    return handle_of("Policy").load_checkpoint.remote(version, checkpoint, PushOptions()).result()


def stored(folder: Path, version: int) -> Path:
    return folder / "policy" / "versions" / f"{version}.safetensors"


def held_by_all(nodes: int, version: int) -> list[dict[str, Any]]:
    """Once all replicas hold the version."""
    count = nodes * REPLICAS_PER_NODE
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        replicas = handle_of("Policy").state.remote(0.0).result().replicas
        if [replica.version for replica in replicas] == [version] * count:
            names = [replica.replica_id for replica in replicas]
            found = [handle_of("Generator").options(session_id=name).held.remote().result() for name in names]
            if len({held["pid"] for held in found}) == count:
                return found
        time.sleep(0.2)
    raise TimeoutError(f"{count} replicas do not hold version {version}")


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.stdout.write(json.dumps(asdict(main(Path(sys.argv[1])))) + "\n")
