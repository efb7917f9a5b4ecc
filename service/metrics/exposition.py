"""The metrics of all replicas, from Ray's exporter on each node, whichever ingress replica asks; merged into one text.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. All lines of one
metric must stand together.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import httpx
import ray

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
    return await asyncio.to_thread(merged, expositions, _PREFIXES)


def merged(expositions: Iterable[str], prefixes: tuple[str, ...]) -> str:
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
