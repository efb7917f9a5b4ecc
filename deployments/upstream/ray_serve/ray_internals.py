"""Private parts of Ray itself: its configuration, the clusters of this machine and its resources, and nodes that leave.

Needed with Ray 2.60; no upstream issue is known. Ray has no public way to any of them.
"""

import time
from typing import Any

import ray
from ray import _raylet
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import find_gcs_addresses
from ray.core.generated import autoscaler_pb2
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

RAYLET: Any = _raylet
AUTOSCALER: Any = autoscaler_pb2
PREEMPTION: int = AUTOSCALER.DRAIN_NODE_REASON_PREEMPTION
"""The reason for which Ray lets a node that still works be given notice."""


def read_environment_again() -> None:
    """Lets Ray take in environment variables that were set after it was imported."""
    RAYLET.Config.initialize("")


def metrics_report_interval_s() -> float:
    """Seconds between two reports of Ray's exporters, which forget a gauge that was not set for two of them."""
    return float(RAYLET.Config.metrics_report_interval_ms()) / 1000


def clusters_of_this_machine() -> list[str]:
    """The addresses of the Ray clusters that run here, sorted."""
    return sorted(find_gcs_addresses())  # type: ignore[no-untyped-call]


def deadlines_of_leaving_nodes(timeout_s: float) -> dict[str, int]:
    """By the id of each node that was given notice, when it ends: milliseconds since 1970, or 0 for some day.

    Blocks. Raises `RayError` if Ray's control service does not answer within `timeout_s` seconds.
    """
    gcs = RAYLET.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadlines_ms: dict[str, int] = gcs.get_draining_nodes(timeout=timeout_s)
    return deadlines_ms


def give_notice(node_id: str, deadline_s: float, timeout_s: float) -> str | None:
    """Tells Ray that the node ends at `deadline_s`, in seconds since 1970; returns why it refuses, if it does.

    Ray and the replicas read the deadline by the clock of the node itself.

    Ray starts nothing there any more, and Serve moves the node's replicas to others. It cannot be taken back. Blocks.
    Raises `RayError` if Ray's control service does not answer within `timeout_s` seconds.
    """
    gcs = RAYLET.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = int(deadline_s * 1000)
    accepted, refusal = gcs.drain_node(node_id, PREEMPTION, "The machine was given notice.", deadline_ms, timeout_s)
    return None if accepted else str(refusal)


def time_of_node(node_id: str, timeout_s: float) -> float:
    """Seconds since 1970 by the clock of the node, which may differ from that of this one.

    Blocks. Raises `RayError` if the node does not say it within `timeout_s` seconds.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return time.time()
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(lambda: time.time()).options(num_cpus=0, scheduling_strategy=there).remote()
    return float(ray.get(asked, timeout=timeout_s))


def resources_of_this_machine() -> dict[str, float]:
    """The resources that Ray will find when it starts here."""
    found: dict[str, float] = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()  # type: ignore[no-untyped-call]
    return found
