"""Private parts of Ray itself: its configuration, the clusters of this machine and its resources, and nodes that leave.

Needed with Ray 2.60; no upstream issue is known. Ray has no public way to any of them.
"""

from typing import Any

import ray
from ray import _raylet
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import find_gcs_addresses

RAYLET: Any = _raylet


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


def resources_of_this_machine() -> dict[str, float]:
    """The resources that Ray will find when it starts here."""
    found: dict[str, float] = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()  # type: ignore[no-untyped-call]
    return found
