"""All metrics of one ingress replica: its rollouts, its requests, and gauges of what it has under way.

Of requests: how many each route gets, how they are answered, and how long that takes. The gauges are read periodically,
and say too how long the event loop is held up.

`all_metrics` gathers those of all replicas from Ray's exporter on each node, whichever ingress replica asks. Source of
their format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. All lines of one metric
must stand together.
"""

import asyncio
import logging
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import ray
from ray.serve.metrics import Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.instruments import Instrument, SummedCounter, SummedHistogram, flush_periodically
from deployments.upstream.ray_serve.serve_internals import metrics_report_interval_s
from service.metrics.rollout_metrics import SECONDS, RolloutMetrics
from service.scheduling.fair_queue import counts_by_priority

if TYPE_CHECKING:
    from service.admission.admission import Admission
    from service.remote.generator import RemoteGenerator
    from service.remote.policy import RemotePolicy

NO_ROUTE = "none"
"""Tag for paths without a route: a caller must not be able to add tags."""


class HttpMetrics:
    """Request metrics of one ingress replica. Refused requests are those with a status of 400 and more."""

    def __init__(self) -> None:
        self._requests = SummedCounter(
            "rollout_http_requests_total", "Requests that were answered.", ("route", "method", "status")
        )
        self._seconds = SummedHistogram(
            "rollout_http_request_seconds", "Time until the end of the response.", SECONDS, ("route", "method")
        )
        self.instruments: tuple[Instrument, ...] = self._requests, self._seconds
        """Instruments to flush."""

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.add(1, route, method, str(status))
        self._seconds.observe(seconds, route, method)


class HttpMetricsMiddleware:
    """Tells `HttpMetrics` of each request, under the path of its route without `/v1`."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = monotonic(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE).removeprefix("/v1")
            self._metrics.answered(route, scope["method"], status, monotonic() - began)


SNAPSHOT_EVERY_S = 1.0
"""Ray's shortest interval of exports. Its exporter forgets a gauge that was not set for two of its intervals."""
SLEEP_S = 0.1
_PROGRAMS = {
    "kept": "Rollouts of several turns that are idle and keep a place in a KV cache.",
    "parked": "Generations of rollouts of several turns that wait for a place in a KV cache.",
}
GAPS = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5]


class IngressGauges:
    """Gauges of what one ingress replica has under way: of its admission, its generator and its policies."""

    def __init__(self, admission: "Admission", generator: "RemoteGenerator", policy: "RemotePolicy") -> None:
        self._admission = admission
        self._generator = generator
        self._policy = policy
        self._in_flight = Gauge("rollout_in_flight", description="Rollouts in flight.")
        self._waiting = Gauge("rollout_waiting_generations", description="Generations that wait for their turn.")
        self._waiting_by_priority = Gauge(
            "rollout_waiting_by_priority",
            description="Generations that wait for their turn, by the priority of their request.",
            tag_keys=("priority",),
        )
        self._kept, self._parked = (
            Gauge(f"rollout_{state}_programs", description=description, tag_keys=("generator",))
            for state, description in _PROGRAMS.items()
        )
        self._version = Gauge("rollout_policy_version", description="Current version.", tag_keys=("policy",))
        self._age = Gauge(
            "rollout_policy_age_seconds",
            description="Time since the current version was first seen here.",
            tag_keys=("policy",),
        )
        self.gap = SummedHistogram(
            "rollout_event_loop_gap_seconds", "How much later than it was due the event loop came to a timer.", GAPS
        )
        """Must be flushed."""
        self._seen: dict[str, tuple[int, float]] = {}
        """By policy, its version and the moment when that was seen first."""

    async def export(self) -> None:
        """Sets the gauges periodically, for the life of the replica."""
        next_snapshot = monotonic()
        while True:
            due = monotonic() + SLEEP_S
            await asyncio.sleep(SLEEP_S)
            now = monotonic()
            self.gap.observe(now - due)
            if now >= next_snapshot:
                self.set(now)
                next_snapshot = now + SNAPSHOT_EVERY_S

    def set(self, now_s: float) -> None:
        self._in_flight.set(self._admission.in_flight.rollouts)
        self._waiting.set(self._generator.waiting_generations)
        # Of each priority, also those for which none waits.
        for priority, waiting in counts_by_priority(self._generator.waiting_by_weight).items():
            self._waiting_by_priority.set(waiting, {"priority": priority})
        for generator, (kept, parked) in self._generator.programs().items():
            self._kept.set(kept, {"generator": generator})
            self._parked.set(parked, {"generator": generator})
        for policy, version in self._policy.known_versions.items():
            if self._seen.get(policy, (None,))[0] != version:
                self._seen[policy] = version, now_s
            tags = {"policy": policy}
            self._version.set(version, tags)
            self._age.set(now_s - self._seen[policy][1], tags)


def export(rollouts: RolloutMetrics, http: HttpMetrics, gauges: IngressGauges) -> "list[asyncio.Task[None]]":
    """Starts the tasks that give Ray what was counted, and the gauges, for the life of the replica."""
    instruments = (*rollouts.instruments, *http.instruments, gauges.gap)
    return [
        asyncio.create_task(flush_periodically(instruments, metrics_report_interval_s())),
        asyncio.create_task(gauges.export()),
    ]


_PREFIXES = ("ray_rollout_", "ray_vllm_", "ray_serve_")
"""Prefixes of the metrics of rollouts, engines and Ray Serve. Ray's exporters have many more, of its own."""
_TIMEOUT_S = 5.0
logger = logging.getLogger("rollout_service.metrics")


_FAMILY = "\n# HELP "
"""Before the name of each metric, its description and its type, each in a line, and its samples."""


class ExportersLost(Exception):
    """No node's exporter answers."""


async def all_metrics() -> str:
    """In Prometheus' text format. A node that does not answer is left out, and logged.

    Raises:
        ExportersLost: no node answers.
    """
    urls = await asyncio.to_thread(_exporter_urls)
    # Exporters speak plain HTTP: to load certificates for each client would take the event loop tens of milliseconds.
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=False) as client:
        answers = await asyncio.gather(*(_exposition_of(client, url) for url in urls))
    expositions = [answer for answer in answers if answer is not None]
    if not expositions:
        raise ExportersLost(f"none of {len(urls)} nodes answers with its metrics")
    return await asyncio.to_thread(_merged, expositions, _PREFIXES)


def _merged(expositions: Iterable[str], prefixes: tuple[str, ...]) -> str:
    """The metrics whose names begin with one of `prefixes`, those of one name together, in the order of names."""
    families: dict[str, list[str]] = {}
    for exposition in expositions:
        for family in f"\n{exposition}".rstrip("\n").split(_FAMILY)[1:]:
            name = family.split(" ", 1)[0]
            if name.startswith(prefixes):
                description, kind, *samples = family.split("\n")
                families.setdefault(name, [f"# HELP {description}", kind]).extend(samples)
    return "".join(f"{line}\n" for name in sorted(families) for line in families[name])


def _exporter_urls() -> list[str]:
    """URLs of the exporters of all live nodes."""
    nodes: Any = ray.nodes
    addresses = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes() if node["Alive"]]
    return [
        f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        for host, port in addresses
    ]


async def _exposition_of(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        return (await client.get(url)).raise_for_status().text
    except httpx.HTTPError as error:
        logger.warning("The metrics of a node are missing: %s does not answer: %r", url, error)
        return None
