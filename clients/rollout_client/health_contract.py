"""The contract of `/readyz`: whether rollouts can be served, and what does not answer."""

from typing import Literal

from rollout_client.contract.rollouts import Lenient


class DegradedPart(Lenient):
    """Something that does not answer. Rollouts are served without it."""

    part: Literal["generator", "environment", "data", "policy", "jobs", "sessions"]
    """Which kind of deployment it belongs to."""
    task_name: str | None = None
    """Of an environment: its task."""
    replica_id: str | None = None
    """The replica that does not answer; null if none of the deployment does."""
    reason: str
    """What happened when it was asked, a sentence."""


class Ready(Lenient):
    """Rollouts can be served."""

    status: Literal["ready"] = "ready"
    """Always `ready`; a service that is not ready answers 503."""
    degraded: list[DegradedPart] = []  # noqa: RUF012 - pydantic copies it
    """What does not answer, by task and replica, or a store. Rollouts of other tasks, and by other replicas,
    are served."""
