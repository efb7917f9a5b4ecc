"""`rollout tasks`, `info`, `status` and `doctor`: tasks, limits and readiness of a service, and the installation."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Group
from rich.text import Text

from rollout_client.calls.call import call_for
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.commands.policy import policy_tables
from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import FAILED, AsJson, fact_table, out, plain, show
from rollout_client.cli.transcript import task_description, task_example
from rollout_client.contract.info import DegradedPart, Ready
from rollout_client.contract.policy import PolicyState
from rollout_client.errors import ServiceUnreachable, StatusError
from rollout_client.version import CONTRACT_VERSION, __version__

HEALTH_TIMEOUT_S = 60.0
UNAVAILABLE = frozenset(
    {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.SERVICE_UNAVAILABLE}
)
"""Statuses of a service without the route, which hides it from the key, has it turned off, or is not ready."""


class ServiceStatus(BaseModel):
    url: str
    is_ready: bool
    reason: str | None = None
    """Why it is not ready."""
    degraded: list[DegradedPart] = []
    """Parts that do not answer. Rollouts are played without them."""
    policy: PolicyState | None = None
    """`None` if the service does not say."""
    jobs: dict[str, int] | None = None
    """Number of jobs by state; `None` if the service does not say."""


def _status_of(client: RolloutClient) -> ServiceStatus:
    """Raises `RolloutError` if the service cannot be reached."""
    found = ServiceStatus(url=client.base_url, is_ready=True)
    try:
        found.degraded = client.once(call_for(Ready, "GET", "/readyz"), HEALTH_TIMEOUT_S).degraded
    except StatusError as error:
        found.is_ready, found.reason = False, str(error)
    with _ignoring_unavailable():
        found.policy = client.policy.state(retries=0)
    with _ignoring_unavailable():
        found.jobs = dict(Counter(job.state for job in client.jobs.all(retries=0)))
    return found


@contextmanager
def _ignoring_unavailable() -> Iterator[None]:
    """Ends the block where the service does not answer what is asked in it."""
    try:
        yield
    except StatusError as error:
        if error.status not in UNAVAILABLE:
            raise


def _status_tables(found: ServiceStatus) -> Group:
    rows = [
        ("service", plain(found.url)),
        ("ready", plain("yes", "green") if found.is_ready else plain(f"no: {found.reason}", "red")),
    ]
    for part in found.degraded:
        name = " ".join(filter(None, [part.part, part.task_name, part.replica_id]))
        rows.append(("degraded", plain(f"{name}: {part.reason}", "yellow")))
    if found.jobs is not None:
        rows.append(("jobs", plain(", ".join(f"{count} {state}" for state, count in found.jobs.items()) or "none")))
    return Group(fact_table(rows), *([] if found.policy is None else [policy_tables(found.policy)]))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Text]]:
    """Each value by its path; those that are not set have no row."""
    if isinstance(value, dict):
        for name, held in value.items():
            yield from _flat(held, f"{path}.{name}" if path else name)
    elif value is not None:
        yield path, plain(", ".join(map(str, value)) if isinstance(value, list) else str(value))


@command
def tasks(service: Connection, as_json: AsJson = False) -> None:
    """List the tasks, with a sample of each that can be posted as it is."""
    with service.client() as client:
        found = client.tasks()
    if as_json:
        show(found, as_json)
        return
    for task in found:
        out().print(task_description(task))
        out().print(task_example(task), soft_wrap=True)


@command
def info(service: Connection, as_json: AsJson = False) -> None:
    """Show which model, tokenizer, limits and versions the service has."""
    with service.client() as client:
        found = client.info()
    facts = _flat(found.model_dump(exclude={"tokenizer": {"encodings", "rendered_chat"}}))
    ours = plain(f"{__version__}, contract {CONTRACT_VERSION}")
    show(found, as_json, fact_table([*facts, ("client", ours)]))


@command
def status(service: Connection, as_json: AsJson = False) -> None:
    """Show whether rollouts can be played, what does not answer, and which weights are served.

    The exit code is 1 if no rollout would work.
    """
    with service.client() as client:
        found = _status_of(client)
    show(found, as_json, _status_tables(found))
    if not found.is_ready:
        raise typer.Exit(FAILED)


OURS = ("rollout-client ", "rollout-env ", "rollout-service ")


def _unmet_requirements() -> tuple[list[str], list[str]]:
    """The lines of `pip check` about our packages, then those about others.

    The latter need not matter: the lock leaves packages out that vLLM's build for processors names and does not need.
    """
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = (checked.stdout + checked.stderr).splitlines() if checked.returncode else []
    return [line for line in lines if line.startswith(OURS)], [line for line in lines if not line.startswith(OURS)]


@command
def doctor(
    service: Connection,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the service.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which requirements of installed packages are not met, and the status of the service.

    The exit code is 1 if a package of ours lacks something, or the service is not ready.
    """
    problems, notes = _unmet_requirements()
    found: ServiceStatus | None = None
    if not offline:
        try:
            with service.client() as client:
                found = _status_of(client)
        except ServiceUnreachable as error:
            notes.append(str(error))
    rows = [("python", plain(f"{sys.version.split()[0]} at {sys.executable}"))]
    rows += [("problem", plain(line, "red")) for line in problems] + [("note", plain(line)) for line in notes]
    tables = Group(fact_table(rows), *([] if found is None else [_status_tables(found)]))
    show({"problems": problems, "notes": notes, "service": found}, as_json, tables)
    if problems or (found is not None and not found.is_ready):
        raise typer.Exit(FAILED)
