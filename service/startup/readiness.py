"""Deploys a Serve config and waits until all of it runs."""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping

from ray.serve.config import ProxyLocation
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview, ServeDeploySchema

from deployments.upstream.ray_serve.direct_ingress import own_port
from deployments.upstream.ray_serve.serve_internals import application_states, deploy_apps
from service.startup.config import ServiceNotStarted

_ROOM_TIMEOUT_S = 180.0
"""How long a deployment may wait for cores or GPUs before the start is given up.

Serve reports the same of a replica that has its reservation while its process starts: a minute on a busy machine.
"""
_HINT = (
    "Give a deployment less in its entry under `deployments`, such as `ray_actor_options: {num_cpus: 0.1}`, and the "
    "generator by `engine.num_cpus` and `engine.device`: a reservation is not a limit: a replica may use more."
)
_POLL_S = 0.5
_REPLICA_FAILED = "A replica failed to start with exception."
"""Prefix of Serve's message while it retries a replica whose constructor raised."""
_NO_ROOM = re.compile(r"Resources required for each replica: (\{.*?\}), total resources available: (\{.*?\})\.")
"""Part of Serve's message about replicas for which the Ray cluster lacks resources."""
_TRACEBACK = "Traceback (most recent call last):"
_SERVE_RAISES = f"RuntimeError: {_TRACEBACK}"
"""Serve raises the traceback of a constructor as the text of an exception of its own."""
_REFUSAL = re.compile(r"^(?:deployments|service)\.[\w.]+: ", re.MULTILINE)
"""Prefix of a traceback's last line that is a sentence for the user, who needs nothing else of the traceback."""
_RAY_FRAME = re.compile(r'^  File "[^"]*/site-packages/ray/.*\n(?:    .*\n)*', re.MULTILINE)


def deploy(config: ServeDeploySchema) -> None:
    """Starts Serve, or changes what it runs, and returns before the deployments are ready."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if own_port() is not None:
        config = config.model_copy(update={"proxy_location": ProxyLocation.Disabled})
    deploy_apps(config)


def deployments_not_ready(config: ServeDeploySchema) -> Iterator[str]:
    """Yields the deployments that are still starting, twice a second, until every application runs.

    Raises:
        ServiceNotStarted: as `_Startup.observe`.
    """
    startup = _Startup([application.name for application in config.applications])
    while (starting := startup.observe(application_states(), time.monotonic())) is not None:
        yield starting
        time.sleep(_POLL_S)


class _Startup:
    """Classifies the states that Serve reports: ready, starting, or failed."""

    def __init__(self, application_names: list[str]) -> None:
        self._application_names = application_names
        self._without_room_since: dict[str, float] = {}
        """By deployment name; seconds of the caller's clock."""

    def observe(self, applications: Mapping[str, ApplicationStatusOverview], now: float) -> str | None:
        """The deployments that are still starting, for the user to read; `None` once every application runs.

        Raises:
            ServiceNotStarted: an application cannot be built, the constructor of a replica raised, or a deployment has
                waited `_ROOM_TIMEOUT_S` for resources that the Ray cluster does not have.
        """
        started = [applications[name] for name in self._application_names if name in applications]
        if failures := [failure for app in started for failure in _failures_of(app)]:
            raise ServiceNotStarted("\n".join(failures))
        if [app.status for app in started] == [ApplicationStatus.RUNNING] * len(self._application_names):
            return None
        starting = {
            name: deployment
            for app in started
            for name, deployment in app.deployments.items()
            if deployment.status != "HEALTHY"
        }
        without_room = {
            name: needs for name, deployment in starting.items() if (needs := _missing_room(name, deployment))
        }
        self._without_room_since = {name: self._without_room_since.get(name, now) for name in without_room}
        for name, since in self._without_room_since.items():
            if now - since >= _ROOM_TIMEOUT_S:
                raise ServiceNotStarted(f"Given up after {now - since:.0f} s: {without_room[name]}.\n{_HINT}")
        return ", ".join(without_room.get(name, name) for name in starting) or "Ray Serve"


def _failures_of(app: ApplicationStatusOverview) -> list[str]:
    """Reasons why an application will not run: one for each failed deployment, or Serve's own for the application."""
    failed = [
        f"{name} failed to start. {_reason_in(deployment.message)}"
        for name, deployment in app.deployments.items()
        if deployment.status == "DEPLOY_FAILED"
        or (deployment.status == "UPDATING" and deployment.message.startswith(_REPLICA_FAILED))
    ]
    if app.status == ApplicationStatus.DEPLOY_FAILED and not failed:
        return [f"The application could not be built. {_reason_in(app.message)}"]
    return failed


def _missing_room(name: str, deployment: DeploymentStatusOverview) -> str | None:
    """The resources that a deployment waits for; `None` if the Ray cluster has them free."""
    if (match := _NO_ROOM.search(deployment.message)) is None:
        return None
    required, available = json.loads(match[1]), json.loads(match[2])
    # Serve also writes this message while the process of a replica that has its room starts slowly.
    missing = {resource: amount for resource, amount in required.items() if amount > available.get(resource, 0)}
    if not missing:
        return None
    asked = " and ".join(f"{amount:g} {resource}" for resource, amount in missing.items())
    free = " and ".join(f"{available.get(resource, 0):g} {resource}" for resource in missing)
    return f"{name} waits for room: a replica asks for {asked}, free are {free}"


def _reason_in(message: str) -> str:
    """The user's part of the traceback in Serve's message, without Ray's frames; a message without one unchanged.

    For a refusal by the service itself it is the sentence alone.
    """
    if refusals := [*_REFUSAL.finditer(message)]:
        return message[refusals[-1].end() :].strip()
    start = message.rfind(_SERVE_RAISES)
    start = message.find(_TRACEBACK, max(start, 0))
    return _RAY_FRAME.sub("", message[start:] if start >= 0 else message).strip()
