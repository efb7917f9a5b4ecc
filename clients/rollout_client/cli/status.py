"""What a service says of itself at one moment, from `/readyz`, `/policy` and `/jobs`, and how a terminal shows it."""

from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel
from rich.console import Group
from rich.table import Table

from rollout_client.calls.rollouts import Call, parsed
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.policy_table import policy_tables
from rollout_client.cli.transcript import plain
from rollout_client.contract.policy import PolicyState
from rollout_client.errors import StatusError
from rollout_client.health_contract import DegradedPart, Ready

HEALTH_TIMEOUT_S = 60.0
NOT_SAID = frozenset(
    {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.SERVICE_UNAVAILABLE}
)
"""Answers of a service that has no such route, does not let the key see it, has it turned off, or is not ready."""

Found = TypeVar("Found")


class ServiceStatus(BaseModel):
    url: str
    is_ready: bool
    reason: str | None = None
    """Why it is not ready."""
    degraded: list[DegradedPart] = []
    """What does not answer. Rollouts are played without it."""
    policy: PolicyState | None = None
    """`None` if the service does not say."""
    jobs: dict[str, int] | None = None
    """Number of jobs by state; `None` if the service does not say."""


def readiness() -> Call[Ready]:
    return Call("GET", "/readyz", lambda body: parsed(Ready, "The response of GET /readyz", body))


def status_of(client: RolloutClient) -> ServiceStatus:
    """Raises `RolloutError` if the service cannot be reached."""
    found = ServiceStatus(url=client.base_url, is_ready=True)
    try:
        found.degraded = client.once(readiness(), HEALTH_TIMEOUT_S).degraded
    except StatusError as error:
        found.is_ready, found.reason = False, str(error)
    found.policy = if_said(client.policy)
    jobs = if_said(client.jobs.all)
    found.jobs = None if jobs is None else dict(Counter(job.state for job in jobs))
    return found


def if_said(ask: Callable[..., Found]) -> Found | None:
    try:
        return ask(retries=0)
    except StatusError as error:
        if error.status not in NOT_SAID:
            raise
        return None


def status_tables(found: ServiceStatus) -> Group:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("service", plain(found.url))
    table.add_row(
        "ready", plain("yes" if found.is_ready else f"no: {found.reason}", "green" if found.is_ready else "red")
    )
    for part in found.degraded:
        name = " ".join(filter(None, [part.part, part.task_name, part.replica_id]))
        table.add_row("degraded", plain(f"{name}: {part.reason}", "yellow"))
    if found.jobs is not None:
        table.add_row("jobs", plain(", ".join(f"{count} {state}" for state, count in found.jobs.items()) or "none"))
    return Group(table, *([] if found.policy is None else [policy_tables(found.policy)]))
